"""The optimum against a search, the simulation against Daly's exact model, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stability.checkpoints.cadence import command, formulas
from megatron_stability.checkpoints.cadence.formulas import Costs
from megatron_stability.errors import UsageError
from megatron_stability.ledger import ledger
from megatron_stability.records import Action, Decision, StepRecord

BASIC = ["--save-seconds", "40", "--restart-seconds", "600"]


@given(M=st.floats(1e3, 1e6), ratio=st.floats(1e-5, 0.3))
def test_daly_is_near_the_optimum_of_the_exact_model(M: float, ratio: float) -> None:
    C = M * ratio
    best = min(formulas.expected_lost_share(T, C, 0.0, M) for T in [M * 1.02**k for k in range(-500, 120)])
    assert formulas.expected_lost_share(formulas.daly(C, M), C, 0.0, M) <= best * 1.01 + 1e-9


def test_daly_meets_young_for_cheap_saves_and_the_mtbf_for_dear_ones() -> None:
    assert formulas.daly(1e-3, 1e6) == pytest.approx(formulas.young(1e-3, 1e6), rel=1e-4)
    assert formulas.daly(2e3, 1e3) == formulas.daly(5e3, 1e3) == 1e3


@pytest.mark.parametrize(("C", "R", "M"), [(40.0, 0.0, 28800.0), (40.0, 600.0, 28800.0), (5.0, 60.0, 3600.0)])
def test_the_simulation_agrees_with_the_exact_model(C: float, R: float, M: float) -> None:
    costs = Costs(save_s=C, mtbf_s=M, restart_s=R)
    for T in (formulas.daly(C, M) / 4, formulas.daly(C, M), formulas.daly(C, M) * 4):
        simulated = formulas.simulated_lost_shares(costs, [T], seed=1)[0]
        assert simulated == pytest.approx(formulas.expected_lost_share(T, C, R, M), rel=0.03)


def test_detection_delay_costs_its_share_and_the_seed_decides() -> None:
    quick, late = (Costs(save_s=10, mtbf_s=7200, silent=s, delay_s=1800) for s in (0.0, 0.5))
    T = [formulas.daly(10, 7200)]
    assert formulas.simulated_lost_shares(late, T, 3) == formulas.simulated_lost_shares(late, T, 3)
    useful = [1 - formulas.simulated_lost_shares(costs, T, 3)[0] for costs in (quick, late)]
    assert useful[0] / useful[1] == pytest.approx((7200 + 0.5 * 1800) / 7200, rel=0.02)


def test_json_names_the_least_lost_hours(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "cadence.html"
    argv = [*BASIC, "--mtbf-hours", "8", "--step-seconds", "6", "--json", "--out", str(page)]
    assert command.run(argv) == 0
    document = json.loads(capsys.readouterr().out)
    least = min(point["lost_hours"] for point in document["curve"])
    assert document["intervals"]["simulated"]["lost_hours"] == pytest.approx(least)
    assert document["intervals"]["young"]["seconds"] == pytest.approx((2 * 40 * 28800) ** 0.5)
    assert document["intervals"]["daly"]["steps"] == round(document["intervals"]["daly"]["seconds"] / 6)
    assert "lost hours" in page.read_text()


def test_failures_are_counted_in_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = ledger.RunInfo(mode="act", versions={}, layout={})
    for resumed in (0, 50):
        with ledger.Ledger.open(tmp_path, resume_step=resumed, resume_sample=resumed * 8, run_info=info) as book:
            for step in range(resumed + 1, resumed + 101):
                record = StepRecord(
                    step=step, first_sample=step * 8 - 8, samples=8, tokens=1.0, loss=1.0, grad_norm=1.0
                )
                book.write(record, Decision(step=step, action=Action.APPLY, advised=Action.APPLY, reason=""))
    argv = [*BASIC, "--ledger", str(tmp_path), "--step-seconds", "3", "--json"]
    assert command.run(argv) == 0
    assert json.loads(capsys.readouterr().out)["costs"]["mtbf_s"] == 200 * 3 / 1


def test_costs_are_measured_by_the_times_of_a_ledgers_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 2 s, a save 5 s of its own and 0.5 s of each of the two steps after it, a restart 60 s."""
    now = [1000.0]
    monkeypatch.setattr(ledger.time, "time", lambda: now[0])
    info = ledger.RunInfo(mode="act", versions={}, layout={})
    for resumed in (0, 20, 40):
        now[0] += 60 if resumed else 0
        with ledger.Ledger.open(tmp_path, resume_step=resumed, resume_sample=resumed * 8, run_info=info) as book:
            for step in range(resumed + 1, resumed + 26):
                now[0] += 2.5 if step % 10 in (2, 3) and step > 10 else 2.0
                record = StepRecord(
                    step=step, first_sample=step * 8 - 8, samples=8, tokens=1.0, loss=1.0, grad_norm=1.0
                )
                book.write(record, Decision(step=step, action=Action.APPLY, advised=Action.APPLY, reason=""))
                if step % 10 == 0:
                    book.saving(step)
                    now[0] += 5.0
    assert command.run(["--ledger", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    costs = document["costs"]
    assert (costs["save_s"], costs["interference_s"], costs["restart_s"]) == (5.0, 1.0, 60.0)
    assert costs["mtbf_s"] == pytest.approx((3 * (25 * 2.0 + 2 * 5.0) + 5 * 2 * 0.5) / 2, abs=2)
    assert document["intervals"]["daly"]["steps"] == round(document["intervals"]["daly"]["seconds"] / 2)
    with pytest.raises(UsageError, match="--save-seconds"):
        command.run(["--mtbf-hours", "8"])


@pytest.mark.parametrize(
    ("restart", "told"), [([], "restart not measured"), (["--restart-seconds", "0"], "restart 0 s")]
)
def test_a_restart_that_nobody_measured_is_not_said_to_take_no_time(
    restart: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(["--save-seconds", "40", "--mtbf-hours", "8", *restart]) == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ([], "--mtbf-hours"),
        (["--mtbf-hours", "0"], "--mtbf-hours"),
        (["--mtbf-hours", "nan"], "--mtbf-hours"),
        (["--mtbf-hours", "1e300"], "--mtbf-hours"),
        (["--mtbf-hours", "8", "--seed", "-1"], "--seed"),
        (["--mtbf-hours", "8", "--out", "runs/ledger.jsonl"], "--out"),
        (["--mtbf-hours", "8", "--out", "/dev/null/x.html"], "--out"),
        (["--mtbf-hours", "8", "--silent-share", "2"], "--silent-share"),
        (["--mtbf-hours", "8", "--detection-delay-seconds", "-1"], "--detection-delay-seconds"),
    ],
)
def test_bad_input_is_one_sentence(extra: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        command.run([*BASIC, *extra])
