"""Gradient-norm findings: spikes by ratio and by z-score, thresholds calibrated on the run, too much clipping."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from megatron_stability.detect import config as c
from megatron_stability.detect.adam import steps_to_forget
from megatron_stability.detect.base import PLAUSIBLE, BaselineDetector, Finding, WindowDetector
from megatron_stability.records import StepRecord, Tier, Verdict


class GradNormSpike(WindowDetector):
    """r = norm / max(mean of the last `window` accepted norms, `floor`), both before clipping.

    r > `ratio`: LARGE; r > `ratio` / 2: MEDIUM, more loosely in early training. The floor keeps a model whose gradient
    is all but zero (frozen, or converged on one batch) from raising verdicts on rounding noise. In early training the
    mean is at least the median of the last RECENT accepted norms: output projections that begin at zero let the norm
    grow by the same share every step.

    A spike is one batch's; a level stays, whatever the batch. So norms that are flagged in a row are a candidate, and
    the one after `level_after` of them that are alike (within `level_spread`) is no spike but a verdict named
    "level_change". If its step is applied, the candidate takes the place of the baseline; a withheld one leaves
    it as it is, for then the policy has gone back instead.
    """

    name = "grad_norm_spike"
    RECENT = 5

    def __init__(self, config: c.GradNormSpike, early: c.Early) -> None:
        super().__init__(config, early)
        self.config = config
        self.candidate: deque[float] = deque(maxlen=config.level_after)

    def value(self, record: StepRecord) -> float | None:
        """The global norm before clipping."""
        return record.grad_norm

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        window = self.window
        if 2 * value <= self.config.ratio * max(window.mean, self.config.floor) or self.warms_up_for():
            return None
        large = self.config.ratio * self._usual(record.step)
        medium = min(large, large / 2 * self.early.looseness(record.step))
        if value <= medium:
            return None
        tier, threshold = (Tier.LARGE, large) if value > large else (Tier.MEDIUM, medium)
        base = large / self.config.ratio
        reason = f"gradient norm {value:.4g} is {value / base:.3g}x its running mean {base:.4g}"
        clipped = min(value, record.signals.get("clip_grad") or value)
        if steps := steps_to_forget(clipped / base, self.config.adam_beta2):
            reason += f"; applied, it would stay in Adam's second moment for {steps} steps"
        return Finding(tier, threshold, reason)

    def _usual(self, step: int) -> float:
        """The norm that others are a multiple of."""
        recent = sorted(list(self.window.values)[-self.RECENT :]) if step < self.early.steps else []
        return max(self.window.mean, self.config.floor, recent[len(recent) // 2] if recent else 0.0)

    def _verdict(self, step: int, finding: Finding) -> Verdict | None:
        found = super()._verdict(step, finding)
        if found is None or self._value is None or not self._is_level(self._value, step):
            return found
        low, high = min(*self.candidate, self._value), max(*self.candidate, self._value)
        reason = f"{self.name}: {len(self.candidate) + 1} norms in a row from {low:.4g} to {high:.4g} are a level, not "
        reason += f"spikes above the running mean {self.window.mean:.4g}; applied, the baseline starts anew with them"
        return replace(found, detector=c.LEVEL_CHANGE, reason=reason)

    def _is_level(self, value: float, step: int) -> bool:
        candidate, config = self.candidate, self.config
        if len(candidate) < config.level_after or not config.ratio * self._usual(step) < value <= PLAUSIBLE:
            return False
        return max(*candidate, value) <= config.level_spread * min(*candidate, value)

    def learn(self, record: StepRecord, applied: bool) -> None:
        """As the base class; an applied level is the baseline from then on."""
        level = None
        if applied and self.candidate and record.finite and self._is_level(record.grad_norm, record.step):
            level = [*self.candidate, record.grad_norm]
        super().learn(record, applied)
        if not self.run:
            self.candidate.clear()  # a row is over
        elif level is not None:
            self.reset()
            for norm in level * -(-self.config.warmup_steps // len(level)):  # so that it goes on judging at once
                self.window.push(norm)

    def suspect(self, value: float, record: StepRecord) -> None:
        """Into the candidate, which is of norms in a row."""
        if value <= PLAUSIBLE:
            self.candidate.append(value)

    def clear(self) -> None:
        """Empty window and candidate."""
        super().clear()
        self.candidate.clear()

    def baseline(self) -> dict[str, Any]:
        """Window and candidate."""
        return {**super().baseline(), "candidate": list(self.candidate)}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse; older states have no candidate."""
        super().load_baseline(state)
        self.candidate.extend(float(norm) for norm in state.get("candidate", ()))


class GradNormZ(BaselineDetector):
    """z = (log norm - m) / s with exponential moving averages m, s² of the log norm, `alpha` the past's weight.

    After ZClip (arXiv 2504.02507), which takes the norm itself and z = 2.5 to clip by. The log, since norms scatter by
    factors, and a higher z, since this raises a verdict: SMALL beyond `k` and `min_ratio`, MEDIUM beyond 2·`k`.
    """

    name = "grad_norm_z"
    count: int
    mean: float
    variance: float

    def __init__(self, config: c.GradNormZ, early: c.Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after)
        self.config = config
        self.clear()

    def value(self, record: StepRecord) -> float | None:
        """The global norm before clipping."""
        return record.grad_norm

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config = self.config
        if self.count < config.warmup_steps or value <= 0:
            return None
        excess = math.log(value) - self.mean
        if excess <= 0:
            return None
        sigma = max(math.sqrt(self.variance), config.sigma_floor)
        k = config.k * self.early.looseness(record.step)
        if excess <= k * sigma or excess <= math.log(config.min_ratio):
            return None
        tier = Tier.MEDIUM if excess > 2 * k * sigma else Tier.SMALL
        reason = f"log gradient norm is {excess / sigma:.1f} sigma above its moving average ({math.exp(excess):.3g}x)"
        return Finding(tier, math.exp(self.mean + k * sigma), reason)

    def accept(self, value: float, record: StepRecord) -> None:
        """Into the moving averages; a norm of 0 has no log and is left out."""
        if value <= 0:
            return
        self.count += 1
        past = min(self.config.alpha, 1.0 - 1.0 / self.count)  # a plain mean until it is long enough
        delta = math.log(value) - self.mean
        self.mean += (1.0 - past) * delta
        self.variance = past * (self.variance + (1.0 - past) * delta * delta)

    def warms_up_for(self) -> int:
        """See `BaselineDetector`."""
        return max(self.config.warmup_steps - self.count, 0)

    def clear(self) -> None:
        """Empty."""
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    def baseline(self) -> dict[str, Any]:
        """The moving averages."""
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.count, self.mean, self.variance = int(state["count"]), float(state["mean"]), float(state["variance"])


class Calibration(NamedTuple):
    """What a run's own gradient norms say about its thresholds."""

    clip: float  # 95th percentile: recommended --clip-grad
    alert: float  # 99th percentile
    spike: float  # mean + 3 standard deviations


def calibrate(norms: Sequence[float]) -> Calibration:
    """Thresholds from healthy norms, of the first 1000 to 2000 steps under a loose clip or of a finished run's ledger.

    Args:
        norms: at least 100 finite gradient norms before clipping.

    Returns:
        Nearest-rank percentiles and mean + 3σ.

    Raises:
        ValueError: fewer than 100 norms, or one that is not finite.
    """
    if len(norms) < 100 or not all(map(math.isfinite, norms)):
        raise ValueError(f"calibration needs at least 100 finite gradient norms, got {len(norms)}")
    ordered, n = sorted(norms), len(norms)
    mean = math.fsum(ordered) / n
    deviations = [norm - mean for norm in ordered]
    spike = mean + 3.0 * math.sqrt(math.sumprod(deviations, deviations) / n)
    return Calibration(ordered[math.ceil(0.95 * n) - 1], ordered[math.ceil(0.99 * n) - 1], spike)


class GradNormCalibrated(BaselineDetector):
    """Norms against thresholds set once, by `calibrate` over the run's first accepted norms or given in the file.

    MEDIUM above `clip_ratio` x the 95th percentile; WATCH on `persistence` norms in a row above the higher of the 99th
    percentile and mean + 3σ. Silent until calibrated. A level shift calibrates anew, unless the thresholds were given.
    """

    name = "grad_norm_calibrated"
    calibration: Calibration | None
    sample: list[float]
    left_out: int

    def __init__(self, config: c.GradNormCalibrated, early: c.Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after, persistence=config.persistence)
        self.config = config
        self.clear()

    def value(self, record: StepRecord) -> float | None:
        """The global norm before clipping."""
        return record.grad_norm

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        limits = self.calibration
        if limits is None or value <= max(limits.alert, limits.spike):
            return None
        huge = self.config.clip_ratio * limits.clip
        if value > huge:
            reason = f"gradient norm {value:.4g} is {value / limits.clip:.3g}x the calibrated clip {limits.clip:.4g}"
            return Finding(Tier.MEDIUM, huge, reason, at_once=True)
        spike = max(limits.alert, limits.spike)
        return Finding(Tier.WATCH, spike, f"gradient norm {value:.4g} is above the calibrated {spike:.4g}")

    def accept(self, value: float, record: StepRecord) -> None:
        """Into the sample, until it is large enough."""
        if self.calibration is not None:
            return
        if self.left_out < self.config.skip_steps:
            self.left_out += 1
            return
        self.sample.append(value)
        if len(self.sample) >= self.config.calibration_steps:
            self.calibration = calibrate(self.sample)
            self.sample = []

    def warms_up_for(self) -> int:
        """See `BaselineDetector`."""
        left = self.config.skip_steps - self.left_out + self.config.calibration_steps - len(self.sample)
        return left if self.calibration is None else 0

    def clear(self) -> None:
        """Back to the given thresholds, or to an empty sample."""
        config = self.config
        given = config.clip is not None and config.spike is not None
        self.calibration = Calibration(config.clip or 0.0, config.spike or 0.0, config.spike or 0.0) if given else None
        self.sample = []
        self.left_out = 0

    def baseline(self) -> dict[str, Any]:
        """The thresholds or the sample so far."""
        calibration = None if self.calibration is None else list(self.calibration)
        return {"calibration": calibration, "sample": list(self.sample), "left_out": self.left_out}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse; thresholds given in the file stay."""
        if self.calibration is None and state["calibration"] is not None:
            self.calibration = Calibration(*map(float, state["calibration"]))
        self.sample = [float(norm) for norm in state["sample"]]
        self.left_out = int(state["left_out"])


class ClipFraction:
    """Share of the last `window` finite steps with norm > clip: healthy < 5 %, > 20-30 % too tight, > 50 % worse.

    One verdict when the share rises above a limit, not one a step; the limit re-arms when the share is below it.
    """

    name = "clip_fraction"
    requires: ClassVar[tuple[str, ...]] = ("clip_grad",)
    last: deque[bool]
    clipped: int
    level: int  # the highest limit that the share is above: 0 none, 1 watch, 2 small
    standing: int  # the level that has been reported

    def __init__(self, config: c.ClipFraction, early: c.Early) -> None:
        del early  # `after_step` says when early training ends
        self.config = config
        self.reset()

    @property
    def fraction(self) -> float:
        """The share, in [0, 1]; 0 without a step."""
        return self.clipped / len(self.last) if self.last else 0.0

    def inspect(self, record: StepRecord) -> Verdict | None:
        """See the class."""
        level = self.level
        if level <= self.standing:
            return None
        limit = (self.config.watch, self.config.small)[level - 1]
        reason = f"{100 * self.fraction:.0f} % of the last {len(self.last)} steps were clipped; the clip is too tight"
        return Verdict(
            detector=self.name,
            tier=(Tier.WATCH, Tier.SMALL)[level - 1],
            step=record.step,
            value=self.fraction,
            threshold=limit,
            reason=reason,
        )

    def learn(self, record: StepRecord, applied: bool) -> None:
        """Count the step, skipped or not."""
        self.standing = self.level
        clip = record.signals.get("clip_grad")
        if clip is None or not clip > 0 or not record.finite:
            return
        if len(self.last) == self.config.window:
            self.clipped -= self.last.popleft()
        self.last.append(record.grad_norm > clip)
        self.clipped += self.last[-1]
        self.level = 0
        if len(self.last) == self.config.window and record.step > self.config.after_step:
            fraction = self.fraction
            self.level = (fraction > self.config.watch) + (fraction > self.config.small)

    def reset(self) -> None:
        """See `Detector.reset`."""
        self.last = deque()
        self.clipped = 0
        self.level = self.standing = 0

    def state_dict(self) -> dict[str, Any]:
        """See `Detector.state_dict`."""
        return {"last": "".join("01"[flag] for flag in self.last), "level": self.level, "standing": self.standing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Detector.load_state_dict`."""
        self.last = deque(flag == "1" for flag in state["last"][-self.config.window :])
        self.clipped = sum(self.last)
        self.level, self.standing = int(state["level"]), int(state["standing"])
