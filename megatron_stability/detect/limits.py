"""Values against fixed limits, mostly signals of optional observers."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from megatron_stability.detect import config as c
from megatron_stability.records import StepRecord, Tier, Verdict
from megatron_stability.sites import Site


class Limit:
    """A value on the wrong side of a limit on `persistence` measurements in a row; the worst limit sets the tier.

    The default value is the signal named first in `requires`. A NaN or infinite signal is LARGE at once; a step without
    the signal neither counts nor interrupts a row.
    """

    name: ClassVar[str]
    what: ClassVar[str]  # for the reason
    above: ClassVar[bool] = True  # False: low values are the wrong ones
    requires: ClassVar[tuple[str, ...]] = ()
    run: int  # measurements in a row on the wrong side

    def __init__(self, config: c.Limits, early: c.Early) -> None:
        del early  # limits are absolute
        self._persistence = config.persistence
        self._signal = self.requires[0] if self.requires else ""
        tiers = (Tier.LARGE, config.large), (Tier.MEDIUM, config.medium), (Tier.SMALL, config.small)
        limits = [(tier, limit) for tier, limit in (*tiers, (Tier.WATCH, config.watch)) if limit is not None]
        self.limits = limits
        self.mildest = limits[-1][1] if limits else math.inf if self.above else -math.inf
        self.reset()

    def value(self, record: StepRecord) -> float | None:
        """The value under watch, or None where this record has none."""
        return record.signals.get(self._signal)

    def place(self, record: StepRecord) -> str:
        """What a reason says of where it was."""
        del record
        return ""

    def inspect(self, record: StepRecord) -> Verdict | None:
        """See the class."""
        value = self.value(record)
        if value is None or (value <= self.mildest if self.above else value >= self.mildest):
            return None  # written so that a NaN goes on
        finite = math.isfinite(value)
        if finite and self.run + 1 < self._persistence:
            return None
        tier, limit = Tier.LARGE, self.mildest
        if finite:
            tier, limit = next(pair for pair in self.limits if (value > pair[1]) == self.above and value != pair[1])
        side = ("above" if self.above else "below") if finite else "not finite; limit"
        reason = f"{self.what} {value:.4g} is {side} {limit:g}{self.place(record)}"
        return Verdict(detector=self.name, tier=tier, step=record.step, value=value, threshold=limit, reason=reason)

    def learn(self, record: StepRecord, applied: bool) -> None:
        """Count the row, where a verdict needs one."""
        if self._persistence == 1:
            return
        value = self.value(record)
        if value is not None:
            self.run = 0 if (value <= self.mildest if self.above else value >= self.mildest) else self.run + 1

    def reset(self) -> None:
        """See `Detector.reset`."""
        self.run = 0

    def state_dict(self) -> dict[str, Any]:
        """See `Detector.state_dict`."""
        return {"run": self.run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Detector.load_state_dict`."""
        self.run = int(state["run"])


class Vanishing(Limit):
    """Gradient norm near zero: a dead loss, a mask over everything, a broken graph."""

    name = "vanishing"
    what = "gradient norm"
    above = False

    def value(self, record: StepRecord) -> float | None:
        """The global norm of a finite step."""
        return record.grad_norm if record.finite else None


class LayerOutlier(Limit):
    """One decoder layer's gradient norm as a multiple of the layers' median; 10 to 100x is a finding."""

    name = "layer_outlier"
    what = "largest layer gradient norm over the median"
    requires = ("grad_norm/layer_max", "grad_norm/layer_median")

    def value(self, record: StepRecord) -> float | None:
        """The ratio; a zero median with a non-zero maximum is infinite."""
        signals = record.signals
        largest, median = signals.get("grad_norm/layer_max"), signals.get("grad_norm/layer_median")
        if largest is None or median is None:
            return None
        return largest / median if median else (math.inf if largest else 1.0)


class AttentionLogits(Limit):
    """Largest attention logit; τ = 100 is QK-clip's usual limit."""

    name = "attention_logits"
    what = "largest attention logit"
    requires = ("attention/max_logit",)


class AttentionDeadHeads(Limit):
    """Heads whose largest logit over a whole batch is not positive: a projection is zero, or a measurement is wrong."""

    name = "attention_dead_heads"
    what = "heads without a positive attention logit"
    requires = ("attention/nonpositive_heads",)


class AttentionEntropy(Limit):
    """Attention entropy of a head towards 0: it looks at one token only."""

    name = "attention_entropy"
    what = "least attention entropy (nats)"
    above = False
    requires = ("attention/min_entropy",)


class Fp8Limit(Limit):
    """A limit whose reason says which layer's which tensor it is."""

    def place(self, record: StepRecord) -> str:
        """See `Limit`."""
        at = record.signals.get(f"{self.requires[0]}/at")
        return "" if at is None else f": {Site.at(at)}"


class Fp8AmaxRise(Fp8Limit):
    """A tensor whose largest element is far above what it was: an outlier."""

    name = "fp8_amax_rise"
    what = "FP8 amax over its past mean"
    requires = ("fp8/amax_rise",)


class Fp8AmaxFall(Fp8Limit):
    """A tensor that has shrunk below what its scale was made for: under delayed scaling it underflows."""

    name = "fp8_amax_fall"
    what = "FP8 past mean amax over the amax"
    requires = ("fp8/amax_fall",)


class Fp8Fallbacks(Limit):
    """Share of linear layers that ran without FP8."""

    name = "fp8_fallbacks"
    what = "share of linears not in FP8"
    requires = ("fp8/fallbacks", "fp8/gemms")

    def value(self, record: StepRecord) -> float | None:
        """The share over all ranks."""
        gemms, fallbacks = record.signals.get("fp8/gemms"), record.signals.get("fp8/fallbacks")
        return fallbacks / gemms if gemms and fallbacks is not None else None


class Fp8Saturation(Fp8Limit):
    """Elements cut off at the format's maximum."""

    name = "fp8_saturation"
    what = "FP8 saturation share"
    requires = ("fp8/saturation",)


class Fp8Underflow(Fp8Limit):
    """Non-zero elements that became zero."""

    name = "fp8_underflow"
    what = "FP8 underflow share"
    requires = ("fp8/underflow",)


class Fp8Binades(Fp8Limit):
    """A scale that misses its tensor's amax by so much that few of the format's normal values are in use."""

    name = "fp8_binades"
    what = "binades left to normal FP8 values"
    above = False
    requires = ("fp8/binades",)


class Fp8ScaleStuck(Fp8Limit):
    """A scale that stands still while its tensor's amax moves."""

    name = "fp8_scale_stuck"
    what = "FP8 scale age (steps)"
    requires = ("fp8/scale_age",)


class MoeLoad(Limit):
    """The busiest expert against its layer's mean."""

    name = "moe_load"
    what = "largest expert load over the mean"
    requires = ("moe/max_load",)


class MoeDrops(Limit):
    """Tokens that found no room at their expert."""

    name = "moe_drops"
    what = "dropped token share"
    requires = ("moe/dropped",)
