"""The losses that Megatron's `train_step` has: those of a step's micro-batches, and their sums for the log line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

NONE = torch.zeros(0, 2)


def of_micro_batches(losses_reduced: Sequence[dict[str, Any]]) -> torch.Tensor:
    """[n, 2] (summed loss in nats, valid tokens) of each micro-batch, on the rank that speaks for them; else [0, 2].

    Args:
        losses_reduced: as the loss function returned them, empty but on the last pipeline stage.
    """
    if not losses_reduced or parallel_state.get_tensor_model_parallel_rank() != 0:
        return NONE
    key = "lm loss" if "lm loss" in losses_reduced[0] else next(iter(losses_reduced[0]))
    return torch.stack([_sum_and_tokens(losses[key]) for losses in losses_reduced])


def _sum_and_tokens(value: torch.Tensor) -> torch.Tensor:
    """[2]; a plain mean counts as one token."""
    value = value.detach().reshape(-1)
    return value if value.numel() == 2 else torch.stack([value[0], torch.ones_like(value[0])])


def leave_out_those_of_no_step(sums: dict[str, Any]) -> None:
    """Where no step was applied since the last line, remove the sums: Megatron would log a loss of 0.

    Args:
        sums: by name, beside counts of steps, which are no tensors.
    """
    if not sums["advanced iterations"]:
        for name in [name for name, value in sums.items() if isinstance(value, torch.Tensor)]:
            del sums[name]
