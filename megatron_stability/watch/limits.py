"""From where on the watcher speaks."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

STALL_STEPS = 20.0  # a step that takes so many times the median is a stall ...
STALL_LEAST = 120.0  # ... but seconds of evaluation, or a pause of the file system, are none
KNOWN_STEPS = 5  # steps from which a median is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds, but for what says otherwise.

    Attributes:
        stall: without a step; None: 20 times the median step, at least 120.
        start: until the first step of a process has ended.
        save: for one checkpoint, from when it began until it is complete.
        node: without a heartbeat.
        free_percent: of the file system's bytes and inodes, below which it is told of.
    """

    stall: float | None = None
    start: float = 3600.0
    save: float = 1800.0
    node: float = 60.0
    free_percent: float = 5.0

    def seconds_for_a_step(self, steps: list[float]) -> float:
        """After which no step is a stall.

        Args:
            steps: seconds that the last steps took.
        """
        if self.stall is not None:
            return self.stall
        if len(steps) < KNOWN_STEPS:
            return self.start
        return max(STALL_LEAST, STALL_STEPS * median(steps))
