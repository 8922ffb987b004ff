"""Losses of Megatron's validation sets, brought into the record of the step after their evaluation."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from megatron_stability.observe.hook import Hook
from megatron_stability.observe.reduction import How
from megatron_stability.records import StepRecord
from megatron_stability.signals import HELD_OUT, SETS, ways

ONLY = "validation"  # the name of the set where there is one


class HeldOutHook(Hook):
    """One signal a validation set. Only the last pipeline stage has the losses; they are equal on all its ranks."""

    def __init__(self, args: Namespace) -> None:
        """`args`: Megatron's, once the data iterators are built."""
        self._names: tuple[str, ...] = (ONLY,)
        if args.multiple_validation_sets:
            number = len(args.eval_iters)
            self._names = tuple(args.validation_set_names or map(str, range(number)))
        self._losses: dict[str, torch.Tensor] = {}

    @property
    def signals(self) -> Mapping[str, How]:
        """See `Hook`."""
        return ways((HELD_OUT, *(SETS + name for name in self._names)))

    def evaluated(self, suffix: str, losses: Mapping[str, torch.Tensor]) -> None:
        """Megatron evaluated a set.

        Args:
            suffix: "-NAME" or "-NUMBER" of one of several sets, else empty.
            losses: by name, nats a token, on the ranks of the last pipeline stage; elsewhere empty.
        """
        if losses:
            key = "lm loss" if "lm loss" in losses else next(iter(losses))
            self._losses[SETS + (suffix.removeprefix("-") or ONLY)] = losses[key].detach()

    def observe(self) -> Mapping[str, Any]:
        """What was evaluated since the last step."""
        return {HELD_OUT: float(len(self._losses)), **self._losses} if self._losses else {}

    def update_done(self, record: StepRecord, updated: bool) -> None:
        """The record has them."""
        self._losses = {}
