"""Our state in Megatron's checkpoints: baselines, budgets, scales, what is passed over, and what hooks keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from megatron.training import print_rank_last

from megatron_stability.megatron.checkpoint.rewind import Rewinds
from megatron_stability.megatron.checkpoint.trajectory import Trajectory
from megatron_stability.megatron.scaling import Scaling
from megatron_stability.observe.hook import Hook
from megatron_stability.pipeline import Pipeline

KEY: Final = "megatron_stability"


class OwnState:
    """One a rank; equal on all ranks.

    Attributes:
        saved: what the checkpoint that was loaded last has; empty where none was, or one without it.
        hooks: whose state is in it; of the run, once they are made.
    """

    def __init__(self, pipeline: Pipeline[Any], scaling: Scaling, rewinds: Rewinds, trajectory: Trajectory) -> None:
        """Takes what has state."""
        self._pipeline, self._scaling, self._rewinds, self._trajectory = pipeline, scaling, rewinds, trajectory
        self.saved: dict[str, Any] = {}
        self.hooks: Sequence[Hook] = ()

    def state_dict(self) -> dict[str, Any]:
        """Collective where a hook's is."""
        own = {
            "scales": self._scaling.state_dict(),
            "hooks": {hook.checkpoint_key: hook.state_dict() for hook in self.hooks if hook.checkpoint_key is not None},
            "pass_over": self._rewinds.pass_over.state_dict(),
            "trajectory": self._trajectory.state_dict(),
        }
        return self._pipeline.state_dict() | own

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The inverse, but for the hooks, which may not be made yet: `load_hooks`."""
        self.saved = saved
        self._pipeline.load_state_dict(saved)
        self._trajectory.load_state_dict(saved.get("trajectory"))
        self._scaling.load_state_dict(saved["scales"])

    def load_hooks(self) -> None:
        """Give each hook its part of what was loaded last.

        Raises:
            UsageError: a hook can't go on without its state.
        """
        for hook in self.hooks:
            if hook.checkpoint_key is not None:
                hook.load_state_dict(self.saved.get("hooks", {}).get(hook.checkpoint_key))

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """One JSON string: equal on all ranks, and nothing that a weights_only load refuses."""
        checkpoint[KEY] = json.dumps(self.state_dict(), allow_nan=False)

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Baselines and budgets go on where they were; a checkpoint without them is said, not assumed."""
        state = checkpoint.get(KEY)
        if state is None:
            print_rank_last("> megatron-stability: the checkpoint has no detector state; baselines start afresh")
        else:
            self.load_state_dict(json.loads(state))
