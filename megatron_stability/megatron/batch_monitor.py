"""Scores of the tokens that the model is given, read where its first stage takes them in.

The score of a step's batch is in the step's own record: the gate can withhold the update, after the forward has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_stability.observe.batch import SIGNALS, scores
from megatron_stability.records import StepRecord


class BatchHook:
    """The batch of this rank's first pipeline stage; nothing on other stages."""

    signals = SIGNALS

    def __init__(self, ngram: int, model: Sequence[Any]) -> None:
        """Installs a forward pre-hook. `ngram`: see `scores`; `model`: Megatron's list of model chunks."""
        self._ngram = ngram
        self._seen: list[torch.Tensor] = []
        for chunk in unwrap_model(list(model)):
            if getattr(chunk, "pre_process", False):
                chunk.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, chunk: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        tokens = inputs[0] if inputs else options.get("input_ids")
        if chunk.training and torch.is_grad_enabled() and isinstance(tokens, torch.Tensor):
            self._seen.append(scores(tokens, self._ngram))

    def train_begins(self) -> None:
        """Nothing."""

    def step_begins(self, step: int) -> None:
        """Forget the step before."""
        del step
        self._seen.clear()

    def observe(self) -> Mapping[str, torch.Tensor]:
        """The worst row of the step's micro-batches."""
        if not self._seen:
            return {}
        seen = torch.stack(self._seen)
        return dict(zip(SIGNALS, (seen[:, 0].amax(), seen[:, 1].amin()), strict=True))

    def update_done(self, record: StepRecord, updated: bool) -> None:
        """Nothing."""
