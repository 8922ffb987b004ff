"""What ranks tell each other beside tensors: rank 0's answer, a complaint of one, everyone's dictionary."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_stability.errors import UsageError


def gather_json(own: dict[str, Any], group: Any, device: torch.device) -> list[dict[str, Any]]:
    """Collective: everyone's dictionary, in rank order, as JSON bytes in a tensor."""
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(device)
    world = dist.get_world_size(group)
    lengths = torch.empty(world, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(lengths, torch.tensor([data.numel()], device=device), group=group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    rows = torch.empty(world * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(rows, padded, group=group)
    lines = zip(rows.view(world, longest).cpu(), lengths.tolist(), strict=True)
    return [json.loads(bytes(row[:length].tolist()).decode()) for row, length in lines]


def device() -> torch.device:
    """Where the default group's collectives take tensors from."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def first[T](mine: T | None) -> tuple[int, T] | None:
    """Collective: the lowest rank that has something to say, and what it says; None where no rank has.

    What a rank receives does not grow with the number of ranks.

    Args:
        mine: this rank's answer, or None.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    lowest = torch.tensor([world if mine is None else rank], device=device())
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    source = int(lowest)
    if source == world:
        return None
    box: list[Any] = [mine]
    dist.broadcast_object_list(box, src=source)
    return source, box[0]


def agree(complaint_here: str | None) -> None:
    """Collective: a complaint of one rank ends all.

    Args:
        complaint_here: one sentence, or None.

    Raises:
        UsageError: on every rank alike, with the first rank's sentence.
    """
    complaint = first(complaint_here)
    if complaint is not None:
        raise UsageError(f"rank {complaint[0]}: {complaint[1]}")


def share_out[T](work: Callable[[], list[T]]) -> T:
    """Collective: each rank's part of what rank 0 has; no other rank sees the whole.

    Args:
        work: called on rank 0 only; a part for every rank, in their order.

    Raises:
        UsageError: on every rank alike.
    """
    parts: list[T] = []

    def known() -> None:
        parts.extend(work())

    from_rank_0(known)
    box: list[Any] = [None]
    dist.scatter_object_list(box, parts or None, src=0)
    mine: T = box[0]
    return mine


def from_rank_0[T](work: Callable[[], T]) -> T:
    """Collective: rank 0's result on every rank; its error ends all.

    Args:
        work: called on rank 0 only.

    Returns:
        What it returned.

    Raises:
        UsageError: on every rank alike.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except UsageError as error:
            box[1] = str(error)
        except OSError as error:
            box[1] = f"{error.filename}: {error.strerror}"
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise UsageError(box[1])
    return box[0]
