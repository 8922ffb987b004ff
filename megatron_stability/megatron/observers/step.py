"""The clip threshold and the wall time of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megatron_stability.observe.hook import Hook
from megatron_stability.observe.reduction import How
from megatron_stability.signals import ways


class StepHook(Hook):
    """The clip threshold, and the seconds from the step's begin to its gate: forward, backward and gradient norm.

    Every rank waits for the slowest in its gradient reduction, so that a slow one shows in all. Evaluation, checkpoints
    and the log are not in it.
    """

    def __init__(self, clip_grad: float) -> None:
        """`clip_grad`: Megatron's; 0 is off."""
        self._clip_grad, self._began = clip_grad, time.perf_counter()

    @property
    def signals(self) -> Mapping[str, How]:
        """See `Hook`."""
        return ways(("clip_grad", "step_seconds") if self._clip_grad > 0 else ("step_seconds",))

    def step_begins(self, step: int) -> None:
        """Start the clock."""
        del step
        self._began = time.perf_counter()

    def observe(self) -> Mapping[str, float]:
        """Read the clock. Megatron copied the gradient norm to the host just before, so device work is in it."""
        return {"clip_grad": self._clip_grad, "step_seconds": time.perf_counter() - self._began}
