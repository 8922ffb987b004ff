"""A rewind goes back behind the onset of what it undoes, not only behind the step at which that became certain."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from megatron_stability.decide.config import Decide, Gate, Rule
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.records import Action, Decision, StepRecord, Tier, Verdict
from tests.unit.steps import gauss, step

ONSET, SKIP_STEPS = 201, 8


def slow(nats_a_step: float, seed: int) -> Iterator[StepRecord]:
    """A loss that is level, and from ONSET on rises by so much each step."""
    for number in range(1, 400):
        loss = 3.0 + gauss(number, 0.02, seed) + nats_a_step * max(number - ONSET + 1, 0)
        yield step(number, loss=loss, grad_norm=1.0 + gauss(number, 0.05, seed + 1))


def first_rewind(records: Iterator[StepRecord], reload_at: int = 0) -> Decision:
    """Of preset `field`; at a step detectors and policy are saved and loaded, as a restart does."""
    decide = Decide.model_validate({"preset": "field"})
    detectors, policy = build(Detect()), TablePolicy(decide, "act")
    for record in records:
        if record.step == reload_at:
            states = [json.loads(json.dumps(each.state_dict())) for each in detectors]
            budgets, detectors, policy = policy.state_dict(), build(Detect()), TablePolicy(decide, "act")
            for each, state in zip(detectors, states, strict=True):
                each.load_state_dict(state)
            policy.load_state_dict(budgets)
        decision = policy.decide(record, [v for each in detectors if (v := each.inspect(record)) is not None])
        if decision.action is Action.REWIND:
            return decision
        for each in detectors:
            each.learn(record, decision.updates_weights)
        policy.settle(decision)
    raise AssertionError("no rewind")


@pytest.mark.parametrize("nats_a_step", [0.015, 0.03, 0.06, 0.6])
@pytest.mark.parametrize("seed", range(5))
def test_the_checkpoint_is_older_than_a_slow_divergence(nats_a_step: float, seed: int) -> None:
    decision = first_rewind(slow(nats_a_step, seed))
    assert decision.step - SKIP_STEPS >= ONSET, "certain so late that a window up to it would lie inside"
    newest = decision.step - int(decision.parameters["skip_steps"])  # that a checkpoint may be of
    assert ONSET - 30 < newest < ONSET


def test_a_restart_within_the_rise_does_not_forget_its_onset() -> None:
    restarted, straight = first_rewind(slow(0.03, 1), reload_at=ONSET + 22), first_rewind(slow(0.03, 1))
    assert restarted.parameters == straight.parameters


def test_the_earliest_onset_of_the_detectors_of_a_rule_counts() -> None:
    back = {"action": Action.REWIND, "generations": 1, "skip_steps": 4}
    joined = Rule(detector="loss_divergence+grad_norm_spike", tier=Tier.LARGE, **back)

    def found(detector: str, onset: int) -> Verdict:
        return Verdict(
            detector=detector, tier=Tier.LARGE, step=50, value=1.0, threshold=0.0, reason="found", onset=onset
        )

    verdicts = [found("loss_divergence", 40), found("grad_norm_spike", 30), found("loss_spike", 10)]
    decision = TablePolicy(Decide(rules=(joined,)), "act").decide(step(50), verdicts)
    assert decision.parameters["skip_steps"] == 4 + 20
    alone = TablePolicy(Decide(rules=(joined,)), "act").decide(step(50), [found(name, 0) for name in joined.names])
    assert alone.parameters["skip_steps"] == 4


def test_an_exhausted_streak_is_left_out_whole() -> None:
    skip = Rule(detector="non_finite", tier=Tier.NON_FINITE, action=Action.SKIP)
    config = Decide(rules=(skip,), max_consecutive_skips=20, when_exhausted="rewind", rewind_skip_steps=8)
    policy = TablePolicy(config, "act")
    nan = Verdict(detector="non_finite", tier=Tier.NON_FINITE, step=1, value=1.0, threshold=0.0, reason="NaN")
    for number in range(100, 121):
        decision = policy.decide(step(number), [nan])
        policy.settle(decision)
    assert (decision.step, decision.action, decision.parameters["skip_steps"]) == (120, Action.REWIND, 28)


def test_a_continuation_that_fails_the_gate_is_left_out_whole() -> None:
    rule = Rule(detector="loss_spike", tier=Tier.LARGE, action=Action.REWIND, generations=1, skip_steps=4)
    policy = TablePolicy(Decide(rules=(rule,), gate=Gate(steps=10)), "act")
    spike = Verdict(detector="loss_spike", tier=Tier.LARGE, step=101, value=9.0, threshold=3.0, reason="spike")
    for number in range(1, 101):
        policy.settle(policy.decide(step(number), []))
    policy.settle(policy.decide(step(101), [spike]))
    number = 90
    while (decision := policy.decide(step(number, loss=4.0), [])).action is Action.APPLY:
        policy.settle(decision)
        number += 1
    assert (decision.step, decision.action, decision.parameters["skip_steps"]) == (99, Action.REWIND, 10)
