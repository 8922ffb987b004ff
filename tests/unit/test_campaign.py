"""A few runs of the fault campaign, and proof that it can find something."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stability.decide.config import Decide
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.observe.config import Replicas
from tests.campaign import simulated
from tests.campaign.simulated import Fault, Scenario, Stop

CLEAN = ([], [], [], [], True)


@pytest.mark.parametrize("seed", range(1001, 1006))
def test_ranks_agree_no_sample_is_lost_and_weights_equal_those_by_hand(seed: int, tmp_path: Path) -> None:
    assert simulated.Job(simulated.draw(seed), tmp_path).run()[:5] == CLEAN


def test_a_rank_that_goes_apart_is_named_and_the_run_still_ends_well(tmp_path: Path) -> None:
    stops = tuple(Stop("kill", 20 + 3 * i, phase) for i, phase in enumerate(simulated.PHASES))
    faults = (Fault("nan", 25, 0), Fault("wrong", 33, 2), Fault("x1000", 41, 3))
    outcome = simulated.Job(Scenario(5, 4, 60, faults, stops), tmp_path).run()
    assert outcome[:5] == CLEAN
    assert (outcome.skipped, outcome.halts, outcome.starts) == (2, 1, 6)


def test_no_planned_save_holds_what_a_wrong_rank_gave_to_all(tmp_path: Path) -> None:
    faults, killed = (Fault("wrong", 26, 2), Fault("nan", 40, 1)), (Stop("kill", 29, "at the gate"),)  # saved at 28
    outcome = simulated.Job(Scenario(6, 3, 50, faults, killed), tmp_path).run()
    assert (outcome[:5], outcome.halts, outcome.suspect) == (CLEAN, 1, 0)


def test_an_unplanned_save_of_a_wrong_rank_is_suspect_and_not_resumed_from(tmp_path: Path) -> None:
    faults, signalled = (Fault("wrong", 31, 2), Fault("nan", 40, 1)), (Stop("sigterm", 34),)
    outcome = simulated.Job(Scenario(6, 3, 50, faults, signalled), tmp_path).run()
    assert (outcome[:5], outcome.halts, outcome.suspect) == (CLEAN, 1, 1)


@pytest.mark.parametrize(("every", "due"), [(0, set()), (5, {5, 7, 10}), (1000, {7})])
def test_weights_are_compared_now_and_then_and_before_planned_saves(every: int, due: set[int]) -> None:
    replicas = Replicas(weights_every=every)
    assert {step for step in range(1, 11) if replicas.weights_due(step, saves=step == 7)} == due


def test_the_campaign_sees_a_rank_that_decides_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TablePolicy] = []

    def one_only_observes(config: Decide, mode: str) -> TablePolicy:
        made.append(TablePolicy(config, "observe" if made else "act"))
        return made[-1]

    monkeypatch.setattr(simulated, "TablePolicy", one_only_observes)
    outcome = simulated.Job(Scenario(5, 2, 40, (Fault("nan", 30, 1),), ()), tmp_path).run()
    assert any("step 30" in found for found in outcome.disagreements)
