"""Rules of others for a step's loss and norm, for the benchmarks to stand beside ours."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from megatron_stability.detect.window import Window
from megatron_stability.records import StepRecord

Rule = Callable[[StepRecord], bool]


def sigmas(k: float) -> Rule:
    """Mean + k standard deviations of everything seen."""
    windows = Window(100), Window(100)

    def alert(record: StepRecord) -> bool:
        values = record.loss, record.grad_norm
        high = [len(w) >= 50 and x > w.mean + k * w.std for w, x in zip(windows, values, strict=True)]
        for window, value in zip(windows, values, strict=True):
            window.push(value)
        return any(high)

    return alert


def olmo_core() -> Rule:
    """OLMo-core's `SkipStepOptimizer`: skips where loss or norm is above mean + 6 sigma of the last 128 of them.

    Every value enters, a skipped step's too, and nothing is judged before half of the 128 are there.
    """
    losses: deque[float] = deque(maxlen=129)
    norms: deque[float] = deque(maxlen=129)

    def high(values: deque[float], value: float) -> bool:
        values.append(value)
        past = list(values)[:-1]
        if len(past) < 64:
            return False
        mean = math.fsum(past) / len(past)
        deviations = [each - mean for each in past]
        sigma = math.sqrt(math.sumprod(deviations, deviations) / (len(past) - 1))
        return not value - mean <= 6.0 * sigma  # so that a NaN, which stays in the window, skips all after it

    def alert(record: StepRecord) -> bool:
        found = [high(losses, record.loss), high(norms, record.grad_norm)]
        return any(found)

    return alert


def ten_times_max() -> Rule:
    """Stock Megatron's rule, with its 100 samples for the largest value."""
    first: list[float] = []

    def alert(record: StepRecord) -> bool:
        if len(first) < 100:
            first.append(record.loss)
            return False
        return record.loss >= 10 * max(first)

    return alert


def zclip() -> Rule:
    """ZClip's z-score of the norm."""
    first: list[float] = []
    mean = variance = 0.0

    def alert(record: StepRecord) -> bool:
        nonlocal mean, variance
        norm = record.grad_norm
        if len(first) < 25:
            first.append(norm)
            mean = sum(first) / len(first)
            variance = sum((x - mean) ** 2 for x in first) / len(first)
            return False
        sigma = math.sqrt(variance)
        z = (norm - mean) / (sigma + 1e-6)
        kept = mean + 2.5 * 2.5 / z * sigma if z > 2.5 else norm
        mean = 0.97 * mean + 0.03 * kept
        variance = 0.97 * variance + 0.03 * (kept - mean) ** 2
        return z > 2.5

    return alert
