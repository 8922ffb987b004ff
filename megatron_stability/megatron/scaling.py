"""Learning rate and weight decay that a decision scales for some steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron_stability.act.scale import Scale
from megatron_stability.megatron.access import optimizer_state
from megatron_stability.records import Action, Decision

SCALED: Final = {Action.SCALE_LR: "lr", Action.SCALE_WEIGHT_DECAY: "weight_decay"}


class Scaling:
    """The running scales, and the parameter groups that they change for the length of one update.

    Attributes:
        running: by action; budgets that a rewind puts back hold them.
    """

    def __init__(self) -> None:
        """Nothing is scaled."""
        self.running = {action: Scale() for action in SCALED}
        self._groups = optimizer_state.ScaledGroups()

    def apply(self, decision: Decision, optimizer: Any) -> None:
        """Begin what the decision asks for, and scale the groups for its step's update.

        Args:
            decision: the step's.
            optimizer: Megatron's.
        """
        if decision.action in self.running:
            factor, steps = decision.parameters["factor"], int(decision.parameters["steps"])
            self.running[decision.action].begin(decision.step, factor, steps)
        for action, key in SCALED.items():
            self._groups.scale(optimizer, key, self.running[action].at(decision.step))

    def restore(self) -> None:
        """After the update, the schedule's own values."""
        self._groups.restore()

    def state_dict(self) -> dict[str, Any]:
        """By the action's name, as JSON primitives."""
        return {action.value: scale.state_dict() for action, scale in self.running.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        for action, scale in self.running.items():
            scale.load_state_dict(state[action.value])
