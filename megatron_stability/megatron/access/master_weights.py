"""Every copy of a parameter that a training step reads: the model's, and the optimizer's fp32 master or shard of it.

    fp32 model                    the parameter itself
    Float16Optimizer              a whole fp32 master (`param.main_param`)
    layer-wise (Muon)             a whole master on one data-parallel rank, none on the others
    distributed optimizer         a flat shard of the master whose boundaries fall anywhere; none where a rank owns none
    precision-aware optimizer     as above, in the optimizer's state; by default the 16 bits that the weight lacks

A change that every rank makes to its own copies, element by element, keeps the copies of all data-parallel ranks equal
without communication. With `--overlap-param-gather` the parts of the model's copy that other ranks own are stale until
the next forward gathers them; what is written there is overwritten by the owner's value.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags.argument_table import given, is_set
from megatron_stability.numerics import remainders


class Copy(NamedTuple):
    """Elements `start` … of a parameter, flat: a view, or what `store` brings back to where it is kept.

    `store` is collective over the optimizer's data-parallel ranks, and comes after the writes to all copies.
    """

    flat: torch.Tensor
    start: int
    store: Callable[[], None] | None = None


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
        ("optimizer_cpu_offload", "the master weights move between host and device"),
        ("overlap_param_gather_with_optimizer_step", "weights are on their way to other ranks when the step ends"),
    ):
        if is_set(args, name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{feature} with {flag}: {why}; drop the flag or turn {feature} off")
    if is_set(args, "use_precision_aware_optimizer"):
        kept = given(args, "main_params_dtype")
        if kept not in (None, torch.float32):
            raise UsageError(
                f"{feature} with --main-params-dtype {str(kept).removeprefix('torch.')}: such master weights have "
                f"scales of their own and can't be scaled row by row; use fp32 or turn {feature} off"
            )


def copies(parameter: torch.nn.Parameter, optimizer: Any) -> list[Copy]:
    """The model's copy, and this rank's master or shard of it, if it has one of its own.

    Args:
        parameter: of the model, on this rank.
        optimizer: Megatron's, chained or not.

    Returns:
        One or two, never two of the same memory.
    """
    model = parameter.data.view(-1)
    found = [Copy(model, 0)]
    main = getattr(parameter, "main_param", None)
    owner = _owner(parameter, optimizer)
    if main is not None and not getattr(parameter, "main_param_sharded", False):
        found.append(Copy(main.data.view(-1), 0))
    elif (sharding := _keeps_remainders(parameter, optimizer)) is not None:
        found.append(_joined(parameter, sharding))
    elif main is not None or owner is not None:
        assert owner is not None, "a sharded master without a distributed optimizer"
        start = owner._get_model_param_range_map(parameter)["param"].start
        found.append(Copy((_kept_by_optimizer(parameter, owner) if main is None else main.data).view(-1), start))
    return found[:1] if _same_memory(found[-1].flat, model) else found


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


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


def own_master(parameter: torch.nn.Parameter, optimizer: Any, found: list[Copy] | None = None) -> Copy:
    """This rank's fp32 master or its part of it, which may be empty; the parameter itself, or a part, without a master.

    Args:
        parameter: of the model, on this rank.
        optimizer: Megatron's, chained or not.
        found: its `copies`, if they are known.
    """
    found, owner = found or copies(parameter, optimizer), sharded_by(parameter, optimizer)
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
    """The fp32 master that the inner optimizer holds; what is fp32 itself is its own, here a view of the parameter."""
    held = _held(parameter, owner)
    master: torch.Tensor = held if held.dtype is torch.float32 else owner.optimizer.state[held]["master_param"]
    assert master.dtype is torch.float32, "refuse_what_has_no_plain_copies was not asked"
    return master.data


def _held(parameter: torch.nn.Parameter, owner: DistributedOptimizer) -> torch.Tensor:
    """What stands for a parameter in the inner optimizer's groups."""
    group, order = owner.model_param_group_index_map[parameter]
    held: torch.Tensor = owner.optimizer.param_groups[group]["params"][order]
    return held


def _keeps_remainders(parameter: torch.nn.Parameter, optimizer: Any) -> DistributedOptimizer | None:
    """The optimizer that keeps the lower halves of a parameter's masters; the same on ranks whose part is empty."""
    if parameter.dtype is not torch.bfloat16:
        return None
    owner = sharded_by(parameter, optimizer)
    return owner if owner is not None and getattr(owner.optimizer, "store_param_remainders", False) else None


def _joined(parameter: torch.nn.Parameter, owner: DistributedOptimizer) -> Copy:
    """This rank's part of the masters, put together; it may be empty, and is stored by all ranks all the same.

    The weight's own bits are half of the master, so that the owner's differ, by a rounding, from what other ranks make
    of their copies: they get the owners', each byte as a sum in which all others' is 0.
    """
    model, part = parameter.data.view(-1), own_range(parameter, owner)
    if part.start == part.stop:
        joined, remainder = model.new_empty(0, dtype=torch.float32), model.new_empty(0, dtype=torch.int16)
    else:
        remainder = owner.optimizer.state[_held(parameter, owner)]["master_param"].view(-1)
        joined = remainders.join(model[part], remainder)

    def store() -> None:
        sent = torch.zeros_like(model)
        sent[part], lower = remainders.split(joined)
        remainder.copy_(lower)
        dist.all_reduce(sent.view(torch.uint8), group=owner.data_parallel_group)
        model.copy_(sent)

    return Copy(joined, part.start, store)
