"""The proof's arithmetic: LR sensitivity, departures from a twin, claims that can fail, and a page with every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.proof import __main__ as proof
from benchmarks.proof import page
from benchmarks.proof.experiments import EXPERIMENTS, Claim, of, sensitivity
from tests.unit.explain.runs import Run, at, view


def row(arm: str, value: str, final: float | None, seed: int = 1, **more: Any) -> dict[str, Any]:
    return {"arm": arm, "value": value, "seed": seed, "first_loss": 5.0, "final_loss": final, "max_logit": 10.0, **more}


def test_sensitivity_is_that_of_its_definition() -> None:
    rows = [row("a", "1e-3", 2.0), row("a", "1e-2", 3.0), row("a", "1e-1", 9.0), row("b", "1e-3", 2.0)]
    assert sensitivity(rows, "a", 1) == pytest.approx((2.0 + 3.0 + 5.0) / 3 - 2.0), (
        "no loss counts for more than the first"
    )
    assert sensitivity([*rows, row("a", "1", None)], "a", 1) == pytest.approx((2 + 3 + 5 + 5) / 4 - 2)
    assert sensitivity(rows, "b", 1) == 0.0


def test_a_run_departs_where_it_stays_above_its_twin() -> None:
    twin: list[float | None] = [3.0] * 100
    spike = [3.0] * 50 + [9.0] + [3.0] * 49
    risen = [3.0] * 50 + [3.2] * 50
    assert proof.departs(list(spike), twin) is None
    assert proof.departs(list(risen), twin) == 53, "medians of five: the third step above"
    assert proof.departs([3.0] * 60 + [None] * 40, twin) == 63
    assert proof.departs([3.05] * 100, twin) is None


def test_figures_are_read_off_the_ledger() -> None:
    skip = at(120, action="skip", fate="skipped")
    found = proof.figures(view(Run(wrong=skip)))
    assert found["withheld"] == 1
    assert found["max_logit"] == pytest.approx(8.0, abs=1)
    assert found["log_z"] == pytest.approx(0.3)
    assert found["final_loss"] == pytest.approx(3.1, abs=0.1)
    assert (found["held_out"], found["first_fp8_verdict"]) == (None, None)
    assert len(found["losses"]) == 160


def test_claims_can_fail() -> None:
    def rows(**losses: float) -> list[dict[str, Any]]:
        return [
            row(arm, v, losses[arm] * (1 + (v == "1e-1")), max_logit=losses[arm])
            for arm in losses
            for v in ("1e-3", "1e-1")
        ]

    good = EXPERIMENTS["attention-logits"].claims(rows(none=2.0, **{"QK-norm": 0.5, "QK-clip": 1.0}))
    bad = EXPERIMENTS["attention-logits"].claims(rows(none=0.5, **{"QK-norm": 2.0, "QK-clip": 1.0}))
    assert [claim.holds for claim in good] == [True, True, True]
    assert [claim.holds for claim in bad] == [False, False, False]


def test_the_page_has_every_arm_and_what_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "proof.md")
    monkeypatch.setattr(page, "FIGURE", tmp_path / "proof.svg")
    (tmp_path / "r.json").write_text('{"of": {"commit": "abc1234"}}')
    experiment = EXPERIMENTS["attention-logits"]
    rows = [row(arm, v, 2.5, seed=s) for arm in experiment.arms for v in experiment.sweep for s in (1, 2)]
    page.write({"attention-logits": rows}, {"attention-logits": [Claim("up is down", False)]}, tmp_path / "r.json")
    text = (tmp_path / "proof.md").read_text()
    assert "abc1234" in text
    assert "- **does not hold**: up is down" in text
    assert all(
        f"| {arm} | {value} | 2.5 ± 0 | 10 ± 0 |" in text for arm in experiment.arms for value in experiment.sweep
    )
    assert (tmp_path / "proof.svg").read_text().count("<polyline") == 2 * len(experiment.arms)


def test_every_run_of_an_experiment_is_another() -> None:
    for experiment in EXPERIMENTS.values():
        quick = list(experiment.runs(full=False, seeds=3))
        assert len({(arm, value, seed) for arm, value, seed, _ in quick}) == len(quick)
        assert len(quick) == 3 * len(experiment.arms) * len(experiment.sweep)
        assert len(list(experiment.runs(full=True, seeds=5))) > len(quick)
    assert of([row("a", "1", None)], "a", "final_loss") == [float("inf")]
