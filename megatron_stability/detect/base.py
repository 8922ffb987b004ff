"""What a detector is."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_stability.records import StepRecord, Verdict


class Detector(Protocol):
    """Looks at each step's record; pure, deterministic, with state that can be saved.

    Order per step: `inspect` judges the record against the baseline as it was, the policy decides, then `learn` is told
    whether the step was accepted (finite, not flagged by this detector, and applied). A flagged or skipped value never
    enters a baseline.
    """

    name: str

    def inspect(self, record: StepRecord) -> Verdict | None:
        """A verdict, or None where nothing was found. Does not change the baseline."""

    def learn(self, record: StepRecord, verdict: Verdict | None, applied: bool) -> None:
        """Update the baseline after the decision."""

    def reset(self) -> None:
        """Back to the state before the first step."""

    def state_dict(self) -> dict[str, Any]:
        """State as JSON primitives (numbers, strings, lists, dicts)."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
