"""The state of one step in this rank's CPU memory, so that going back a little reads no file.

Every tensor that training changes is copied: weights and buffers, master weights and moments, generators; with them the
settings of parameter groups, the scheduler, the counters and the plugin's own state. There is one snapshot at a time.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_stability.megatron.access import rank_state

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
GB = 1e9


@dataclass(frozen=True)
class Snapshot:
    """What was there when `step` steps were done and `samples` consumed."""

    step: int
    samples: int
    tensors: list[torch.Tensor]
    groups: list[list[dict[str, Any]]]  # of each optimizer, without its parameters
    scheduler: dict[str, Any]
    generators: dict[str, Any]
    counters: dict[str, int]
    own: dict[str, Any]  # the plugin's
    operations: int = 0  # floating-point operations so far, which `train` tells after the next step only

    @classmethod
    def take(
        cls, live: tuple[list[Any], Any, Any], args: Namespace, own: dict[str, Any], onto: Snapshot | None = None
    ) -> Snapshot:
        """Copy; no collective. Pinned memory where there is a GPU, and one wait for it.

        Args:
            live: model chunks, optimizer and its parameter scheduler.
            args: Megatron's, with `curr_iteration`.
            own: the plugin's state, as for a checkpoint.
            onto: an older one, whose memory is written over where it fits, so that there are never two.
        """
        model, optimizer, scheduler = live
        tensors = list(_tensors(model, optimizer))
        return cls(
            step=args.curr_iteration,
            samples=args.consumed_train_samples,
            tensors=_copied(tensors, [] if onto is None else onto.tensors),
            groups=[[_settings(group) for group in inner.param_groups] for inner in _inner(optimizer)],
            scheduler=copy.deepcopy(scheduler.state_dict()),
            generators=copy.deepcopy(rank_state.generators()),
            counters={name: getattr(args, name) for name in COUNTERS},
            own=copy.deepcopy(own),
        )

    def fits(self, live: tuple[list[Any], Any, Any]) -> bool:
        """Whether there are as many tensors as then: an optimizer makes its moments in its first step."""
        return len(self.tensors) == sum(1 for _ in _tensors(live[0], live[1]))

    @torch.no_grad()
    def restore(self, live: tuple[list[Any], Any, Any], args: Namespace) -> None:
        """Copy back, all but the generators and the plugin's state."""
        model, optimizer, scheduler = live
        for each, copied in zip(_tensors(model, optimizer), self.tensors, strict=True):
            each.copy_(copied)
        for inner, groups in zip(_inner(optimizer), self.groups, strict=True):
            for group, settings in zip(inner.param_groups, groups, strict=True):
                group.update(copy.deepcopy(settings))
        scheduler.num_steps = 0  # loading adds to these
        scheduler.load_state_dict(copy.deepcopy(self.scheduler))
        vars(args).update(self.counters)


def too_large(live: tuple[list[Any], Any, Any], max_gb: float) -> str | None:
    """One sentence where a snapshot of this rank's state has more than `max_gb` (1e9 bytes), or None."""
    size = sum(each.numel() * each.element_size() for each in _tensors(live[0], live[1])) / GB
    if size <= max_gb:
        return None
    return (
        f"--stability-decide-snapshot-steps: the state has {size:.3g} GB; give --stability-decide-snapshot-max-gb more "
        f"than {max_gb:g}, or no snapshot"
    )


@torch.no_grad()
def _copied(tensors: Sequence[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:
    forms = [(each.shape, each.dtype) for each in tensors]
    if forms != [(each.shape, each.dtype) for each in memory]:
        memory.clear()  # before new is taken
        memory = [torch.empty(e.shape, dtype=e.dtype, device="cpu", pin_memory=e.is_cuda) for e in tensors]
    for into, each in zip(memory, tensors, strict=True):
        into.copy_(each, non_blocking=True)
    if any(each.is_cuda for each in tensors):
        torch.cuda.synchronize()
    return memory


def _tensors(model: list[Any], optimizer: Any) -> Iterator[torch.Tensor]:
    yield from (tensor for _, tensor in rank_state.weights(model))
    for chunk in model:
        for module in chunk.modules():
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    yield from (tensor for _, tensor in rank_state.optimizer_tensors(optimizer))


def _inner(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})
