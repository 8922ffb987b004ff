"""`megatron.drills` under Bridge: the same faults, through Bridge's pre-wrap hook and a forward step around its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.state import GlobalState

from megatron_stability.megatron.start import faults
from megatron_stability.nemo.bridge_args import BridgeArgs


def inject(args: BridgeArgs) -> Callable[..., Any]:
    """Hook the model that will be built.

    Args:
        args: the run's; `drill_fault` says what goes wrong.

    Returns:
        The forward step to train with.
    """

    def hook(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        for number, chunk in enumerate(chunks):
            faults.hook_gradients(chunk, args, number)
        return chunks

    args.container.model.register_pre_wrap_hook(hook)

    def faulty_step(state: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        source = None if data_iterator is None else _Corrupted(data_iterator, args)
        output, loss = forward_step(state, source, model, return_schedule_plan)
        return output, partial(_faulty_loss, loss, args)

    return faulty_step


class _Corrupted:
    """The batches of an iterator, bad where a fault strikes."""

    def __init__(self, source: Iterator[dict[str, Any]], args: BridgeArgs) -> None:
        self._source, self._args = source, args

    def __iter__(self) -> _Corrupted:
        return self

    def __next__(self) -> dict[str, Any]:
        return faults.corrupt(next(self._source), self._args)


def _faulty_loss(loss_function: Callable[..., Any], args: BridgeArgs, output: torch.Tensor) -> Any:
    """Before Bridge looks at the loss, as a fault of the model would be."""
    return loss_function(faults.scale_gradient(output, args))
