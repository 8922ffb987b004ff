"""Batches unlike the run's own first ones: repeated text, few different tokens, few targets."""

from __future__ import annotations

from statistics import median
from typing import Any, ClassVar

from megatron_stability.detect import config as c
from megatron_stability.detect.base import BaselineDetector, Finding
from megatron_stability.records import StepRecord, Tier, Verdict

AHEAD = ("data/next/repeated", "data/next/entropy")


class BadBatch(BaselineDetector):
    """A row of the batch that repeats itself, by thresholds from the run's first `calibration_steps` batches.

    The score is s = max((r - r̄) / (1 - r̄), 1 - h / h̄): r the largest share of repeated n-grams of a row and h the least
    token entropy, r̄ and h̄ their medians over the calibration; 0 is a usual batch, 1 a row of one token. The limit is
    the larger of `floor` and median + k·1.4826·MAD of the calibration's own scores, which a bad batch among them does
    not move. MEDIUM above it.
    """

    name = "bad_batch"
    requires: ClassVar[tuple[str, ...]] = ("data/repeated", "data/entropy")
    sample: list[tuple[float, float]]
    usual: tuple[float, float, float] | None  # r̄, h̄ and the limit, once calibrated

    def __init__(self, config: c.BadBatch, early: c.Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after)
        self.config = config
        self.clear()

    def value(self, record: StepRecord) -> float | None:
        """The score s; 0 until calibrated."""
        signals = record.signals
        repeated, entropy = signals.get("data/repeated"), signals.get("data/entropy")
        if repeated is None or entropy is None:
            return None
        return 0.0 if self.usual is None else _score(repeated, entropy, *self.usual[:2])

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        if self.usual is None or value <= self.usual[2]:
            return None
        repeated, entropy = (record.signals[name] for name in self.requires)
        reason = self._reason(repeated, entropy, self.usual)
        return Finding(Tier.MEDIUM, self.usual[2], reason)

    def ahead(self, record: StepRecord) -> Verdict | None:
        """A verdict on the step after a record, from the score of its batch that the record brought."""
        repeated, entropy = (record.signals.get(name) for name in AHEAD)
        if repeated is None or entropy is None or self.usual is None:
            return None
        score = _score(repeated, entropy, *self.usual[:2])
        if score <= self.usual[2]:
            return None
        reason, limit = self._reason(repeated, entropy, self.usual), self.usual[2]
        return Verdict(
            detector=self.name, tier=Tier.MEDIUM, step=record.step + 1, value=score, threshold=limit, reason=reason
        )

    @staticmethod
    def _reason(repeated: float, entropy: float, usual: tuple[float, float, float]) -> str:
        return (
            f"a row of the batch has {100 * repeated:.0f} % repeated n-grams (usual {100 * usual[0]:.0f} %) and "
            f"{entropy:.2f} nats of token entropy (usual {usual[1]:.2f})"
        )

    def accept(self, value: float, record: StepRecord) -> None:
        """Into the sample, until it is large enough."""
        if self.usual is not None:
            return
        repeated, entropy = (record.signals[name] for name in self.requires)
        self.sample.append((repeated, entropy))
        if len(self.sample) < self.config.calibration_steps:
            return
        repeated, entropy = (median(column) for column in zip(*self.sample, strict=True))
        found = [_score(*pair, repeated, entropy) for pair in self.sample]
        middle = median(found)
        spread = 1.4826 * median(abs(score - middle) for score in found)
        self.usual = repeated, entropy, max(self.config.floor, middle + self.config.k * spread)
        self.sample = []

    def clear(self) -> None:
        """Calibrate anew."""
        self.sample, self.usual = [], None

    def baseline(self) -> dict[str, Any]:
        """The thresholds or the sample so far."""
        return {"sample": [list(pair) for pair in self.sample], "usual": self.usual and list(self.usual)}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.sample = [(float(repeated), float(entropy)) for repeated, entropy in state["sample"]]
        if state["usual"] is not None:
            repeated, entropy, limit = map(float, state["usual"])
            self.usual = repeated, entropy, limit


def _score(repeated: float, entropy: float, usual_repeated: float, usual_entropy: float) -> float:
    fewer = 1.0 - entropy / usual_entropy if usual_entropy > 0 else 0.0
    more = (repeated - usual_repeated) / (1.0 - usual_repeated) if usual_repeated < 1 else 0.0
    return max(more, fewer)


class TokenDrop(BaselineDetector):
    """Valid target tokens a sample, against the most that the run has had: masks or packing that eat the targets.

    The most is that of the medians of `block` accepted values, which a slow fall can't drag along. WATCH below `watch`
    of it, SMALL below `small`, MEDIUM below `medium`, on `persistence` steps in a row: told long before no token is
    left, where the loss has no value any more.
    """

    name = "token_drop"
    part: list[float]
    most: float

    def __init__(self, config: c.TokenDrop, early: c.Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after, persistence=config.persistence)
        self.config = config
        self.clear()

    def value(self, record: StepRecord) -> float | None:
        """Tokens a sample."""
        return record.tokens / record.samples if record.samples > 0 else None

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        config, most = self.config, self.most
        if value >= config.watch * most:
            return None
        limits = (Tier.MEDIUM, config.medium), (Tier.SMALL, config.small), (Tier.WATCH, config.watch)
        tier, share = next(limit for limit in limits if value < limit[1] * most)
        reason = f"{value:.4g} valid target tokens a sample are {value / most:.2g} of the {most:.4g} that there were"
        return Finding(tier, share * most, reason)

    def accept(self, value: float, record: StepRecord) -> None:
        """Into the block, and its median into the most."""
        self.part.append(value)
        if len(self.part) == self.config.block:
            self.most = max(self.most, median(self.part))
            self.part = []

    def warms_up_for(self) -> int:
        """See `BaselineDetector`."""
        return 0 if self.most else self.config.block - len(self.part)

    def clear(self) -> None:
        """Forget the most."""
        self.part, self.most = [], 0.0

    def baseline(self) -> dict[str, Any]:
        """The block and the most."""
        return {"part": list(self.part), "most": self.most}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.part, self.most = [float(value) for value in state["part"]], float(state["most"])
