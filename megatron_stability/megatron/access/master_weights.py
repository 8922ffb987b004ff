"""Every copy of a parameter that a training step reads: the model's, and the optimizer's fp32 master or shard of it.

    fp32 model                    the parameter itself
    Float16Optimizer              a whole fp32 master (`param.main_param`)
    layer-wise (Muon)             a whole master on one data-parallel rank, none on the others
    distributed optimizer         a flat shard of the master whose boundaries fall anywhere; none where a rank owns none
    precision-aware optimizer     as above, kept in the optimizer's state

A change that every rank makes to its own copies, element by element, keeps the copies of all data-parallel ranks equal
without communication. With `--overlap-param-gather` the parts of the model's copy that other ranks own are stale until
the next forward gathers them; what is written there is overwritten by the owner's value.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_stability.errors import UsageError


class Copy(NamedTuple):
    """A flat view of elements `start` … of a parameter."""

    flat: torch.Tensor
    start: int


def refuse_what_has_no_plain_copies(args: Namespace, feature: str) -> None:
    """Raise for settings under which the copies are quantized, cut in another way, or in flight after a step.

    Args:
        args: Megatron's arguments.
        feature: named in the sentence, e.g. "qk_clip".

    Raises:
        UsageError: names the flag.
    """
    for name, why in (
        ("fp8_param_gather", "the weights themselves are FP8, and scaling rows would need a new quantization"),
        ("fp4_param_gather", "the weights themselves are FP4, and scaling rows would need a new quantization"),
        ("use_megatron_fsdp", "Megatron-FSDP cuts weights in its own way"),
        ("use_torch_fsdp2", "FSDP2 cuts weights in its own way"),
        ("optimizer_cpu_offload", "the master weights move between host and device"),
        ("overlap_param_gather_with_optimizer_step", "weights are on their way to other ranks when the step ends"),
    ):
        if getattr(args, name, False):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{feature} with {flag}: {why}; drop the flag or turn {feature} off")


def copies(parameter: torch.nn.Parameter, optimizer: Any) -> list[Copy]:
    """The model's copy, and this rank's master or shard of it, if it has one of its own.

    Args:
        parameter: of the model, on this rank.
        optimizer: Megatron's, chained or not.

    Returns:
        One or two flat views, never two of the same memory.

    Raises:
        UsageError: the optimizer keeps the master in a form that can't be scaled in place.
    """
    model = parameter.data.view(-1)
    found = [Copy(model, 0)]
    main = getattr(parameter, "main_param", None)
    owner = _owner(parameter, optimizer)
    if main is not None and not getattr(parameter, "main_param_sharded", False):
        found.append(Copy(main.data.view(-1), 0))
    elif main is not None or owner is not None:
        assert owner is not None, "a sharded master without a distributed optimizer"
        start = owner._get_model_param_range_map(parameter)["param"].start
        found.append(Copy((_kept_by_optimizer(parameter, owner) if main is None else main.data).view(-1), start))
    same = found[-1].flat.untyped_storage().data_ptr() == model.untyped_storage().data_ptr()
    return found[:1] if same else found


def sharded_by(parameter: torch.nn.Parameter, optimizer: Any) -> DistributedOptimizer | None:
    """The distributed optimizer that cuts a parameter; the same answer on ranks whose part is empty."""
    sharding = (leaf for leaf in _leaves(optimizer) if isinstance(leaf, DistributedOptimizer))
    return next((leaf for leaf in sharding if any(parameter in b.param_index_map for b in leaf.buffers)), None)


def own_range(parameter: torch.nn.Parameter, owner: DistributedOptimizer) -> slice:
    """The elements of a parameter that this rank keeps the master of, perhaps none.

    Args:
        parameter: of the model, on this rank.
        owner: from `sharded_by`.
    """
    if parameter not in owner.model_param_gbuf_map:
        return slice(0, 0)
    shard = owner._get_model_param_range_map(parameter)["param"]
    return slice(shard.start, shard.end)


def own_master(parameter: torch.nn.Parameter, optimizer: Any) -> Copy:
    """This rank's fp32 master or its part of it, which may be empty; the parameter itself, or a part, without a master.

    Args:
        parameter: of the model, on this rank.
        optimizer: Megatron's, chained or not.
    """
    found, owner = copies(parameter, optimizer), sharded_by(parameter, optimizer)
    if owner is None:
        return found[-1]
    part = own_range(parameter, owner)
    if part.stop == part.start or len(found) == 1:
        return Copy(found[0].flat[part], part.start)
    return found[-1]


def _owner(parameter: torch.nn.Parameter, optimizer: Any) -> DistributedOptimizer | None:
    for leaf in _leaves(optimizer):
        if isinstance(leaf, DistributedOptimizer) and parameter in leaf.model_param_group_index_map:
            return leaf
    return None


def _leaves(optimizer: Any) -> Iterator[Any]:
    children = getattr(optimizer, "chained_optimizers", None)
    if children is None:
        yield optimizer
        return
    for child in children:
        yield from _leaves(child)


def _kept_by_optimizer(parameter: torch.nn.Parameter, owner: DistributedOptimizer) -> torch.Tensor:
    """The master that the inner optimizer holds; for an fp32 model the shard is a view of the parameter itself."""
    group, order = owner.model_param_group_index_map[parameter]
    held = owner.optimizer.param_groups[group]["params"][order]
    master = owner.optimizer.state.get(held, {}).get("master_param", held)
    if master.dtype is not torch.float32:
        raise UsageError(
            f"--use-precision-aware-optimizer keeps master weights as {master.dtype}, which can't be scaled in place; "
            "keep them in fp32 or turn qk_clip off"
        )
    return master.data
