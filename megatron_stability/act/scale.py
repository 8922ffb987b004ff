"""Relief for a while: a factor on the scheduler's learning rate or weight decay, ramped back to 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RAMP = 0.1  # share of the steps, at their end, over which the factor returns to 1


@dataclass(slots=True)
class Scale:
    """One factor and how long it lasts; step counts are 1-based, like everywhere.

    A new factor takes the place of the old: the policy's cool-down keeps two from piling up.
    """

    factor: float = 1.0
    first: int = 0
    steps: int = 0

    def begin(self, step: int, factor: float, steps: int) -> None:
        """From `step` on, for `steps` steps."""
        self.factor, self.first, self.steps = factor, step, steps

    def at(self, step: int) -> float:
        """What the scheduler's value is multiplied by in `step`: the factor, then a line back to 1."""
        done = step - self.first
        if not 0 <= done < self.steps:
            return 1.0
        ramp = max(1, round(RAMP * self.steps))
        left = self.steps - done
        return self.factor if left > ramp else 1.0 + (self.factor - 1.0) * left / (ramp + 1)

    def state_dict(self) -> dict[str, Any]:
        """JSON primitives."""
        return {"factor": self.factor, "first": self.first, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.begin(int(state["first"]), float(state["factor"]), int(state["steps"]))
