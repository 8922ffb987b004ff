"""Documents of a skip list taken out of the batches that Megatron's training iterator gives.

The k-th batch of a rank's iterator holds samples whose global indexes follow from where the iterator began, so nothing
is asked of the loader's workers and nothing travels between ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_tokenizer, print_rank_0

from megatron_stability.data import index as indexes
from megatron_stability.data import order as orders
from megatron_stability.data import skips
from megatron_stability.data.blends import DataSet
from megatron_stability.data.order import Blend, Order
from megatron_stability.data.skips import Masks
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags.argument_table import argument

_NOT_WITH = {
    "mock_data": "--mock-data has no documents",
    "phase_transition_iterations": "--phase-transition-iterations builds the samples anew for each phase",
    "sft": "--sft packs by a rule of its own",
    "fim_data": "--fim-data changes what stands in a sample",
}


class SkippedDocuments:
    """What one rank knows of the skip list."""

    def __init__(self, file: Path, args: Namespace) -> None:
        """Reads the list.

        Args:
            file: of `data.skip_list`.
            args: Megatron's.

        Raises:
            UsageError: it can't be read.
        """
        self._skips, self._args = skips.read(file), args
        self.masks: Masks | None = None  # on ranks that have the data set

    def masked(self, dataset: Any, source: Iterator[Any]) -> Iterator[Any]:
        """A training iterator that has just been made, with what is skipped taken out of its batches.

        Args:
            dataset: that it reads.
            source: the iterator.

        Raises:
            UsageError: the list is of other data.
        """
        if self.masks is None:
            self.masks = skips.masks(blend_of(dataset, self._args), self._skips)
            tokens = self.masks.targets(0, len(dataset))
            print_rank_0(
                f"> megatron-stability: skip list: {len(self._skips)} documents, {tokens} targets in {len(self.masks)} "
                f"of {len(dataset)} samples have no part in the loss"
            )
        size, rank = self._args.micro_batch_size, parallel_state.get_data_parallel_rank()
        begin, stride = self._args.consumed_train_samples + rank * size, size * self._args.data_parallel_size
        return Masked(source, self.masks, begin, stride, int(get_tokenizer().eod))


class Masked:
    """Batches of an iterator, without what is skipped."""

    def __init__(self, source: Iterator[Any], masks: Masks, begin: int, stride: int, eod: int) -> None:
        """Begins with the next batch.

        Args:
            source: gives dictionaries of tokens, labels and loss_mask, [b, s] each.
            masks: of the run.
            begin: global index of the first sample of the next batch.
            stride: from a batch's first sample to that of the next.
            eod: the id that ends a document.
        """
        self.source = source
        self._masks, self._next, self._stride, self._eod = masks, begin, stride, eod

    def __iter__(self) -> Masked:
        return self

    def __next__(self) -> Any:
        batch = next(self.source)
        first, self._next = self._next, self._next + self._stride
        for row in range(len(batch["tokens"])):
            for begin, end in self._masks.spans(first + row):
                batch["tokens"][row, begin:end] = self._eod  # the last of the s + 1 is a label alone
                targets = slice(max(begin - 1, 0), end - 1)
                batch["labels"][row, targets] = self._eod
                batch["loss_mask"][row, targets] = 0.0
        return batch


def blend_of(dataset: Any, args: Namespace) -> Blend:
    """The order of a data set that Megatron has built.

    Args:
        dataset: a `GPTDataset` or a `BlendedDataset` of them.
        args: Megatron's.

    Raises:
        UsageError: it is of another kind.
    """
    members = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    if not all(isinstance(each, GPTDataset) for each in members):
        raise UsageError(f"data.skip_list: documents of a {type(members[0]).__name__} can't be found; drop the list")
    if any(each.document_index is None for each in members):  # --dataloader-defer-npy-index-mmap
        return orders.of_run(args)
    built = [_order(each, at) for at, each in enumerate(members)]
    if not isinstance(dataset, BlendedDataset):
        return Blend(built, None, len(dataset))
    return Blend(built, dataset.weights, len(dataset), which=dataset.dataset_index, count=dataset.dataset_sample_index)


def _order(dataset: Any, at: int) -> Order:
    prefix = dataset.dataset_path
    index = indexes.read("--data-path", prefix)
    starts = np.zeros(len(dataset.document_index) + 1, np.int64)
    np.cumsum(index.lengths()[dataset.document_index], out=starts[1:])
    where = DataSet("--data-path", "train", prefix, None)
    return Order(where, index, dataset.document_index, starts, dataset.shuffle_index, dataset.config.sequence_length)


def refuse_what_cannot_work(file: Path | None, args: Namespace) -> None:
    """Raise for flags under which a sample's documents are not known.

    Raises:
        UsageError: names the flag.
    """
    if file is None:
        return
    for name, why in _NOT_WITH.items():
        if argument(args, name):
            raise UsageError(f"data.skip_list {file}: {why}; drop one of the two")
    if args.dataloader_type != "single":
        raise UsageError(f"data.skip_list {file}: goes with --dataloader-type single, not with {args.dataloader_type}")
    skips.read(file)
