"""Statistics of the last W accepted values, without drift."""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import Any


class Window:
    """A ring of the last `size` finite values with their mean and population standard deviation.

    Mean and M2 (the sum of squared deviations) are kept by Welford's update for a sliding window, which costs the same
    for any W, and are computed anew from the values every `size` pushes, and whenever most of M2 leaves with one value,
    so rounding can't pile up. All of it is saved, so a restored window continues bit-identically.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Empty."""
        self.values: deque[float] = deque(maxlen=self.size)
        self.mean = 0.0
        self._m2 = 0.0
        self._age = 0

    def __len__(self) -> int:
        return len(self.values)

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for fewer than two values."""
        return math.sqrt(self._m2 / len(self.values)) if len(self.values) > 1 else 0.0

    def above(self, value: float, k: float) -> bool:
        """Whether value > mean + k standard deviations (and above the mean, where there is no deviation)."""
        excess = value - self.mean
        return excess > 0 and excess * excess * len(self.values) > k * k * self._m2

    def push(self, value: float) -> None:
        """Add a value of magnitude at most `base.PLAUSIBLE`; the oldest leaves once the window is full."""
        values = self.values
        before = self._m2
        if len(values) == self.size:
            oldest = values[0]
            values.append(value)
            change = value - oldest
            mean = self.mean
            self.mean = mean + change / self.size
            self._m2 = before + change * (value - self.mean + oldest - mean)
        else:
            values.append(value)
            delta = value - self.mean
            self.mean += delta / len(values)
            self._m2 = before + delta * (value - self.mean)
        self._age += 1
        if self._age >= self.size or self._m2 < 1e-3 * before:
            self._recompute()

    def _recompute(self) -> None:
        values = self.values
        self._age = 0
        self.mean = math.fsum(values) / len(values)
        deviations = [value - self.mean for value in values]
        self._m2 = math.sumprod(deviations, deviations)

    def state_dict(self) -> dict[str, Any]:
        """JSON primitives."""
        return {"values": list(self.values), "mean": self.mean, "m2": self._m2, "age": self._age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; of a longer window the newest `size` values stay."""
        values = [float(value) for value in state["values"]]
        self.values = deque(values, maxlen=self.size)
        self.mean, self._m2, self._age = float(state["mean"]), float(state["m2"]), int(state["age"])
        if len(values) > self.size or self._age >= self.size:
            self._recompute()


class SortedWindow:
    """A ring of the last `size` finite values with their median and MAD (median absolute deviation), both exact."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Empty."""
        self.values: deque[float] = deque(maxlen=self.size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> None:
        """Add a value; the oldest leaves once the window is full."""
        if len(self.values) == self.size:
            del self._sorted[bisect.bisect_left(self._sorted, self.values[0])]
        self.values.append(value)
        bisect.insort(self._sorted, value)

    @property
    def median(self) -> float:
        """The upper median, an element of the window."""
        return self._sorted[len(self._sorted) // 2]

    @property
    def mad(self) -> float:
        """The (n // 2 + 1)-th smallest distance from the median, in O(log n).

        Those nearest to the median are neighbours in sorted order; over the runs of n // 2 + 1 of them the distance to
        the left end falls and the one to the right end rises, so the best run is where they cross.
        """
        values, median = self._sorted, self.median
        span = len(values) // 2
        low, high = 0, len(values) - span - 1
        while low < high:
            middle = (low + high) // 2
            if median - values[middle] > values[middle + span] - median:
                low = middle + 1
            else:
                high = middle
        best = max(median - values[low], values[low + span] - median)
        return min(best, max(median - values[low - 1], values[low - 1 + span] - median)) if low else best

    def state_dict(self) -> dict[str, Any]:
        """JSON primitives."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; of a longer window the newest `size` values stay."""
        self.values = deque((float(value) for value in state["values"]), maxlen=self.size)
        self._sorted = sorted(self.values)
