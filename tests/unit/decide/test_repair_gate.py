"""The repair gate: a rewind that didn't help is followed by the next attempt."""

from __future__ import annotations

import json
import math

import pytest

from megatron_stability.decide.config import Decide, Gate, Rule
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.decide.repair_gate import measures
from megatron_stability.records import Action, StepRecord, Tier, Verdict
from tests.unit.steps import step

RULES = (
    Rule(detector="loss_spike", tier=Tier.LARGE, action=Action.REWIND, generations=1, skip_steps=4),
    Rule(detector="non_finite", tier=Tier.NON_FINITE, action=Action.SKIP),
)
HEALTHY = {"loss": 2.0, "grad_norm": 1.0, "signals": {"step_seconds": 1.0, "held_out": 1.0, "held_out/web": 2.5}}


def verdict(detector: str = "loss_spike", tier: Tier = Tier.LARGE) -> Verdict:
    return Verdict(detector=detector, tier=tier, step=1, value=1.0, threshold=0.0, reason="found")


def after_a_rewind() -> TablePolicy:
    policy = TablePolicy(Decide(rules=RULES, gate=Gate(steps=10)), "act")
    for i in range(1, 101):
        take(policy, step(i, **HEALTHY))
    assert take(policy, step(101, loss=9.0), verdict()) is Action.REWIND
    return policy


def take(policy: TablePolicy, record: StepRecord, *verdicts: Verdict) -> Action:
    decision = policy.decide(record, verdicts)
    policy.settle(decision)
    return decision.action


def continuation(policy: TablePolicy, **fields) -> list[Action]:
    return [take(policy, step(50 + i, **{**HEALTHY, **fields})) for i in range(10)]


def test_a_healthy_continuation_passes_and_ends_the_comparison() -> None:
    policy = after_a_rewind()
    assert continuation(policy, loss=2.05) == [Action.APPLY] * 10
    assert continuation(policy, loss=3.0) == [Action.APPLY] * 10  # other detectors' business again


@pytest.mark.parametrize(
    "fields",
    [
        {"loss": 2.2},
        {"grad_norm": 2.5},
        {"signals": {"step_seconds": 2.0}},
        {"signals": {"held_out": 1.0, "held_out/web": 2.7}},
    ],
)
def test_a_worse_continuation_is_the_next_attempt_at_its_last_step(fields) -> None:
    policy = after_a_rewind()
    assert continuation(policy, **fields) == [Action.APPLY] * 9 + [Action.REWIND]
    assert continuation(policy, **fields) == [Action.APPLY] * 9 + [Action.HALT]  # max_rewinds is 2


def test_the_next_attempt_goes_further_back_and_says_why() -> None:
    policy = after_a_rewind()
    for i in range(9):
        take(policy, step(50 + i, **{**HEALTHY, "loss": 2.5}))
    decision = policy.decide(step(59, **{**HEALTHY, "loss": 2.5}), [])
    assert (decision.action, decision.parameters["generations"]) == (Action.REWIND, 2.0)
    assert decision.reason == "repair_gate (large): 10 steps after the rewind, loss is 2.5, above 2.1"
    assert decision.verdicts[-1].detector == "repair_gate"


def test_the_continuation_is_compared_with_the_past_before_the_first_rewind() -> None:
    policy = after_a_rewind()
    continuation(policy, loss=2.5)
    assert continuation(policy, loss=2.5)[-1] is Action.HALT


def test_non_finite_and_skipped_steps_are_no_part_of_the_continuation() -> None:
    policy = after_a_rewind()
    for i in range(9):
        take(policy, step(50 + i, **{**HEALTHY, "loss": 2.5}))
    bad = step(59, loss=math.nan)
    assert take(policy, bad, verdict("non_finite", Tier.NON_FINITE)) is Action.SKIP
    json.dumps(policy.state_dict(), allow_nan=False)
    assert take(policy, step(60, **{**HEALTHY, "loss": 2.5})) is Action.REWIND


def test_flagged_steps_are_no_part_of_the_healthy_past() -> None:
    policy = TablePolicy(Decide(rules=RULES, gate=Gate(steps=10)), "act")
    for i in range(1, 101):
        take(policy, step(i, **HEALTHY))
    for i in range(101, 121):
        assert take(policy, step(i, loss=4.0), verdict("loss_spike", Tier.SMALL)) is Action.APPLY
    take(policy, step(121, loss=9.0), verdict())
    assert continuation(policy, loss=2.5)[-1] is Action.REWIND


def test_the_gate_survives_a_restart() -> None:
    whole = after_a_rewind()
    for i in range(5):
        take(whole, step(50 + i, **{**HEALTHY, "loss": 2.5}))
    restored = TablePolicy(whole.config, "act")
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
    for i in range(5):
        record = step(55 + i, **{**HEALTHY, "loss": 2.5})
        actions = take(whole, record), take(restored, record)
    assert actions == (Action.REWIND, Action.REWIND)
    assert restored.state_dict() == whole.state_dict()


def test_observe_mode_has_no_continuation_to_judge() -> None:
    policy = TablePolicy(Decide(rules=RULES, gate=Gate(steps=10)), "observe")
    for i in range(1, 101):
        take(policy, step(i, **HEALTHY))
    assert policy.decide(step(101, loss=9.0), [verdict()]).advised is Action.REWIND
    take(policy, step(101, loss=9.0), verdict())
    for i in range(10):
        assert policy.decide(step(102 + i, loss=9.0), []).advised is Action.APPLY
        take(policy, step(102 + i, loss=9.0))


def test_without_steps_there_is_no_gate() -> None:
    policy = TablePolicy(Decide(rules=RULES, gate=Gate(steps=0)), "act")
    for i in range(1, 101):
        take(policy, step(i, **HEALTHY))
    take(policy, step(101, loss=9.0), verdict())
    assert continuation(policy, loss=5.0) == [Action.APPLY] * 10


def test_a_rewind_by_exhausted_skips_is_judged_too() -> None:
    skips = Rule(detector="non_finite", tier=Tier.NON_FINITE, action=Action.SKIP)
    config = Decide(rules=(skips,), gate=Gate(steps=10), max_consecutive_skips=1, when_exhausted="rewind")
    policy = TablePolicy(config, "act")
    for i in range(1, 101):
        take(policy, step(i, **HEALTHY))
    bad = verdict("non_finite", Tier.NON_FINITE)
    assert [take(policy, step(i, loss=math.nan), bad) for i in (101, 102)] == [Action.SKIP, Action.REWIND]
    assert continuation(policy, loss=3.0)[-1] is Action.REWIND


def test_held_out_loss_is_the_mean_over_sets_and_of_nothing_else() -> None:
    signals = {"step_seconds": 512.0, "held_out": 2.0, "held_out/web": 2.0, "held_out/code": 1.0, "clip_grad": 50.0}
    assert measures(step(1, loss=2.0, grad_norm=1.5, signals=signals)) == {
        "loss": 2.0,
        "gradient norm": 1.5,
        "seconds a token": 1.0,
        "held-out loss": 1.5,
    }
    assert measures(step(1, loss=2.0)) == {"loss": 2.0, "gradient norm": 1.0}
    assert measures(step(1, loss=math.nan)) == measures(step(1, tokens=0.0)) == {}
    assert measures(step(1, grad_norm=1e101)) == {"loss": 2.0}


def test_a_continuation_far_back_is_compared_from_the_middle_of_the_past_on() -> None:
    """Where the loss still falls, it is above the past's mean for a while, and rightly so."""
    falls = {i: 3.0 - 0.01 * min(i, 100) for i in range(1, 121)}
    policy = TablePolicy(Decide(rules=RULES, gate=Gate(steps=10)), "act")
    for i in range(1, 101):
        take(policy, step(i, **{**HEALTHY, "loss": falls[i]}))
    assert take(policy, step(101, loss=9.0), verdict()) is Action.REWIND
    assert {take(policy, step(i, **{**HEALTHY, "loss": falls[i]})) for i in range(1, 121)} == {Action.APPLY}
