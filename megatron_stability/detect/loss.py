"""Loss spikes."""

from __future__ import annotations

from typing import Any

from megatron_stability.config import LossSpike as Config
from megatron_stability.detect.base import BaselineDetector, Finding
from megatron_stability.detect.window import Window
from megatron_stability.records import StepRecord, Tier


def nats_tier(nats: float) -> Tier:
    """Severity by nats above the baseline: mild below 0.3, severe above 0.5."""
    if nats > 0.5:
        return Tier.LARGE
    return Tier.MEDIUM if nats >= 0.3 else Tier.SMALL


class LossSpike(BaselineDetector):
    """loss > μ + k·max(σ, `sigma_floor`) over the last `window` accepted losses, on `persistence` steps in a row.

    The tier follows the nats above μ. The floor keeps a loss that has all but stopped moving from raising verdicts.
    """

    name = "loss_spike"

    def __init__(self, config: Config) -> None:
        super().__init__(relearn_after=config.relearn_after, persistence=config.persistence)
        self.config = config
        self.window = Window(config.window)

    def value(self, record: StepRecord) -> float | None:
        """The loss in nats a token."""
        return record.loss

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        window = self.window
        if len(window) < self.config.warmup_steps or value <= window.mean:
            return None
        sigma = max(window.std, self.config.sigma_floor)
        threshold = window.mean + self.config.k * sigma
        if value <= threshold:
            return None
        nats = value - window.mean
        reason = (
            f"loss {value:.4f} nats is {nats:.3f} nats or {nats / sigma:.1f} sigma above its mean {window.mean:.4f}"
            f" of {len(window)} steps"
        )
        return Finding(nats_tier(nats), threshold, reason)

    def accept(self, value: float) -> None:
        """Into the window."""
        self.window.push(value)

    def clear(self) -> None:
        """Empty the window."""
        self.window.clear()

    def baseline(self) -> dict[str, Any]:
        """The window."""
        return {"window": self.window.state_dict()}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.window.load_state_dict(state["window"])
