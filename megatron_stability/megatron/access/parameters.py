"""Which parameters a rank counts, such that over all ranks each element is counted once, and in which layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_stability.megatron.access import master_weights

LAYER = re.compile(r"(?:^|\.)decoder\.layers\.\d+$")


def layer_of(model: Sequence[Any]) -> dict[str, int]:
    """The 1-based global number of the decoder layer that a parameter of this rank belongs to, by its name."""
    found: dict[str, int] = {}
    for number, chunk in enumerate(model):
        for path, module in chunk.named_modules():
            if LAYER.search(path):
                found |= {f"{number}.{path}.{name}": int(module.layer_number) for name, _ in module.named_parameters()}
    return found


def once(model: Sequence[Any], optimizer: Any, instances: int) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's share of the trainable parameters, such that over all ranks each element is counted once.

    Args:
        model: Megatron's list of model chunks.
        optimizer: Megatron's, chained or not.
        instances: --num-distributed-optimizer-instances.

    Yields:
        "CHUNK.NAME" and the parameter, of which `master_weights.own_range` counts where its optimizer cuts it.
    """
    first_instance = (
        instances < 2 or dist.get_rank(parallel_state.get_inter_distributed_optimizer_instance_group()) == 0
    )
    for number, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            expert = not getattr(parameter, "allreduce", True)  # Megatron marks expert parameters so
            tensor_group = parallel_state.get_expert_tensor_parallel_group() if expert else None
            if not (
                parameter.requires_grad
                and param_is_not_shared(parameter)
                and param_is_not_tensor_parallel_duplicate(parameter, tensor_group)
            ):
                continue
            replica = (
                parallel_state.get_expert_data_parallel_rank()
                if expert
                else parallel_state.get_data_parallel_rank(with_context_parallel=True)
            )
            sharded = master_weights.sharded_by(parameter, optimizer) is not None
            if first_instance if sharded else replica == 0:
                yield f"{number}.{name}", parameter
