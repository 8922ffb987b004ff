"""A robust local fit to the last accepted losses, and what it leaves over."""

from __future__ import annotations

from collections import deque
from typing import Any

from megatron_stability.detect.window import SortedWindow

NEAR = 10  # values in each of the two medians
SETTLED = 50  # residuals after which their own scatter is trusted alone
LATEST = 30  # residuals by which a single value is judged: those of a steeper fall long before say nothing of it
MAD_TO_SIGMA = 1.4826  # of Gaussian noise


class LocalFit:
    """The median of the last `NEAR` values; where that is below most of the `NEAR` before, it goes on falling so fast.

    So a value of early training is judged by the scatter there, and not by the fall. A rise is never carried on.
    """

    def __init__(self, window: int) -> None:
        self.residuals = SortedWindow(window)
        self.latest = SortedWindow(min(LATEST, window))
        self.last: deque[float] = deque(maxlen=2 * NEAR)
        self._level: float | None = None  # follows from `last`: no state

    def __len__(self) -> int:
        return len(self.residuals)

    def next(self) -> float:
        """What the next value should be; at least one was pushed."""
        if self._level is None:
            values = list(self.last)
            half = min(NEAR, (len(values) + 1) // 2)
            new, old = sorted(values[-half:]), sorted(values[:-half][-half:])
            level = new[half // 2]
            fall = (level - old[len(old) // 2]) / half if old and level < old[len(old) // 5] else 0.0
            self._level = level + fall * (half + 1) / 2
        return self._level

    def center(self) -> float:
        """`next`, with the median of what it left over; at least two were pushed."""
        return self.next() + self.residuals.median

    def sigma(self, floor: float, prior: float) -> float:
        """Scatter of the residuals by their MAD, at least `floor`, and at least `prior` until they have settled."""
        sigma = MAD_TO_SIGMA * self.residuals.mad
        return max(sigma, floor) if len(self) >= SETTLED else max(sigma, floor, prior)

    def now(self, floor: float, prior: float) -> tuple[float, float]:
        """`center` and `sigma` by the last `LATEST` residuals alone."""
        sigma = max(MAD_TO_SIGMA * self.latest.mad, floor)
        return self.next() + self.latest.median, sigma if len(self) >= SETTLED else max(sigma, prior)

    def push(self, value: float) -> None:
        """The residual, then the value."""
        if self.last:
            residual = value - self.next()
            self.residuals.push(residual)
            self.latest.push(residual)
        self.last.append(value)
        self._level = None

    def clear(self) -> None:
        """Empty."""
        self.residuals.clear()
        self.latest.clear()
        self.last.clear()
        self._level = None

    def state_dict(self) -> dict[str, Any]:
        """JSON primitives."""
        return {"residuals": self.residuals.state_dict(), "last": list(self.last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.clear()
        self.residuals.load_state_dict(state["residuals"])
        self.latest.load_state_dict(state["residuals"])  # its newest
        self.last.extend(float(value) for value in state["last"])
