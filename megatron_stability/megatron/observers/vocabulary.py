"""Token ids that are no tokens: none is computed with, and all ranks end before the step that has one is applied.

Megatron looks an id up in this tensor rank's rows. With one rank an id beyond them is an index error, on a GPU a device
assertion; with several it is masked as another rank's, so that the run trains on garbage. What a chunk is given is
looked at on its device, as it comes in: ids outside the vocabulary are replaced before the forward, and the largest of
them is in the step's one reduction. After an evaluation, which has none, the ranks meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron_stability.observe.hook import Hook
from megatron_stability.records import StepRecord
from megatron_stability.signals import ways

OUTSIDE = "data/outside_vocabulary"
#: In a GPT model's forward: name, place, least id. A label below 0 is one to be ignored.
FORWARD = (("input_ids", 0, 0), ("labels", 4, None))


class VocabularyHook(Hook):
    """On every chunk that takes tokens or labels: first and last stages, and those with MTP layers."""

    signals = ways((OUTSIDE,))

    def __init__(
        self, vocab_size: int, model: Sequence[Any], device: torch.device, refuse: Callable[[int, int], None]
    ) -> None:
        """Installs forward pre-hooks.

        Args:
            vocab_size: V of the tokenizer; padded rows are no tokens.
            model: Megatron's model chunks.
            device: of the signals.
            refuse: is called with an id and V, on every rank; raises.
        """
        self._vocab_size, self._refuse = vocab_size, refuse
        # -1: none yet. Not cleared between steps: one that was never judged (fp16's scaler rejected its step) stays.
        self._outside = torch.full((), -1, dtype=torch.int64, device=device)
        for chunk in unwrap_model(list(model)):
            chunk.register_forward_pre_hook(self._check, with_kwargs=True)

    @torch.no_grad()
    def _check(self, chunk: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        places, named = list(inputs), dict(options)
        for name, place, least in FORWARD:
            ids = places[place] if place < len(places) else named.get(name)
            if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
                continue  # a stage without it, or another model's forward
            if place < len(places):
                places[place] = self._within(ids, least)
            else:
                named[name] = self._within(ids, least)
        return tuple(places), named

    def _within(self, ids: torch.Tensor, least: int | None) -> torch.Tensor:
        last = self._vocab_size - 1
        kept = ids.clamp(least, last)
        if ids.numel():
            # Of ids below 0 the absolute value counts, so that any is above the -1 of none.
            worst = torch.where(kept != ids, ids.abs(), -1).amax().long()
            torch.maximum(self._outside, worst, out=self._outside)  # in place, as a CUDA graph replays it
        return kept

    def observe(self) -> Mapping[str, torch.Tensor]:
        """The largest id outside, NaN where there was none."""
        return {OUTSIDE: torch.where(self._outside < 0, math.nan, self._outside.double())}

    def judge(self, record: StepRecord) -> None:
        """End the run where a batch of the step had one; equal on every rank.

        Raises:
            UsageError: on every rank alike.
        """
        if (found := record.signals.get(OUTSIDE)) is not None:
            self._refuse(int(found), self._vocab_size)

    def evaluated(self, suffix: str, losses: Mapping[str, torch.Tensor]) -> None:
        """As `judge`, after a set was evaluated. Collective.

        Args:
            suffix: of the set.
            losses: of the set.

        Raises:
            UsageError: on every rank alike.
        """
        worst = self._outside.clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if (found := int(worst)) >= 0:
            self._refuse(found, self._vocab_size)
