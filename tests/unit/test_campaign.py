"""A few runs of the fault campaign, and proof that it can find something."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stability.decide.config import Decide
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.observe.config import Replicas
from tests.campaign import presets, simulated
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


@pytest.mark.parametrize("preset", ["safe", "field"])
@pytest.mark.parametrize("seed", [1001])
def test_under_a_preset_ranks_agree_and_the_ledger_says_what_the_weights_are(
    preset: str, seed: int, tmp_path: Path
) -> None:
    assert presets.PresetJob(presets.draw(seed), tmp_path, preset).run()[:5] == CLEAN


@pytest.mark.parametrize(("preset", "rewinds"), [("safe", 0), ("field", 1)])
def test_a_divergence_is_undone_by_field_even_when_killed_in_it_and_told_by_safe(
    preset: str, rewinds: int, tmp_path: Path
) -> None:
    stops = Stop("kill", 63, "at the gate"), Stop("kill", 85, "after the update")
    scenario = Scenario(7, 3, 120, (Fault("divergence", 60, 0), Fault("nan", 90, 1)), stops)
    job = presets.PresetJob(scenario, tmp_path, preset)
    assert job.run()[:5] == CLEAN
    assert (job.rewinds, job.starts) == (rewinds, 3)


def test_a_level_of_the_data_costs_field_one_rewind_and_no_halt(tmp_path: Path) -> None:
    job = presets.PresetJob(Scenario(8, 2, 130, (Fault("level", 60, 0),), ()), tmp_path, "field")
    outcome = job.run()
    assert outcome[:5] == CLEAN
    assert (job.rewinds, outcome.halts) == (1, 0)


def test_the_campaign_sees_a_rank_that_goes_back_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewind = presets.PresetJob._rewind

    def one_keeps_its_weights(job: presets.PresetJob, step: int, decision: object, ranks: list[simulated.Rank]) -> None:
        kept = ranks[1].weights
        rewind(job, step, decision, ranks)  # type: ignore[arg-type]
        ranks[1].weights = kept

    monkeypatch.setattr(presets.PresetJob, "_rewind", one_keeps_its_weights)
    job = presets.PresetJob(Scenario(7, 3, 120, (Fault("divergence", 60, 0),), ()), tmp_path, "field")
    assert job.run()[:5] != CLEAN
