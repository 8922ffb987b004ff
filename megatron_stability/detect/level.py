"""Levels: a loss that has left its own and does not come back."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from megatron_stability.detect import config as c
from megatron_stability.detect.base import PLAUSIBLE, BaselineDetector, Finding
from megatron_stability.detect.fit import MAD_TO_SIGMA
from megatron_stability.records import StepRecord, Tier

SIGMAS = 4.0  # standard deviations that a rise has at least, whatever its nats
BLOCK, BLOCKS = 10, 10  # accepted losses in a median, and medians of which the lowest is the level
HALF = 5  # losses of each of the two medians whose difference says whether a loss comes back
BACK = 0.03  # share of the rise by which the newer median is lower where it does
LOOKS = 5  # looks in a row without coming back


class LossDivergence(BaselineDetector):
    """LARGE where the loss stays above its level and does not come back by itself: what a rewind waits for.

    The level is the lowest of the last medians of `BLOCK` accepted losses, which a slow rise can't drag along. It takes
    a row of `steps` losses more than `nats` above it; or of `amplified_steps`, the last more than `amplified_nats`
    above, if within the row the gradient norm was above `amplified` times its own median. Either way by at least SIGMAS
    standard deviations (by the scatter within the blocks), and not while it falls: the median of the last HALF losses
    must for LOOKS steps in a row have been no more than BACK of the rise below that of the HALF before. Most spikes
    heal. A withheld step counts as any other, for its loss was measured before. It may have begun right after the last
    loss that was no higher than the level: a slow one takes long to rise by `nats`.
    """

    name = "loss_divergence"

    def __init__(self, config: c.LossDivergence, early: c.Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after)
        self.config = config
        self.level, self.usual = math.inf, math.inf  # of loss and norm; follow from the blocks: no state
        self.part: list[float] = []
        self.norm_part: list[float] = []
        self.norms: deque[float] = deque(maxlen=BLOCKS)  # medians of blocks
        self.medians: deque[float] = deque(maxlen=BLOCKS)
        self.scatter: deque[float] = deque(maxlen=BLOCKS)  # of each block: median distance from its median
        self.row: deque[float] = deque(maxlen=2 * HALF)  # the last losses of the row
        self.held = 0  # looks in a row at which the loss did not come back
        self.amplified = False
        self.well = 0  # the last step whose loss was no higher than the level

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, level = self.config, self.level
        if value <= level + config.nats or self.warms_up_for():
            return None
        sigma = MAD_TO_SIGMA * sorted(self.scatter)[len(self.scatter) // 2]
        limit, rise = max(config.nats, SIGMAS * sigma) * self.early.looseness(record.step), value - level
        if rise <= limit:
            return None
        steps, amplified = self.run + 1, self.amplified or self._amplifies(record)
        reason = f"loss {value:.4f} nats: more than {limit:.3g} above its level {level:.4f} for {steps} steps"
        reason += f"{', with an amplified gradient norm' * amplified}, and it does not come back"
        lasting = steps >= config.steps
        fast = amplified and steps >= config.amplified_steps and rise >= config.amplified_nats
        tier = Tier.LARGE if (lasting or fast) and self._held(value) >= LOOKS else None
        return Finding(tier, level + limit, reason)

    def warms_up_for(self) -> int:
        """See `BaselineDetector`."""
        return max(max(self.config.warmup_steps, BLOCK) - BLOCK * len(self.medians) - len(self.part), 0)

    def onset(self) -> int:
        """See the class."""
        since = super().onset()
        return min(since, self.well + 1) if self.well else since

    def _amplifies(self, record: StepRecord) -> bool:
        return record.grad_norm > self.config.amplified * self.usual > 0

    def _held(self, value: float) -> int:
        """`held` with this loss."""
        last = [*self.row, value][-2 * HALF :]
        if len(last) < 2 * HALF:
            return 0
        before, now = sorted(last[:HALF])[HALF // 2], sorted(last[HALF:])[HALF // 2]
        return 0 if before - now > BACK * (before - self.level) else self.held + 1

    def suspect(self, value: float, record: StepRecord) -> None:
        """The row goes on."""
        if abs(value) <= PLAUSIBLE:
            self.held = self._held(value)
            self.row.append(value)
        self.amplified = self.amplified or self._amplifies(record)

    def accept(self, value: float, record: StepRecord) -> None:
        """Loss and norm into the baseline; the row is over."""
        if value <= self.level:
            self.well = record.step
        self.part.append(value)
        if len(self.part) == BLOCK:
            median = sorted(self.part)[BLOCK // 2]
            self.medians.append(median)
            self.scatter.append(sorted(abs(value - median) for value in self.part)[BLOCK // 2])
            self.part = []
            self._measure()
        norm = record.grad_norm
        if norm <= self.config.amplified * self.usual and norm <= PLAUSIBLE:
            self.norm_part.append(norm)
            if len(self.norm_part) == BLOCK:
                self.norms.append(sorted(self.norm_part)[BLOCK // 2])
                self.norm_part = []
                self._measure()
        if self.row:
            self._over()

    def _measure(self) -> None:
        """Level and usual norm, by the blocks."""
        self.level = min(self.medians, default=math.inf)
        self.usual = sorted(self.norms)[len(self.norms) // 2] if self.norms else math.inf

    def _over(self) -> None:
        self.row.clear()
        self.held, self.amplified = 0, False

    def clear(self) -> None:
        """Empty baseline and row."""
        for blocks in (self.norms, self.medians, self.scatter):
            blocks.clear()
        self.part, self.norm_part = [], []
        self.well = 0
        self._measure()
        self._over()

    def baseline(self) -> dict[str, Any]:
        """Norms, blocks and row."""
        lists = {
            name: list(getattr(self, name)) for name in ("part", "medians", "scatter", "norm_part", "norms", "row")
        }
        return {**lists, "held": self.held, "amplified": self.amplified, "well": self.well}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.part = [float(value) for value in state["part"]]
        self.norm_part = [float(value) for value in state["norm_part"]]
        self.norms.extend(float(value) for value in state["norms"])
        self.medians.extend(float(value) for value in state["medians"])
        self.scatter.extend(float(value) for value in state["scatter"])
        self.row.extend(float(value) for value in state["row"])
        self.held, self.amplified = int(state["held"]), bool(state["amplified"])
        self.well = int(state.get("well", 0))  # absent: older
        self._measure()
