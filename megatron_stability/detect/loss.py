"""Loss spikes: by standard deviations (plain and robust), by nats, by ratio, and the share of them."""

from __future__ import annotations

from collections import deque
from typing import Any

from megatron_stability.detect import config as c
from megatron_stability.detect.base import PLAUSIBLE, BaselineDetector, Finding, WindowDetector
from megatron_stability.detect.fit import LocalFit
from megatron_stability.records import StepRecord, Tier

Z_MOST = 4.0  # standard deviations that one step may add to a cumulative sum
NOISY = 2.0  # a median of nine is severe at this many standard deviations at least
SIGMA_FLOOR = 0.005  # nats: a running median of a loss that has stopped moving may still move by this


LASTING, LONG = 20, 200  # steps in a row after which a rise is no spike any more, and no mild one


def nats_tier(nats: float, row: int) -> Tier:
    """Severity of a rise by nats above the baseline and by how long it has lasted: one step alone is watched.

    Args:
        nats: above the baseline.
        row: steps in a row that it has been there, this one counted.
    """
    if row >= LASTING and nats > 0.5:
        return Tier.LARGE
    if (row >= LASTING and nats >= 0.3) or (row >= LONG and nats > 0.15):
        return Tier.MEDIUM
    return Tier.SMALL if row > 1 else Tier.WATCH


def sigma_finding(value: float, base: float, sigma: float, k: float, k_at_once: float, row: int = 1) -> Finding | None:
    """A finding if a loss is more than k sigma above its base, in a row of so many steps."""
    if value <= base + k * sigma:
        return None
    nats = value - base
    reason = f"loss {value:.4f} nats is {nats:.3f} nats or {nats / sigma:.1f} sigma above its baseline {base:.4f}"
    return Finding(nats_tier(nats, row), base + k * sigma, reason, at_once=nats > k_at_once * sigma)


class LossSpike(WindowDetector):
    """loss > μ + k·max(σ, `sigma_floor`), on `persistence` steps in a row or once beyond `k_at_once`.

    μ, σ over the last `window` accepted losses; the tier follows the nats above μ and the steps in a row. The floor
    keeps a loss that has all but stopped moving from raising verdicts. k = 4 without persistence would give 0.6 false
    alarms in 20k steps of Gaussian noise, and real noise has heavier tails.
    """

    name = "loss_spike"

    def __init__(self, config: c.LossSpike, early: c.Early) -> None:
        super().__init__(config, early)
        self.config = config

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, window = self.config, self.window
        if value <= window.mean or len(window) < config.warmup_steps:
            return None
        sigma = max(window.std, config.sigma_floor) * self.early.looseness(record.step)
        return sigma_finding(value, window.mean, sigma, config.k, config.k_at_once, self.run + 1)


class LossMad(BaselineDetector):
    """loss > fit + median + k·max(1.4826·MAD, `sigma_floor`): what `LocalFit` leaves over, against its own past.

    As `LossSpike`, but outliers in the window don't blind it, nor does a loss that still falls. Beyond `watch` nats
    `k_watch` deviations of the last residuals need no persistence, in early training either. MAD is the median
    distance of the last `window` residuals from their median. Until enough are there σ is at least `prior`, so that a
    level that begins within the first steps is not learned as noise.
    """

    name = "loss_mad"

    def __init__(self, config: c.LossMad, early: c.Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after, persistence=config.persistence)
        self.config = config
        self.fit = LocalFit(config.window)

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, fit = self.config, self.fit
        if len(fit) < config.warmup_steps:
            return None
        base = fit.center()
        if value <= base + config.k * config.sigma_floor:  # the usual case, without a MAD
            return None
        sigma = fit.sigma(config.sigma_floor, config.prior) * self.early.looseness(record.step)
        found = sigma_finding(value, base, sigma, config.k, config.k_at_once, self.run + 1)
        if found is None or not found.at_once:  # by the last residuals, which have early training's scatter in them
            base, sigma = fit.now(config.sigma_floor, config.prior)
            if value - base > max(config.watch, config.k_watch * sigma):
                return sigma_finding(value, base, sigma, config.k, config.k_watch, self.run + 1)
        return found

    def warms_up_for(self) -> int:
        """See `BaselineDetector`; the first value leaves no residual."""
        return max(self.config.warmup_steps + 1 - len(self.fit.last), 0)

    def accept(self, value: float, record: StepRecord) -> None:
        """Into the fit."""
        self.fit.push(value)

    def clear(self) -> None:
        """Empty."""
        self.fit.clear()

    def baseline(self) -> dict[str, Any]:
        """The fit."""
        return {"fit": self.fit.state_dict()}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse; an older state holds the losses themselves."""
        if "fit" in state:
            self.fit.load_state_dict(state["fit"])
            return
        for loss in state["window"]["values"]:
            self.fit.push(float(loss))


class LossDelta(WindowDetector):
    """Nats between the median of the last `smooth` losses and the mean of the last `window` accepted ones.

    A row of steps above `watch` is WATCH once it is longer than `watch_steps`, MEDIUM if it also reaches `medium` or
    lasts `mild_steps`; above `severe` it is WATCH at once, and LARGE in a row of `severe_steps`. These limits are at
    least in proportion to σ, so that a noisy loss, or one that is a sum, is judged by its own scatter. Smaller rises
    are WATCH by Page's cumulative sum (Biometrika 41, 1954), S ← max(0, S + min(z, 4) - k) > h, z in σ above the mean:
    a slow burn adds up while single bad batches, which `LossSpike` reports, do not. S > h/2 is suspicious already.
    Losses wait `lag` steps before they enter mean and σ; those that still wait when a suspicious step comes are
    dropped: a slow rise can neither drag the mean along nor hide in σ.
    """

    name = "loss_delta"

    def __init__(self, config: c.LossDelta, early: c.Early) -> None:
        super().__init__(config, early)
        self.config = config
        self.recent: deque[float] = deque(maxlen=config.smooth)
        self.waiting: deque[float] = deque()
        self.cusum = 0.0
        self._sum = 0.0  # with the value that `judge` saw last: no state

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, window, loose = self.config, self.window, self.early.looseness(record.step)
        self._sum = 0.0
        if len(window) < config.warmup_steps or len(self.recent) < config.smooth - 1:
            return None
        loose *= max(1.0, NOISY * window.std / config.severe)
        excess, watch, total = value - window.mean, config.watch * loose, 0.0
        if self.cusum or excess > config.k * SIGMA_FLOOR:  # else the sum stays 0, whatever σ is
            sigma = max(window.std, SIGMA_FLOOR) * self.early.looseness(record.step)
            total = min(self.cusum + min(excess / sigma, Z_MOST) - config.k, 1.5 * config.h)
            self._sum = total = max(total, 0.0)
        if total <= config.h / 2 and excess <= watch and max(self.recent) <= window.mean + watch:
            return None  # the usual case, without sorting
        last = sorted([*self.recent, value][-config.smooth :])
        nats = last[len(last) // 2] - window.mean
        row = self.run + 1
        reason = f"median loss of {len(last)} steps is {nats:.3f} nats above its baseline, for {row} steps"
        if nats > config.severe * loose:
            tier = Tier.LARGE if row >= config.severe_steps else Tier.WATCH
            return Finding(tier, config.severe * loose, reason)
        if nats > watch and row > config.watch_steps:
            mild = nats < config.medium * loose and row < config.mild_steps
            return Finding(Tier.WATCH if mild else Tier.MEDIUM, watch, reason)
        if total > config.h:
            reason += f"; cumulative sum {total:.1f} sigma"
            return Finding(Tier.WATCH, watch, reason)
        return Finding(None, watch, reason) if total > config.h / 2 or nats > watch else None

    def suspect(self, value: float, record: StepRecord) -> None:
        """What waits is not learned; median and cumulative sum see flagged losses too: they are no baseline."""
        self.waiting.clear()
        self.cusum = self._sum
        if abs(value) <= PLAUSIBLE:
            self.recent.append(value)

    def accept(self, value: float, record: StepRecord) -> None:
        """Into the queue, and what has waited long enough into the window."""
        self.cusum = self._sum
        self.recent.append(value)
        self.waiting.append(value)
        if len(self.waiting) > self.config.lag:
            self.window.push(self.waiting.popleft())

    def warms_up_for(self) -> int:
        """See `BaselineDetector`; a loss waits `lag` steps first."""
        left = super().warms_up_for()
        return left and left + self.config.lag - len(self.waiting)

    def clear(self) -> None:
        """Empty window, queue, running median and sum."""
        super().clear()
        self.cusum = self._sum = 0.0
        self.waiting.clear()
        self.recent.clear()

    def baseline(self) -> dict[str, Any]:
        """Window, queue, running median and sum."""
        lists = {"waiting": list(self.waiting), "recent": list(self.recent)}
        return {**super().baseline(), **lists, "cusum": self.cusum}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        super().load_baseline(state)
        self.waiting.extend(float(value) for value in state["waiting"])
        self.recent.extend(float(value) for value in state["recent"])
        self.cusum = float(state["cusum"])


class LossRatio(WindowDetector):
    """loss / mean of the last `window` accepted losses.

    SMALL from `small`, MEDIUM from `medium` or in a row longer than `small_steps`, LARGE from `large`.
    """

    name = "loss_ratio"

    def __init__(self, config: c.LossRatio, early: c.Early) -> None:
        super().__init__(config, early)
        self.config = config

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, mean = self.config, self.window.mean
        if value <= config.small * mean or mean <= 0 or len(self.window) < config.warmup_steps:
            return None
        ratio, row = value / mean, self.run + 1
        reason = f"loss {value:.4f} nats is {ratio:.3g}x its running mean {mean:.4f}, for {row} steps"
        if ratio >= config.large:
            return Finding(Tier.LARGE, config.large * mean, reason)
        if ratio >= config.medium or row > config.small_steps:
            return Finding(Tier.MEDIUM, config.medium * mean, reason)
        return Finding(Tier.SMALL, config.small * mean, reason)


class SpikeScore(WindowDetector):
    """OLMo 2's spike score: the share of values at least k = 7 σ above a rolling mean of 1000.

    Here the rolling mean takes accepted values only, and a verdict (WATCH) is raised at a spike that finds the share of
    the last `window` steps above `alert`: single spikes are other detectors' business.
    """

    def __init__(self, config: c.SpikeScore, early: c.Early) -> None:
        super().__init__(config, early)
        self.config = config
        self.spikes: deque[int] = deque()  # steps of the spikes among the last `window`

    def score(self, step: int) -> float:
        """The share of the last `window` steps up to `step`, in [0, 1]."""
        return sum(step - at < self.config.window for at in self.spikes) / self.config.window

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, window = self.config, self.window
        if not window.above(value, config.k) or len(window) < config.warmup_steps:
            return None
        score = self.score(record.step) + 1 / config.window
        reason = f"spike score {100 * score:.2f} % of the last {config.window} steps ({config.k:g} sigma)"
        tier = Tier.WATCH if score > config.alert else None
        return Finding(tier, window.mean + config.k * window.std, reason)

    def suspect(self, value: float, record: StepRecord) -> None:
        """Flagged values count in the share."""
        self.spikes.append(record.step)
        while record.step - self.spikes[0] >= self.config.window:
            self.spikes.popleft()

    def clear(self) -> None:
        """Empty the baseline and the share."""
        super().clear()
        self.spikes.clear()

    def baseline(self) -> dict[str, Any]:
        """The window and the spikes in it."""
        return {**super().baseline(), "spikes": list(self.spikes)}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        super().load_baseline(state)
        self.spikes.extend(int(at) for at in state["spikes"])


class LossSpikeScore(SpikeScore):
    """The spike score of the loss."""

    name = "loss_spike_score"

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss


class GradNormSpikeScore(SpikeScore):
    """The spike score of the gradient norm."""

    name = "grad_norm_spike_score"

    def value(self, record: StepRecord) -> float | None:
        """The global norm before clipping."""
        return record.grad_norm
