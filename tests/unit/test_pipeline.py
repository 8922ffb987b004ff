"""The step's order, and which detectors are asked."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect.base import silent
from megatron_stability.detect.config import Detect
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Decision, StepRecord, Tier, decode_float, encode_float

HIGH = {"attention/max_logit": 1e4}  # far above every limit


def pipeline() -> Pipeline[StepRecord]:
    detectors = build(Detect())
    return Pipeline(lambda record: record, detectors, TablePolicy(Decide(), "act"), (), Episodes(detectors, 50))


def record(step: int, **signals: float) -> StepRecord:
    return StepRecord(
        step=step,
        first_sample=step,
        samples=1,
        tokens=8.0,
        loss=2.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        signals=signals,
    )


def verdicts(of: Pipeline[StepRecord], seen: StepRecord) -> set[str]:
    return {verdict.detector for verdict in of.decide(seen)[1].verdicts}


def test_idle_detectors_are_not_asked_and_keep_their_state() -> None:
    busy = pipeline()
    for step in range(1, 40):
        busy.finish(*busy.decide(record(step, **{"attention/max_logit": 10.0 + step})))
    whole, high = busy.state_dict(), record(40, **HIGH)
    assert "attention_logits" in verdicts(busy, high)
    idle = busy.without(silent(busy.detectors, {"clip_grad"}))
    assert verdicts(idle, high) == set()
    idle.finish(*idle.decide(high))
    assert idle.state_dict()["detectors"]["attention_logit_growth"] == whole["detectors"]["attention_logit_growth"]
    assert idle.state_dict()["detectors"]["loss_ratio"] != whole["detectors"]["loss_ratio"]


def ran(of: Pipeline[StepRecord], seen: StepRecord) -> Action:
    decided = of.decide(seen)
    of.finish(*decided)
    return decided[1].action


def test_a_withheld_step_teaches_no_detector_not_even_one_that_saw_nothing_in_it() -> None:
    one = pipeline()
    for step in range(1, 31):
        assert ran(one, record(step)) is Action.APPLY
    before = one.state_dict()["detectors"]
    withheld = replace(record(31), grad_norm=50.0)  # a spike of the norm, with a loss like any other
    assert {verdict.detector for verdict in one.decide(withheld)[1].verdicts}.isdisjoint({"loss_spike", "loss_ratio"})
    assert ran(one, withheld) is Action.SKIP
    after = one.state_dict()["detectors"]
    for name in ("loss_spike", "loss_mad", "loss_ratio", "loss_drift", "plateau", "lr_peak"):
        assert after[name] == before[name], name
    assert ran(one, record(32)) is Action.APPLY
    assert one.state_dict()["detectors"]["loss_spike"] != after["loss_spike"]


def test_what_was_done_is_settled_with_the_policy_and_told_to_every_sink() -> None:
    told: list[tuple[str, int, Action]] = []

    class Sink:
        def __init__(self, name: str) -> None:
            self.name = name

        def write(self, seen: StepRecord, decision: Decision) -> None:
            told.append((self.name, seen.step, decision.action))

    policy = TablePolicy(Decide(max_consecutive_skips=1), "act")
    detectors = build(Detect())
    one = Pipeline(lambda seen: seen, detectors, policy, (Sink("a"), Sink("b")), Episodes(detectors, 50))
    bad = replace(record(1), loss=math.nan, nonfinite_losses=1)
    assert [ran(one, bad), ran(one, replace(bad, step=2))] == [Action.SKIP, Action.HALT]
    assert told == [("a", 1, Action.SKIP), ("b", 1, Action.SKIP), ("a", 2, Action.HALT), ("b", 2, Action.HALT)]


def test_a_state_is_taken_over_whole_and_a_detector_without_one_starts_afresh() -> None:
    one, other = pipeline(), pipeline()
    for step in range(1, 40):
        ran(one, record(step))
        ran(other, replace(record(step), loss=7.0, grad_norm=3.0))
    ran(one, replace(record(40), loss=math.nan, nonfinite_losses=1))  # a skip, for the policy's budget
    state = json.loads(json.dumps(one.state_dict(), allow_nan=False))
    other.load_state_dict(state)
    assert other.state_dict() == one.state_dict()
    del state["detectors"]["loss_spike"]  # of a checkpoint from before there was one
    other.load_state_dict(state)
    assert other.state_dict()["detectors"]["loss_spike"] == pipeline().state_dict()["detectors"]["loss_spike"]


def test_a_record_claims_nothing_that_was_not_measured() -> None:
    seen = StepRecord(step=3, first_sample=16, samples=8, tokens=64.0, loss=2.0, grad_norm=1.0)
    assert (seen.last_sample, seen.learning_rate, seen.nonfinite_losses, seen.nonfinite_grads) == (24, 0.0, 0, 0)
    assert (seen.finite, seen.overflow, seen.disagreeing_ranks, seen.culprit_ranks) == (True, False, (), ())
    assert [tier.severity for tier in Tier] == [0, 1, 2, 3, 4, 5]
    assert [action.precedence for action in Action] == [0, 1, 2, 3, 4, 5]


def test_floats_survive_strict_json() -> None:
    values = [1.5, -0.0, math.inf, -math.inf]
    encoded = json.loads(json.dumps([encode_float(value) for value in values], allow_nan=False))
    assert [decode_float(value) for value in encoded] == values
    assert encoded[2:] == ["inf", "-inf"]
    assert math.isnan(decode_float(encode_float(math.nan)))
