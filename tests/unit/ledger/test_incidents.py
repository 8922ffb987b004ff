"""Incidents: one number for what belongs together, and a page for what is large and lasts."""

from __future__ import annotations

from pathlib import Path

from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.decide.urgency import Stall, Urgency, urgency
from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.ledger.entries import read
from megatron_stability.ledger.incidents import Incident, incidents
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Decision, StepRecord, Tier
from tests.unit.steps import gauss, step


def record(number: int, rise: float = 0.0, norm: float = 1.0) -> StepRecord:
    return step(number, loss=2.0 + rise + gauss(number, 0.02), grad_norm=norm * (1.0 + gauss(number, 0.1, 1)))


def train(
    folder: Path, preset: str, records: list[StepRecord], later: list[StepRecord] | None = None, back_to: int = 0
) -> list[Incident]:
    """A run over records; a rewind goes back to a step and on over `later`; the ledger is told as by the runtime."""
    detectors = build(Detect())
    info = RunInfo(mode="act", versions={}, layout={})
    with Ledger.open(folder, resume_step=0, resume_sample=0, run_info=info) as ledger:
        of = Pipeline(
            lambda record: record,
            detectors,
            TablePolicy(Decide(preset=preset), "act"),
            (ledger,),
            Episodes(detectors, 50),
        )
        states = [of.state_dict()]
        at, rewound = 0, 0
        while at < len(records):
            seen, decision = of.decide(records[at])
            of.finish(seen, decision)
            at += 1
            if decision.action is Action.REWIND:
                rewound += 1
                of.load_state_dict(states[back_to] | {"policy": of.policy.state_dict()})
                ledger.rewind(back_to, back_to * 8, "a rewind")
                at, records = back_to, later or records
            elif decision.action is Action.HALT:
                break
            elif not rewound:
                states.append(of.state_dict())
    return incidents(read(folder).entries)


def test_one_divergence_is_one_incident_with_its_decisions_over_rewinds_until_the_halt(tmp_path: Path) -> None:
    lasting = [step(i, loss=float("nan")) if i >= 600 else record(i) for i in range(1, 700)]
    later = [step(i, loss=float("nan")) if i >= 607 else record(i) for i in range(1, 700)]  # the window is passed over
    (one,) = train(tmp_path, "field", lasting, later, back_to=590)
    assert (one.number, one.last_step, one.tier) == (600, 612, Tier.NON_FINITE)
    assert one.actions == (Action.HALT, Action.REWIND, Action.SKIP)
    assert {decision.generation for decision in one.decisions} == {1, 2, 3, 4}
    assert {episode.incident for episode in one.episodes.values()} == {600}
    assert one.page is not None


def test_a_single_withheld_step_is_for_the_digest_and_five_in_a_row_that_halt_are_a_page(tmp_path: Path) -> None:
    once = [record(i, norm=50.0 if i == 700 else 1.0) for i in range(1, 900)]
    (alone,) = train(tmp_path / "once", "safe", once)
    assert (alone.number, alone.tier, alone.actions, alone.page) == (700, Tier.LARGE, (Action.SKIP,), None)
    lasting = [step(i, loss=float("nan")) if i >= 700 else record(i) for i in range(1, 900)]
    (halted,) = train(tmp_path / "lasting", "safe", lasting)
    assert halted.actions == (Action.HALT, Action.SKIP)
    assert halted.page is not None


def test_a_divergence_that_nothing_acts_on_is_a_page_within_steps(tmp_path: Path) -> None:
    (one,) = train(tmp_path, "watch", [record(i, rise=3.0 * (i > 600)) for i in range(1, 700)])
    assert one.decisions == []
    assert one.page is not None
    assert 600 < one.page.last_step < 630


def test_far_apart_is_two_incidents(tmp_path: Path) -> None:
    records = [record(i, norm=50.0 if i in (700, 900) else 1.0) for i in range(1, 1000)]
    assert [each.number for each in train(tmp_path, "safe", records)] == [700, 900]


def test_a_stall_and_a_halt_that_was_only_advised_are_pages() -> None:
    assert urgency(Stall(last_step=7, seconds=900.0)) is Urgency.PAGE
    advised = Decision(step=1, action=Action.APPLY, advised=Action.HALT, reason="")
    assert urgency(advised) is Urgency.PAGE
    assert urgency(Decision(step=1, action=Action.SKIP, advised=Action.SKIP, reason="")) is Urgency.DIGEST
