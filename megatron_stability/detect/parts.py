"""Gradient norms of the parts of a chained optimizer, each against its own past."""

from __future__ import annotations

from typing import Any

from megatron_stability.detect import config as c
from megatron_stability.detect.base import PLAUSIBLE, BaselineDetector, Finding
from megatron_stability.detect.window import Window
from megatron_stability.records import StepRecord, Tier
from megatron_stability.signals import OPTIMIZERS, PARTS


class GradNormParts(BaselineDetector):
    """The worst part's norm as a multiple of its own mean: LARGE above `ratio`, MEDIUM above half of it.

    The whole norm is that of the largest part: under Muon's matrices a thousandfold norm of what Adam updates does not
    show in it.
    """

    name = "grad_norm_parts"
    requires = (OPTIMIZERS,)

    def __init__(self, config: c.GradNormSpike, early: c.Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after, persistence=config.persistence)
        self.config = config
        self.windows: dict[str, Window] = {}

    def value(self, record: StepRecord) -> float | None:
        """The largest ratio of a part's norm to its mean; 1 while there is none to compare with."""
        if OPTIMIZERS not in record.signals:
            return None
        ratios = [self._ratio(name, norm) for name, norm in self._norms(record)]
        return max(ratios, default=None)

    @staticmethod
    def _norms(record: StepRecord) -> list[tuple[str, float]]:
        return [(name, norm) for name, norm in record.signals.items() if name.startswith(PARTS)]

    def _ratio(self, name: str, norm: float) -> float:
        window = self.windows.get(name)
        if window is None or len(window) < self.config.warmup_steps:
            return 1.0 if abs(norm) <= PLAUSIBLE else norm
        return norm / max(window.mean, self.config.floor)

    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """See the class."""
        large = self.config.ratio
        medium = min(large, large / 2 * self.early.looseness(record.step))
        if value <= medium:
            return None
        name, norm = max(self._norms(record), key=lambda part: self._ratio(*part))
        reason = f"gradient norm {norm:.4g} of {name.removeprefix(PARTS)} is {value:.3g}x its own running mean"
        return Finding(Tier.LARGE, large, reason) if value > large else Finding(Tier.MEDIUM, medium, reason)

    def accept(self, value: float, record: StepRecord) -> None:
        """Each part's norm into its window."""
        for name, norm in self._norms(record):
            self.windows.setdefault(name, Window(self.config.window)).push(norm)

    def clear(self) -> None:
        """Forget every part."""
        self.windows = {}

    def baseline(self) -> dict[str, Any]:
        """A window for each part."""
        return {"windows": {name: window.state_dict() for name, window in self.windows.items()}}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        for name, saved in state["windows"].items():
            self.windows[str(name)] = Window(self.config.window)
            self.windows[str(name)].load_state_dict(saved)
