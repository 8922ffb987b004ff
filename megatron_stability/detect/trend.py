"""Slow changes: slopes through blocks of values, and their absence."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_stability.detect import config as c
from megatron_stability.detect.base import PLAUSIBLE
from megatron_stability.records import StepRecord, Tier, Verdict


def slope_test(values: Sequence[float]) -> tuple[float, float]:
    """Least-squares rise over a series and how sure it is.

    Args:
        values: at least 4, equally spaced.

    Returns:
        The fitted rise from first to last, in the values' unit, and t: slope over its standard error, times
        sqrt((1-ρ)/(1+ρ)) for the lag-1 autocorrelation ρ >= 0 of the residuals, which makes n effective samples of n.
        t is infinite for a perfect line.
    """
    n = len(values)
    center, mean = (n - 1) / 2, math.fsum(values) / n
    sxx = n * (n * n - 1) / 12
    deviations = [value - mean for value in values]
    slope = math.fsum((i - center) * deviation for i, deviation in enumerate(deviations)) / sxx
    residuals = [deviation - slope * (i - center) for i, deviation in enumerate(deviations)]
    squares = math.sumprod(residuals, residuals)
    rise = slope * (n - 1)
    if squares <= 1e-24 * n * (mean * mean + rise * rise):  # nothing but rounding is left
        return rise, math.copysign(math.inf, slope) if slope else 0.0
    rho = min(max(math.sumprod(residuals[1:], residuals[:-1]) / squares, 0.0), 0.99)
    return rise, slope / math.sqrt(squares / (n - 2) / sxx) * math.sqrt((1 - rho) / (1 + rho))


class BlockDetector(ABC):
    """The last `blocks` medians of `block` finite, applied values each; judged once a block.

    A median, so that single spikes, which other detectors report, don't bend a trend. A standing condition is reported
    again after `repeat_blocks`, and at once when it has been absent in between.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    medians: deque[float]
    part: list[float]  # of the block under way
    due: bool  # a block is complete and not yet judged
    _judged: StepRecord | None  # with `_found` remembered from `inspect` to `learn`: no state
    _found: tuple[float, float, str] | None
    standing: int  # blocks since the last verdict while the condition stands, 0: it doesn't

    def __init__(self, block: int, blocks: int, repeat_blocks: int) -> None:
        self.block, self.blocks, self.repeat = block, blocks, repeat_blocks
        self.reset()

    @abstractmethod
    def value(self, record: StepRecord) -> float | None:
        """The value under watch, or None where this record has none."""

    @abstractmethod
    def judge(self, medians: Sequence[float]) -> tuple[float, float, str] | None:
        """Value, threshold and reason if the full window of medians shows the condition."""

    def inspect(self, record: StepRecord) -> Verdict | None:
        """See the class."""
        if not self.due or not record.finite:
            return None
        self._judged, self._found = record, self.judge(self.medians)
        found = self._found
        if found is None or 0 < self.standing < self.repeat:
            return None
        value, threshold, reason = found
        return Verdict(
            detector=self.name, tier=Tier.WATCH, step=record.step, value=value, threshold=threshold, reason=reason
        )

    def learn(self, record: StepRecord, applied: bool) -> None:
        """Take the value of a finite, applied step."""
        if not record.finite:
            return
        if self.due:
            found = self._found if self._judged is record else self.judge(self.medians)
            self.due, self._judged = False, None
            again = found is not None and 0 < self.standing < self.repeat
            self.standing = self.standing + 1 if again else int(found is not None)
        value = self.value(record) if applied and record.tokens > 0 else None
        if value is None or not abs(value) <= PLAUSIBLE:
            return
        self.part.append(value)
        if len(self.part) == self.block:
            self.medians.append(sorted(self.part)[self.block // 2])
            self.part = []
            self.due = len(self.medians) == self.blocks

    def reset(self) -> None:
        """See `Detector.reset`."""
        self.medians = deque(maxlen=self.blocks)
        self.part = []
        self._judged = None
        self._found = None
        self.due = False
        self.standing = 0

    def state_dict(self) -> dict[str, Any]:
        """See `Detector.state_dict`."""
        return {
            "medians": list(self.medians),
            "part": list(self.part),
            "due": self.due,
            "standing": self.standing,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Detector.load_state_dict`."""
        self.reset()
        self.medians.extend(float(value) for value in state["medians"])
        self.part = [float(value) for value in state["part"]][-self.block + 1 :] if self.block > 1 else []
        self.due = bool(state["due"]) and len(self.medians) == self.blocks
        self.standing = int(state["standing"])


class TrendDetector(BlockDetector):
    """An upward slope: a fitted rise over the window above `rise`, with t above `t` (see `slope_test`)."""

    what: ClassVar[str]

    def __init__(self, config: c.Trend, early: c.Early) -> None:
        del early  # a falling loss or norm can't trip an upward test
        super().__init__(config.block, config.blocks, config.repeat_blocks)
        self.config = config

    def judge(self, medians: Sequence[float]) -> tuple[float, float, str] | None:
        """See the class."""
        if medians[-1] <= medians[0] and sum(medians) / len(medians) <= medians[0]:
            return None  # falling, the usual case, without a fit
        rise, t = slope_test(medians)
        if rise <= self.config.rise or t <= self.config.t:
            return None
        reason = f"{self.what} rose by {rise:.3g} over {self.block * self.blocks} steps (t = {t:.1f})"
        return rise, self.config.rise, reason


class LossDrift(TrendDetector):
    """The loss climbs, too slowly for a spike."""

    name = "loss_drift"
    what = "loss (nats)"

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss


class GradNormDrift(TrendDetector):
    """The gradient norm climbs by a factor exp(`rise`)."""

    name = "grad_norm_drift"
    what = "log gradient norm"

    def value(self, record: StepRecord) -> float | None:
        """Log of the global norm; none for 0."""
        return math.log(record.grad_norm) if record.grad_norm > 0 else None


class AttentionLogitGrowth(TrendDetector):
    """The largest attention logit climbs by a factor exp(`rise`): growth shows long before a limit is reached."""

    name = "attention_logit_growth"
    what = "log largest attention logit"
    requires = ("attention/max_logit",)

    def value(self, record: StepRecord) -> float | None:
        """Log of the logit, of 1 where it is lower (then there is nothing to watch)."""
        logit = record.signals.get("attention/max_logit")
        return None if logit is None or logit != logit else math.log(max(logit, 1.0))


class QkGainDrift(TrendDetector):
    """max|γ| of QK-norm climbs by a factor exp(`rise`): the bound that it sets on a logit grows with its square."""

    name = "qk_gain_drift"
    what = "log largest QK-norm gain"
    requires = ("qk_norm/max_gain",)

    def value(self, record: StepRecord) -> float | None:
        """Log of the gain; a gain of 0 has none."""
        gain = record.signals.get("qk_norm/max_gain")
        return math.log(gain) if gain is not None and 0.0 < gain < math.inf else None


class Plateau(BlockDetector):
    """No progress: the window's second half is less than `progress` nats below the first, by the medians of blocks."""

    name = "plateau"

    def __init__(self, config: c.Plateau, early: c.Early) -> None:
        del early  # the window is long
        super().__init__(config.block, config.blocks, config.repeat_blocks)
        self.config = config

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss

    def judge(self, medians: Sequence[float]) -> tuple[float, float, str] | None:
        """See the class."""
        values, half = list(medians), len(medians) // 2
        progress = sorted(values[:half])[half // 2] - sorted(values[half:])[half // 2]
        if progress >= self.config.progress:
            return None
        reason = f"loss fell by {progress:.4f} nats between the halves of the last {self.block * self.blocks} steps"
        return progress, self.config.progress, reason
