"""The embedding-row clip on Megatron's step: every copy of the word embedding that this rank holds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_stability.megatron.access import master_weights
from megatron_stability.numerics import embedding_norm
from megatron_stability.observe.hook import Hook
from megatron_stability.signals import ways


def word_embeddings(model: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """The word embedding of each chunk that has one, and the last stage's copy of a tied one.

    Args:
        model: this rank's model chunks, wrapped or not.
    """
    for chunk in model:
        for name, weight in chunk.named_parameters():
            tied_copy = name.endswith("output_layer.weight") and getattr(weight, "shared_embedding", False)
            if name.endswith("embedding.word_embeddings.weight") or tied_copy:
                yield weight


class EmbeddingClipHook(Hook):
    """Scales rows longer than the radius down to it, after each step that changed the weights.

    Norms are the fp32 master's; where that is cut over data-parallel ranks, their sums of squares are added up in one
    all-reduce of [V/T]. Every rank scales its own copies by the same factors, so that copies can't drift apart.
    """

    def __init__(self, radius: float, model: Sequence[torch.nn.Module], optimizer: Any) -> None:
        """Args: radius: largest row norm; model: this rank's chunks; optimizer: Megatron's, chained or not."""
        self._radius, self._optimizer = radius, optimizer
        self._weights = [weight for weight in word_embeddings(model) if weight.requires_grad]
        self._clipped = torch.zeros((), dtype=torch.float64)

    @property
    def signals(self) -> Mapping[str, Any]:
        """Rows clipped after the step before this one, the most of any rank's shard."""
        return ways(("embedding/rows_clipped",))

    def observe(self) -> Mapping[str, torch.Tensor]:
        """This rank's number; a step's clip is made after its record, so the number is the step before's."""
        return {"embedding/rows_clipped": self._clipped}

    def update_done(self, record: Any, updated: bool) -> None:
        """Clip. Collective over the data-parallel group where the master is sharded."""
        del record
        if updated:
            self._clipped = torch.stack([self._clip(weight) for weight in self._weights or []] or [torch.zeros(())])
            self._clipped = self._clipped.double().amax()

    @torch.no_grad()
    def _clip(self, weight: torch.nn.Parameter) -> torch.Tensor:
        rows, width = weight.shape
        copies = master_weights.copies(weight, self._optimizer)
        own = master_weights.own_master(weight, self._optimizer, copies)
        sums = embedding_norm.square_sums(own.flat, own.start, rows, width)
        if (owner := master_weights.sharded_by(weight, self._optimizer)) is not None:
            dist.all_reduce(sums, group=owner.data_parallel_group)
        factor = embedding_norm.factors(sums, self._radius)
        for copy in copies:
            embedding_norm.scale_rows_(copy.flat, copy.start, width, factor)
        clipped = (factor < 1.0).sum()
        stores = [copy.store for copy in copies if copy.store is not None]
        if stores and clipped:  # equal on the ranks that store together, as the sums are; waits for the device
            for store in stores:
                store()
        return clipped


def refuse_what_cannot_work(args: Namespace) -> None:
    """Raise for optimizers whose master weights can't be scaled row by row.

    Raises:
        UsageError: names the flag.
    """
    master_weights.refuse_what_has_no_plain_copies(args, "--stability-model-embedding-norm-clip")
