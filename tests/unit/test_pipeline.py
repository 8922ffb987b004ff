"""The step's order, and which detectors are asked."""

from __future__ import annotations

from megatron_stability.decide.config import Decide
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect.base import silent
from megatron_stability.detect.config import Detect
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import StepRecord

HIGH = {"attention/max_logit": 1e4}  # far above every limit


def pipeline() -> Pipeline[StepRecord]:
    return Pipeline(lambda record: record, build(Detect()), TablePolicy(Decide(), "act"), ())


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
