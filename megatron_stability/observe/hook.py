"""What runs with a step beside the pipeline: most measure up to its gate, some act after it (the two clips)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from megatron_stability.observe.reduction import How
from megatron_stability.records import AttentionTable, StepRecord


class Hook:
    """One of them; what it does not define is nothing to it.

    Every rank has the same ones; "collective" methods are called by every rank, in the same order.

    Attributes:
        signals: the names that `observe` may return, and how each is combined over ranks; final once training begins.
        checkpoint_key: the name of its state in a checkpoint; None: it has none.
    """

    checkpoint_key: str | None = None

    @property
    def signals(self) -> Mapping[str, How]:
        """Nothing goes into the step's record."""
        return MappingProxyType({})

    def train_begins(self) -> None:
        """Collective, before the first step."""

    def step_begins(self, step: int) -> None:
        """Before the forward of `step` (1-based)."""

    def observe(self) -> Mapping[str, torch.Tensor | float]:
        """Collective, before the gate: this rank's values for the StepRecord; NaN or absent where it has none."""
        return {}

    def judge(self, record: StepRecord) -> None:
        """Before the update: end the run where the record shows what no policy may pass over.

        Args:
            record: the step's, equal on every rank.

        Raises:
            UsageError: on every rank alike.
        """

    def update_done(self, record: StepRecord, updated: bool) -> AttentionTable | None:
        """Collective, after the optimizer; `updated` says whether it changed the weights."""

    def log_string(self, signals: Mapping[str, float]) -> str:
        """Fields for the log line, as Megatron writes them: ` name: value |`.

        Args:
            signals: of the newest record.
        """
        return ""

    def evaluated(self, suffix: str, losses: Mapping[str, torch.Tensor]) -> None:
        """Collective, after each validation set, whose losses these are; they are empty but on the last stage."""

    def state_dict(self) -> dict[str, Any]:
        """Collective over the pipeline group: JSON primitives, the same on every rank of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """When training goes on from a checkpoint; None: it holds nothing of this hook's."""
