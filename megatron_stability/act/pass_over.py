"""Samples that are not to be trained on, by their place in the global order, and the steps that read them.

A step is passed over whole if it would read one sample of a window: its samples are drawn, nothing is computed, the
iteration counts, the scheduler stands. A window stays where it is when the batch size changes, and after any number of
restarts. A step that is named by its number becomes a window of its samples once it is met.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Window:
    """Samples `first` to `last` (exclusive)."""

    first: int
    last: int
    reason: str


class PassOver:
    """The windows of a run, equal on all ranks."""

    def __init__(self, samples: Iterable[tuple[int, int]] = (), steps: Iterable[int] = ()) -> None:
        """Starts with windows and steps that the user named.

        Args:
            samples: (first, last) sample indexes, `last` exclusive.
            steps: 1-based.
        """
        self.windows = [Window(first, last, "--stability-decide-skip-samples") for first, last in samples]
        self._steps = set(steps)
        self._met: set[int] = set()  # steps that have become windows

    def add(self, first: int, last: int, reason: str) -> None:
        """One more window."""
        window = Window(first, last, reason)
        if window not in self.windows:
            self.windows.append(window)

    def reason(self, step: int, first: int, last: int) -> str | None:
        """Why a step is passed over.

        Args:
            step: 1-based.
            first: the first sample that it would read.
            last: the one after its last.

        Returns:
            One phrase; None for a step that is trained on.
        """
        for window in self.windows:
            if window.first < last and first < window.last:
                return window.reason
        if step not in self._steps - self._met:
            return None
        self._met.add(step)
        self.add(first, last, f"--iterations-to-skip {step}")
        return self.windows[-1].reason

    def state_dict(self) -> dict[str, Any]:
        """JSON primitives."""
        return {"windows": [[w.first, w.last, w.reason] for w in self.windows], "met": sorted(self._met)}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take windows of a `state_dict` in addition to those that are there."""
        for first, last, reason in state["windows"]:
            self.add(int(first), int(last), str(reason))
        self._met |= {int(step) for step in state["met"]}
