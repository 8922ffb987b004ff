"""Gradient-norm spikes."""

from __future__ import annotations

from typing import Any

from megatron_stability.config import GradNormSpike as Config
from megatron_stability.detect.base import BaselineDetector, Finding
from megatron_stability.detect.window import Window
from megatron_stability.records import StepRecord, Tier


class GradNormSpike(BaselineDetector):
    """r = norm / max(mean of the last `window` accepted norms, `floor`), both before clipping.

    r > `ratio`: LARGE; r > `ratio` / 2: MEDIUM. The floor keeps a model whose gradient is all but zero (frozen, or
    converged on one batch) from raising verdicts on rounding noise.
    """

    name = "grad_norm_spike"

    def __init__(self, config: Config) -> None:
        super().__init__(relearn_after=config.relearn_after)
        self.config = config
        self.window = Window(config.window)

    def value(self, record: StepRecord) -> float | None:
        """The global norm."""
        return record.grad_norm

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        if len(self.window) < self.config.warmup_steps:
            return None
        base = max(self.window.mean, self.config.floor)
        large = self.config.ratio * base
        if value <= large / 2:
            return None
        tier, threshold = (Tier.LARGE, large) if value > large else (Tier.MEDIUM, large / 2)
        reason = f"gradient norm {value:.4g} is {value / base:.3g}x its running mean {base:.4g}"
        return Finding(tier, threshold, reason)

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
