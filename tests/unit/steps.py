"""Step records for the tests of detectors and policy."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from hypothesis import settings

from megatron_stability.detect.base import Detector
from megatron_stability.observe.reduction import How, LocalSignals, Reduction
from megatron_stability.records import StepRecord, Verdict

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def step(number: int, loss: float = 2.0, grad_norm: float = 1.0, **fields: Any) -> StepRecord:
    """A record as `observe` makes it: a non-finite value is NaN and counted."""
    if not math.isfinite(loss):
        loss, fields["nonfinite_losses"] = math.nan, 1
    if not math.isfinite(grad_norm):
        grad_norm, fields["nonfinite_grads"] = math.nan, 1
    fields = {"first_sample": 8 * (number - 1), "samples": 8, "tokens": 512.0, **fields}
    return StepRecord(step=number, loss=loss, grad_norm=grad_norm, **fields)


def reduced(ways: Mapping[str, How], *extras: Mapping[str, Any]) -> StepRecord:
    """The record of ranks that differ in their further signals alone, by the reduction itself."""
    reduction = Reduction(None, torch.device("cpu"), ways)
    rest = {"step": 1, "first_sample": 0, "samples": 1, "loss_sums_n2": torch.ones(1, 2), "grad_norm": 1.0}
    return reduction.together([reduction.sent(LocalSignals(**rest, extra=extra)) for extra in extras])


def feed(detector: Detector, records: Iterable[StepRecord], skip: bool = True) -> list[Verdict | None]:
    """Run one detector over records as the pipeline does; with `skip`, flagged and non-finite steps aren't applied."""
    verdicts = []
    for record in records:
        verdict = detector.inspect(record)
        detector.learn(record, applied=not skip or (verdict is None and record.finite))
        verdicts.append(verdict)
    return verdicts


def flagged(verdicts: Iterable[Verdict | None]) -> list[int]:
    """The step numbers with a verdict."""
    return [verdict.step for verdict in verdicts if verdict is not None]


def gauss(number: int, sigma: float, seed: int = 0) -> float:
    """Noise of a step, the same in any order."""
    return random.Random(seed * 1_000_003 + number).gauss(0, sigma)
