"""The comparison's arithmetic, gate and refusals, on made-up ledgers."""

from __future__ import annotations

import json
import math
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.fp8_compare import command
from megatron_stability.fp8_compare.criteria import compare, windows
from megatron_stability.fp8_compare.figures import RunFigures, relative_errors
from megatron_stability.fp8_compare.gates import Gates
from megatron_stability.ledger.entries import StepEntry
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.ledger.sketches import Sketch
from megatron_stability.records import Action, Decision, StepRecord
from megatron_stability.sites import Site

FP8 = {"fp8/gemms": 24.0, "fp8/fallbacks": 0.0, "fp8/underflow": 0.01, "fp8/saturation": 0.0}


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
    bare = RunFigures(name=name, steps=entries, held_out=2.0, data={"seed": str(seed // 10), "data_path": "x"})
    return sketched(bare, 0.0)


def sketched(run: RunFigures, turn: float, start: float = 1.0, cut: str = "7") -> RunFigures:
    """Gradients of row 1 turned by an angle (radians) from step 2 on, of row 0 as they were."""

    def at(n: int) -> Sketch:
        gradient = ((1.0, 0.0), (math.cos(turn), math.sin(turn)) if n >= 2 else (1.0, 0.0))
        return Sketch((cut, cut), ((start, 1.0), (1.0 - n * gradient[1][0], -n * gradient[1][1])), gradient)

    return replace(run, sketches={n: at(n) for n in (1, 2, 40)})


def test_a_shift_beyond_the_gate_is_a_finding_and_one_below_is_not() -> None:
    control = run_of("bf16", 1.0)
    good = compare(run_of("fp8", 1.002, FP8, seed=1), control, None, 100, Gates())
    assert good["findings"] == []
    assert good["loss_error_mean"] == pytest.approx(0.002, rel=0.05)
    assert good["tokens"] == 300 * 512
    bad = compare(run_of("fp8", 0.997, FP8, seed=1), control, None, 100, Gates())
    assert "-0.3" in bad["findings"][0]
    assert "153,600 tokens" in bad["findings"][0]


def test_a_late_departure_fails_though_the_mean_is_within_the_gate() -> None:
    control, late = run_of("bf16", 1.0), run_of("fp8", 1.0, FP8)
    steps = [replace_loss(s, 1.006) if s.step > 250 else s for s in late.steps]
    result = compare(replace(late, steps=steps), control, None, 100, Gates())
    assert abs(result["loss_error_mean"]) < 0.0025
    assert (result["loss_error_worst"]["first_step"], result["loss_error_worst"]["last_step"]) == (251, 300)
    assert result["findings"]


def replace_loss(entry: StepEntry, factor: float) -> StepEntry:
    return entry.model_copy(update={"loss": entry.loss * factor})


def test_windows_cover_every_step_after_warmup_once() -> None:
    errors = [(n, float(n)) for n in range(1, 24)]
    assert windows(errors, 3, 5) == [(4, 8, 6.0), (9, 13, 11.0), (14, 18, 16.0), (19, 23, 21.0)]
    assert windows(errors, 3, 100) == [(4, 23, 13.5)]


@pytest.mark.parametrize("at", [150, 300])
def test_a_loss_that_is_not_a_number_fails_the_gate(at: int) -> None:
    broken = run_of("fp8", 1.0, FP8)
    steps = [s if s.step != at else s.model_copy(update={"loss": math.nan}) for s in broken.steps]
    result = compare(replace(broken, steps=steps), run_of("bf16", 1.0), None, 100, Gates())
    assert result["findings"]
    json.dumps(result, allow_nan=False)


def test_a_run_that_was_halted_fails_however_good_its_loss() -> None:
    run = run_of("fp8", 1.0, FP8, steps=200)
    halted = run.steps[-1].model_copy(update={"fate": "halted", "action": Action.HALT, "reason": "saturation"})
    result = compare(replace(run, steps=[*run.steps[:-1], halted]), run_of("bf16", 1.0), None, 100, Gates())
    assert result["findings"] == ["fp8 was halted at step 200: saturation"]
    assert result["steps_of"] == {"fp8": 200, "control": 300}


def test_case_35_losses_of_3_148_and_3_054_are_not_equal() -> None:
    fp8 = RunFigures(name="fp8", steps=[step(n, 3.148, FP8) for n in range(1, 1001)])
    control = RunFigures(name="bf16", steps=[step(n, 3.054) for n in range(1, 1001)])
    result = compare(fp8, control, None, 100, Gates())
    assert result["loss_error_mean"] == pytest.approx(0.0308, abs=1e-4)
    assert "gate of 0.2500%" in result["findings"][0]


def test_what_two_seeds_differ_by_is_no_finding_against_fp8() -> None:
    control, noise = run_of("bf16", 1.0), run_of("seed 2", 1.004, seed=20)
    for factor, fails in ((1.0035, False), (1.006, True)):
        result = compare(run_of("fp8", factor, FP8, seed=3), control, noise, 100, Gates())
        assert result["noise"]["worst"]["error"] == pytest.approx(0.004, rel=0.1)
        assert bool(result["findings"]) is fails
        assert compare(run_of("fp8", factor, FP8, seed=3), control, None, 100, Gates())["findings"]


def test_held_out_loss_and_speed_have_gates() -> None:
    control = replace(run_of("bf16", 1.0), held_out=2.0, step_seconds=1.0)
    fp8 = replace(run_of("fp8", 1.0, FP8), held_out=2.02, step_seconds=0.8)
    result = compare(fp8, control, None, 100, Gates(slowdown=1.0))
    assert [f[:24] for f in result["findings"]] == ["held-out loss is +1.0000"]
    assert result["tokens_per_second"] == {"fp8": 640.0, "control": 512.0}
    noise = replace(run_of("seed 2", 1.0, seed=20), held_out=1.97)
    assert compare(fp8, control, noise, 100, Gates())["findings"] == [], "two seeds differ by more"
    assert "0.80x" in compare(fp8, control, noise, 100, Gates(slowdown=0.5))["findings"][0]
    blank = replace(fp8, held_out=None, step_seconds=None)
    unknown = compare(blank, control, None, 100, Gates(slowdown=1.0))
    assert [f.split(" was")[0] for f in unknown["findings"]] == ["held-out loss", "time a step"]


@pytest.mark.parametrize(
    ("signal", "healthy", "broken", "says"),
    [
        ("binades", 14.5, 6.8, "6.8 binades to normal values, first at layer 3 linear_fc1 input"),
        ("underflow", 0.01, 0.4, "40.00% of a tensor's non-zero elements became zero, first at layer 3"),
        ("saturation", 0.0, 0.02, "2.00% of a tensor's elements were cut off, first at layer 3"),
    ],
)
def test_telemetry_sees_what_a_small_models_loss_does_not(
    signal: str, healthy: float, broken: float, says: str
) -> None:
    place = {f"fp8/{signal}/at": Site(3, "linear_fc1", "input").order}
    good = run_of("fp8", 1.0, FP8 | {f"fp8/{signal}": healthy})
    bad = run_of("fp8", 1.0, FP8 | {f"fp8/{signal}": broken} | place)
    early = replace(bad, steps=[*bad.steps[:200], *good.steps[200:]])
    control = run_of("bf16", 1.0)
    assert compare(good, control, None, 100, Gates())["findings"] == []
    assert compare(early, control, None, 200, Gates())["findings"] == [], "warmup is left out"
    (finding,) = compare(bad, control, None, 100, Gates())["findings"]
    assert says in finding


def test_gradients_that_turn_away_fail_and_name_the_first_layer_that_departs() -> None:
    fp8, control = run_of("fp8", 1.0, FP8), sketched(run_of("bf16", 1.0), 0.0)
    good = compare(sketched(fp8, 0.3), control, None, 100, Gates())
    assert (good["findings"], good["first_departure"]) == ([], None)
    assert good["updates"][1]["gradient_cosine"] == [1.0, pytest.approx(math.cos(0.3))]
    assert good["updates"][0]["update_cosine"] is None
    assert 0.9 < good["updates"][2]["update_cosine"][1] < 1
    bad = compare(sketched(fp8, 1.0), control, None, 100, Gates())
    assert bad["first_departure"] == {"step": 2, "layer": 1, "gradient_cosine": pytest.approx(math.cos(1.0))}
    assert "gradients of layer 1 in step 2 have a cosine of 0.540" in bad["findings"][0]


def test_smoothing_is_the_exponential_average_of_both() -> None:
    a = RunFigures(name="a", steps=[step(1, 2.0), step(2, 4.0)])
    b = RunFigures(name="b", steps=[step(1, 1.0), step(2, 1.0)])
    assert relative_errors(a, b) == [(1, 1.0), (2, pytest.approx(1.2))]


BF16, RUN = run_of("y", 1.0), run_of("x", 1.0, FP8)
PARTLY = replace(BF16, steps=[*BF16.steps[:-1], step(300, 2.0, FP8)])


@pytest.mark.parametrize(
    ("fp8", "control", "says"),
    [
        (run_of("x", 1.0), BF16, "FP8 was not active"),
        (replace(RUN, steps=[]), BF16, "x: its ledger has no step"),
        (RUN, replace(BF16, steps=[]), "y: its ledger has no step"),
        (RUN, run_of("y", math.nan, fate="skipped"), "y has no finite loss after the 100 steps"),
        (run_of("x", 1.0, {"fp8/gemms": 24.0, "fp8/fallbacks": 24.0}), BF16, "FP8 was not active"),
        (RUN, run_of("y", 1.0, FP8), "y is no BF16 run"),
        (RUN, PARTLY, "y is no BF16 run"),
        (run_of("x", 1.0, FP8, samples=4), BF16, "same samples in step 1"),
        (run_of("x", 1.0, FP8, tokens=1.0), BF16, "same samples in step 1"),
        (run_of("x", 1.0, FP8, steps=100), BF16, "share 100 steps"),
        (RUN, replace(BF16, data=BF16.data | {"data_path": "z"}), "differ in data_path"),
        (RUN, run_of("y", math.inf), "y has a loss of inf in step 1; a control must be healthy"),
        (RUN, run_of("y", 1.0, fate="halted"), "y was halted at step 300"),
        (sketched(RUN, 0.0), sketched(BF16, 0.0, start=1.01), "did not begin with the same weights"),
        (sketched(RUN, 0.0), sketched(BF16, 0.0, cut="8"), "cut their weights over ranks differently"),
    ],
)
def test_refuses_what_it_cannot_compare(fp8: RunFigures, control: RunFigures, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        compare(fp8, control, None, 100, Gates())


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        (run_of("z", 1.0, seed=1), "z has the seed of y, 0"),
        (run_of("z", 1.0, FP8, seed=20), "z is no BF16 run"),
        (run_of("z", math.nan, seed=20, fate="skipped"), "z has no finite loss after the 100 steps"),
        (run_of("z", 1.0, seed=20, steps=50), "z has not more steps than the 100"),
        (replace(run_of("z", 1.0, seed=20), data={"seed": "2", "data_path": "w"}), "differ in data_path"),
    ],
)
def test_refuses_noise_that_is_none(noise: RunFigures, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        compare(RUN, BF16, noise, 100, Gates())


def write(folder: Path, factor: float, signals: dict[str, float], seed: str = "1") -> None:
    info = RunInfo(mode="act", versions={}, layout={"world_size": 1}, data={"seed": seed})
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
    without = ["--without", "cosine", "--without", "held-out"]
    assert command.run([str(tmp_path / "good"), str(tmp_path / "bf16"), *arguments, *without]) == 0
    assert "120 steps, 61,440 tokens, 20 steps of warmup, FP8 in 100% of linears" in capsys.readouterr().out
    assert json.loads(figures.read_text())["findings"] == []
    assert page.stat().st_size > 10_000
    assert command.run([str(tmp_path / "bad"), str(tmp_path / "bf16"), "--warmup", "20"]) == 1
    assert "FINDING" in capsys.readouterr().out
    with pytest.raises(UsageError, match="two run folders"):
        command.run([str(tmp_path / "bad")])
    for flag, value in (
        ("--max-loss-error", "nan"),
        ("--min-cosine", "nan"),
        ("--min-binades", "inf"),
        ("--warmup", "-1"),
        ("--window", "0"),
        ("--html", "ledger.jsonl"),
        ("--json", str(tmp_path / "bad" / "ledger.jsonl")),
        ("--json", "/proc/nowhere/x.json"),
        ("--nproc", "2"),
        ("--emulate", "delayed"),
    ):
        with pytest.raises(UsageError, match=flag):
            command.run([str(tmp_path / "bad"), str(tmp_path / "bf16"), "--warmup", "20", flag, value])
    ledger = tmp_path / "bad" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b"512", b"513", 1))
    with pytest.raises(UsageError, match="is damaged"):
        command.run([str(tmp_path / "bad"), str(tmp_path / "bf16")])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give pretrain's flags after --"),
        (("--",), "give pretrain's flags after --"),
        (("runs/fp8", "--", "--num-layers", "4"), "leave run folders and --noise out"),
        (("--nproc", "0", "--", "--num-layers", "4"), "--nproc 0"),
        (("--emulate", "none", "--", "--num-layers", "4"), "--emulate none"),
        (("--json", "figures.txt", "--", "--num-layers", "4"), "ends in .json"),
        (("--json", f"{__file__}/figures.json", "--", "--num-layers", "4"), "cannot be written"),
        (("--", "--save", "x"), "--save after --"),
        (("--", "--fp8-format=hybrid"), "--fp8-format after --"),
        (("--", "--stability-fp8-emulate", "delayed"), "give --emulate"),
    ],
)
def test_runs_that_cannot_be_started_leave_nothing_behind(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=says):
        command.run(["--out", str(out), *words])
    assert not out.exists()


def test_runs_are_started_alike_but_for_what_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    codes = {"bf16": 0, "fp8": 18, "noise": 0}  # 18: its policy halted the FP8 run, which its ledger says

    def train(words: list[str], **_: Any) -> Any:
        folder = Path(words[words.index("--stability-record-dir") + 1])
        started.append(words)
        factor, signals = (1.0, FP8) if folder.name == "fp8" else (1.001, {})
        write(folder, factor, signals, seed=words[words.index("--seed") + 1] if "--seed" in words else "1")
        return subprocess.CompletedProcess(words, codes[folder.name])

    monkeypatch.setattr(subprocess, "run", train)
    own = [
        "--without",
        "cosine",
        "--without",
        "held-out",
        "--emulate",
        "delayed",
        "--noise-seed",
        "2",
        "--warmup",
        "20",
        "--fp8-flags",
        "--fp8-margin 1",
        "--nproc",
        "2",
    ]
    flags = ["--", "--num-layers", "4", "--train-iters", "120"]
    assert command.run(["--out", str(tmp_path / "a"), *own, *flags]) == 0
    bf16, fp8, noise = ([word for word in words if str(tmp_path) not in word] for words in started)
    history = ["--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max"]
    assert [*bf16, "--stability-fp8-emulate", "delayed", *history, "--fp8-margin", "1"] == fp8
    assert [*bf16, "--seed", "2"] == noise
    assert bf16[bf16.index("--stability-observe-sketch-every") + 1] == "2"
    with pytest.raises(UsageError, match="bf16 holds a run already"):
        command.run(["--out", str(tmp_path / "a"), *own, *flags])
    codes["fp8"] = 1
    with pytest.raises(UsageError, match="the fp8 run ended with exit code 1: it said nothing; its log is"):
        command.run(["--out", str(tmp_path / "b"), *own, *flags])
