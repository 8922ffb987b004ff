"""The comparison's arithmetic, gate and refusals, on made-up ledgers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.compare import command
from megatron_stability.compare.figures import Gates, RunFigures, compare, relative_errors
from megatron_stability.errors import UsageError
from megatron_stability.record.entries import StepEntry
from megatron_stability.record.ledger import Ledger, RunInfo
from megatron_stability.records import Action, Decision, StepRecord

FP8 = {"fp8/gemms": 24.0, "fp8/fallbacks": 0.0}


def step(number: int, loss: float, signals: Any = None, **changes: Any) -> StepEntry:
    values: dict[str, Any] = {
        "generation": 1,
        "step": number,
        "first_sample": 8 * (number - 1),
        "samples": 8,
        "tokens": 512.0,
        "loss": loss,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "fate": "trained",
        "action": "apply",
        "advised": "apply",
        "signals": signals or {},
    }
    return StepEntry(**(values | changes))


def run_of(
    name: str, factor: float, signals: Any = None, steps: int = 300, seed: int = 0, **changes: Any
) -> RunFigures:
    noise = random.Random(seed)
    curve = [factor * (2 + 3 / n**0.5) * (1 + noise.gauss(0, 1e-4)) for n in range(1, steps + 1)]
    entries = [step(n, loss, signals, **changes) for n, loss in enumerate(curve, 1)]
    return RunFigures(name=name, steps=entries, data={"seed": "1", "data_path": "x"})


def test_a_shift_beyond_the_gate_is_a_finding_and_one_below_is_not() -> None:
    control = run_of("bf16", 1.0)
    good = compare(run_of("fp8", 1.002, FP8, seed=1), control, None, 100, Gates())
    assert good["findings"] == []
    assert good["loss_error_mean"] == pytest.approx(0.002, rel=0.05)
    assert good["tokens"] == 300 * 512
    bad = compare(run_of("fp8", 0.997, FP8, seed=1), control, None, 100, Gates())
    assert "-0.29" in bad["findings"][0]
    assert "153,600 tokens" in bad["findings"][0]


def test_a_loss_that_is_not_a_number_fails_the_gate() -> None:
    broken = run_of("fp8", 1.0, FP8)
    steps = [*broken.steps[:-1], step(300, float("nan"), FP8)]
    result = compare(RunFigures(name="fp8", steps=steps, data=broken.data), run_of("bf16", 1.0), None, 100, Gates())
    assert result["findings"]
    json.dumps(result, allow_nan=False)


def test_case_35_losses_of_3_148_and_3_054_are_not_equal() -> None:
    fp8 = RunFigures(name="fp8", steps=[step(n, 3.148, FP8) for n in range(1, 1001)])
    control = RunFigures(name="bf16", steps=[step(n, 3.054) for n in range(1, 1001)])
    result = compare(fp8, control, None, 100, Gates())
    assert result["loss_error_mean"] == pytest.approx(0.0308, abs=1e-4)
    assert "gate of 0.2500%" in result["findings"][0]


def test_noise_band_is_the_spread_of_a_second_seed() -> None:
    control = run_of("bf16", 1.0)
    noise = run_of("seed 2", 1.001, seed=5)
    noise = RunFigures(name="seed 2", steps=noise.steps, data=noise.data | {"seed": "2"})
    result = compare(run_of("fp8", 1.0, FP8, seed=3), control, noise, 100, Gates())
    assert result["noise"]["mean"] == pytest.approx(0.001, rel=0.1)


def test_smoothing_is_the_exponential_average_of_both() -> None:
    a = RunFigures(name="a", steps=[step(1, 2.0), step(2, 4.0)])
    b = RunFigures(name="b", steps=[step(1, 1.0), step(2, 1.0)])
    assert relative_errors(a, b) == [(1, 1.0), (2, pytest.approx(1.2))]


@pytest.mark.parametrize(
    ("fp8", "control", "says"),
    [
        (run_of("x", 1.0), run_of("y", 1.0), "FP8 was not active"),
        (run_of("x", 1.0, {"fp8/gemms": 24.0, "fp8/fallbacks": 24.0}), run_of("y", 1.0), "FP8 was not active"),
        (run_of("x", 1.0, FP8), run_of("y", 1.0, FP8), "y is no BF16 control"),
        (run_of("x", 1.0, FP8, samples=4), run_of("y", 1.0), "same samples in step 1"),
        (run_of("x", 1.0, FP8, tokens=1.0), run_of("y", 1.0), "same samples in step 1"),
        (run_of("x", 1.0, FP8, steps=100), run_of("y", 1.0), "share 100 steps"),
    ],
)
def test_refuses_what_it_cannot_compare(fp8: RunFigures, control: RunFigures, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        compare(fp8, control, None, 100, Gates())


def test_refuses_other_data() -> None:
    other = RunFigures(name="y", steps=run_of("y", 1.0).steps, data={"seed": "1", "data_path": "z"})
    with pytest.raises(UsageError, match="differ in data_path"):
        compare(run_of("x", 1.0, FP8), other, None, 100, Gates())


def write(folder: Path, factor: float, signals: dict[str, float]) -> None:
    info = RunInfo(mode="act", versions={}, layout={"world_size": 1}, data={"seed": "1"})
    with Ledger.open(folder, resume_step=0, resume_sample=0, run_info=info) as ledger:
        for n in range(1, 121):
            record = StepRecord(
                step=n,
                first_sample=8 * (n - 1),
                samples=8,
                tokens=512.0,
                loss=factor * (2 + 1 / n),
                grad_norm=1.0,
                signals=signals,
            )
            decision = Decision(step=n, action=Action.APPLY, advised=Action.APPLY, reason="")
            ledger.write(record, decision)


def test_the_command_on_two_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "bf16", 1.0, {})
    write(tmp_path / "good", 1.001, FP8)
    write(tmp_path / "bad", 1.01, FP8)
    page, figures = tmp_path / "c.html", tmp_path / "c.json"
    arguments = ["--warmup", "20", "--json", str(figures), "--html", str(page)]
    assert command.run([str(tmp_path / "good"), str(tmp_path / "bf16"), *arguments]) == 0
    assert "120 steps, 61,440 tokens, FP8 in 100% of linears" in capsys.readouterr().out
    assert json.loads(figures.read_text())["findings"] == []
    assert page.stat().st_size > 10_000
    assert command.run([str(tmp_path / "bad"), str(tmp_path / "bf16"), "--warmup", "20"]) == 1
    assert "FINDING" in capsys.readouterr().out
    with pytest.raises(UsageError, match="two run folders"):
        command.run([str(tmp_path / "bad")])
    for flag, value in (("--max-loss-error", "nan"), ("--warmup", "-1"), ("--html", "ledger.jsonl")):
        with pytest.raises(UsageError, match=flag):
            command.run([str(tmp_path / "bad"), str(tmp_path / "bf16"), flag, value])
