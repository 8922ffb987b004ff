"""A few runs of the fault campaign, and proof that it can find something."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stability.decide.config import Decide
from megatron_stability.decide.policy import TablePolicy
from tests.drills import simulated
from tests.drills.simulated import Fault, Scenario, Stop

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


def test_the_campaign_sees_a_rank_that_decides_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TablePolicy] = []

    def one_only_observes(config: Decide, mode: str) -> TablePolicy:
        made.append(TablePolicy(config, "observe" if made else "act"))
        return made[-1]

    monkeypatch.setattr(simulated, "TablePolicy", one_only_observes)
    outcome = simulated.Job(Scenario(5, 2, 40, (Fault("nan", 30, 1),), ()), tmp_path).run()
    assert any("step 30" in found for found in outcome.disagreements)
