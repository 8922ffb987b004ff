"""Values against their own past: norms, router logits, throughput, held-out losses, spikes at the LR peak."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from megatron_stability.detect import config as c
from megatron_stability.detect.base import BaselineDetector, Finding, WindowDetector
from megatron_stability.detect.loss import sigma_finding
from megatron_stability.records import StepRecord, Tier
from megatron_stability.signals import HELD_OUT, SETS


class GrowthDetector(WindowDetector):
    """value / mean of the last `window` accepted ones: WATCH above `watch`, SMALL above `small`.

    The default value is the signal named first in `requires`.
    """

    what: ClassVar[str]

    def __init__(self, config: c.Growth, early: c.Early) -> None:
        super().__init__(config, early)
        self.config = config

    def value(self, record: StepRecord) -> float | None:
        """The signal."""
        return record.signals.get(self.requires[0])

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, mean = self.config, self.window.mean
        if value <= config.watch * mean or len(self.window) < config.warmup_steps or record.step <= config.after_step:
            return None
        if mean <= 0:
            return None
        ratio = value / mean
        tier, limit = (Tier.SMALL, config.small) if ratio > config.small else (Tier.WATCH, config.watch)
        return Finding(tier, limit * mean, f"{self.what} {value:.4g} is {ratio:.3g}x its running mean {mean:.4g}")


class ParamGrowth(GrowthDetector):
    """Parameter norm growing fast: weight decay too small."""

    name = "param_growth"
    what = "parameter norm"
    requires = ("param_norm",)


class EmbeddingGrowth(GrowthDetector):
    """Embedding norm growing fast."""

    name = "embedding_growth"
    what = "embedding norm"
    requires = ("embedding_norm",)


class MoeRouterZ(GrowthDetector):
    """Router logits growing: its softmax saturates and tokens flip between experts."""

    name = "moe_router_z"
    what = "router logsumexp²"
    requires = ("moe/router_z",)


class Throughput(GrowthDetector):
    """Seconds a token against their running mean: a sudden rise is hardware, storage or network."""

    name = "throughput"
    what = "seconds a token"
    requires = ("step_seconds",)

    def value(self, record: StepRecord) -> float | None:
        """Seconds a valid token."""
        seconds = record.signals.get("step_seconds")
        return seconds / record.tokens if seconds is not None and record.tokens > 0 else None


class LrPeak(WindowDetector):
    """A loss spike within `near_steps` of the learning rate's last rise to a new high: warmup too short, peak too high.

    As `LossSpike`, always WATCH: it adds a cause to what the spike detectors report. Later steps are none of its
    business, so its baseline ends there too.
    """

    name = "lr_peak"

    def __init__(self, config: c.LrPeak, early: c.Early) -> None:
        super().__init__(config, early)
        self.config = config
        self.highest, self.rose_at = 0.0, 0

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token, near the peak."""
        return record.loss if record.step - self.rose_at <= self.config.near_steps else None

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, window = self.config, self.window
        if value <= window.mean or len(window) < config.warmup_steps:
            return None
        sigma = max(window.std, config.sigma_floor) * self.early.looseness(record.step)
        finding = sigma_finding(value, window.mean, sigma, config.k, 2 * config.k)
        if finding is None or not self.highest > 0:
            return finding and finding._replace(tier=None)
        since = record.step - self.rose_at
        reason = f"{finding.reason}, {since} steps after the learning rate rose to {self.highest:g}"
        return finding._replace(tier=Tier.WATCH, reason=reason)

    def learn(self, record: StepRecord, applied: bool) -> None:
        """As the base class; the learning rate is followed on every step."""
        super().learn(record, applied)
        if record.learning_rate > self.highest:
            if record.step - self.rose_at > self.config.near_steps:
                self.clear()  # a baseline from before is too old
            self.highest, self.rose_at = record.learning_rate, record.step

    def reset(self) -> None:
        """See `Detector.reset`."""
        super().reset()
        self.highest, self.rose_at = 0.0, 0

    def baseline(self) -> dict[str, Any]:
        """The window and the highest learning rate."""
        return {**super().baseline(), "highest": self.highest, "rose_at": self.rose_at}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        super().load_baseline(state)
        self.highest, self.rose_at = float(state["highest"]), int(state["rose_at"])


class HeldOut(BaselineDetector):
    """Held-out losses in nats above each set's own best: the worst set sets the verdict."""

    name = "held_out"
    requires = (HELD_OUT,)

    def __init__(self, config: c.HeldOut, early: c.Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after)
        self.config = config
        self.best: dict[str, float] = {}

    def value(self, record: StepRecord) -> float | None:
        """The largest rise above a set's best, in nats; 0 for sets seen for the first time."""
        if HELD_OUT not in record.signals:
            return None
        rises = [loss - self.best.get(name, loss) for name, loss in record.signals.items() if name.startswith(SETS)]
        return max(rises, key=lambda rise: rise if rise == rise else math.inf) if rises else None

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        if value <= self.config.small:
            return None
        tier, limit = (Tier.LARGE, self.config.large) if value > self.config.large else (Tier.SMALL, self.config.small)
        return Finding(tier, limit, f"a held-out loss is {value:.3f} nats above its best")

    def accept(self, value: float, record: StepRecord) -> None:
        """Each set's best."""
        for name, loss in record.signals.items():
            if name.startswith(SETS):
                self.best[name] = min(loss, self.best.get(name, loss))

    def clear(self) -> None:
        """Forget every best."""
        self.best = {}

    def baseline(self) -> dict[str, Any]:
        """Each set's best."""
        return {"best": dict(self.best)}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.best = {name: float(loss) for name, loss in state["best"].items()}
