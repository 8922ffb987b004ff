"""Scores of the tokens that the model is given, and of those that it will be given next.

The batch of a step is read where the model's first stage takes it in. The next one's is drawn early from Megatron's
iterator, where this rank has one, and kept for the step that asks for it; the loader's workers read it while a step
computes (`DataIterators.read_ahead`). Both scores are in the step's record: a bad
batch is passed over before it is computed, and one that was not seen coming (the first after a start, or after another
that was passed over) is withheld at the gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches
from megatron.core.utils import unwrap_model
from megatron.training import print_rank_0

from megatron_stability.act.pass_over import PassOver
from megatron_stability.detect.data import AHEAD, BadBatch
from megatron_stability.megatron.access.data_iterators import DataIterators
from megatron_stability.observe.batch import SCORES, scores
from megatron_stability.observe.hook import Hook
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Decision, StepRecord
from megatron_stability.signals import ways


class BatchHook(Hook):
    """The batches of this rank's first pipeline stage; nothing on other stages."""

    signals = ways((*SCORES, *AHEAD))

    def __init__(self, ngram: int, model: Sequence[Any], device: torch.device, data: DataIterators) -> None:
        """Installs a forward pre-hook.

        Args:
            ngram: see `scores`.
            model: Megatron's list of model chunks.
            device: where scores are computed.
            data: the iterators that the next batch will come from.
        """
        self._ngram, self._device = ngram, device
        self._seen: list[torch.Tensor] = []
        self._data = data
        chunks = [chunk for chunk in unwrap_model(list(model)) if getattr(chunk, "pre_process", False)]
        for chunk in chunks:
            chunk.register_forward_pre_hook(self._read, with_kwargs=True)
        self._here = bool(chunks)
        self._said = False

    def _read(self, chunk: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        tokens = inputs[0] if inputs else options.get("input_ids")
        if chunk.training and torch.is_grad_enabled() and isinstance(tokens, torch.Tensor):
            self._seen.append(scores(tokens, self._ngram))

    def train_begins(self) -> None:
        """Let the workers begin."""
        if self._here:
            self._data.read_ahead(get_num_microbatches())

    def step_begins(self, step: int) -> None:
        """Forget the step before."""
        del step
        self._seen.clear()

    def observe(self) -> Mapping[str, torch.Tensor]:
        """The worst row of the step's micro-batches, and of the next step's."""
        return _worst(SCORES, self._seen) | _worst(AHEAD, self._next())

    def _next(self) -> list[torch.Tensor]:
        """Scores of the micro-batches that come next, if the next step has as many as this one."""
        batches = self._data.peek(get_num_microbatches()) if self._here else []
        if batches and not self._said:
            self._said = True
            size = sum(each.nbytes for batch in batches for each in _tensors(batch)) / 1e6
            print_rank_0(
                f"> megatron-stability: batches are scored a step ahead: {len(batches)} micro-batches, {size:.3g} MB "
                "in the memory of each rank that loads, and as many again on their way from its workers"
            )
        coming = [batch["tokens"] for batch in batches if "tokens" in batch]
        return [scores(tokens.to(self._device, non_blocking=True), self._ngram) for tokens in coming]


def _tensors(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    return [each for each in batch.values() if isinstance(each, torch.Tensor)]


def _worst(names: tuple[str, ...], seen: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    if not seen:
        return {}
    both = torch.stack(list(seen))
    return dict(zip(names, (both[:, 0].amax(), both[:, 1].amin()), strict=True))


def skip_ahead(pipeline: Pipeline[Any], seen: StepRecord | None, first: int, pass_over: PassOver) -> Decision | None:
    """Whether the step that begins is to be passed over for its data; equal on every rank, and no collective.

    Args:
        pipeline: its detectors and its policy, whose budgets count the skip.
        seen: the last record, which has the score of the batch after it; None where there was none.
        first: the sample that the step begins with.
        pass_over: takes the step's samples as one more window.

    Returns:
        The SKIP; None: compute the step, whose gate sees the same batch.
    """
    detector = next((d for d in pipeline.detectors if isinstance(d, BadBatch)), None)
    if seen is None or seen.last_sample != first or detector is None:  # it went on elsewhere: after a rewind
        return None
    if (verdict := detector.ahead(seen)) is None:
        return None
    samples = get_current_global_batch_size()
    record = StepRecord(
        step=seen.step + 1, first_sample=first, samples=samples, tokens=0.0, loss=math.nan, grad_norm=math.nan
    )
    decision = pipeline.policy.decide(record, [verdict])
    if decision.action is not Action.SKIP:
        return None
    pipeline.policy.settle(decision)
    pass_over.add(first, first + samples, decision.reason)
    return decision
