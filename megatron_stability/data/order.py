"""The order in which Megatron reads a run's training data, worked out from its flags and the index files alone.

A data set's documents are put in a row, each epoch's in an order of its own or all epochs in one, by `--seed`; sample k
is what stands at tokens [k·s, k·s + s] of that row, its last token a label only; the samples are shuffled by the same
generator. Of several data sets the next sample is of the one that is farthest behind its weight. The rules are those of
megatron/core/datasets (gpt_dataset.py, blended_dataset.py, blended_megatron_dataset_builder.py, helpers.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_stability.data import blends, splits
from megatron_stability.data import index as indexes
from megatron_stability.data.blends import DataSet
from megatron_stability.data.index import Index
from megatron_stability.errors import UsageError

Ints = npt.NDArray[np.integer[Any]]
SURPLUS = 0.005  # Megatron's default of --mid-level-dataset-surplus
_LATE_EPOCH = 0.80  # of a last epoch that is used for less than this share, documents and samples are shuffled apart
_NOT_FOLLOWED = {
    "mock_data": "--mock-data reads no documents",
    "sft": "--sft packs by a rule of its own",
    "fim_data": "--fim-data changes what a sample holds",
    "phase_transition_iterations": "--phase-transition-iterations builds the order anew for each phase",
}


@dataclass(frozen=True)
class Order:
    """The samples of one data set, in the order in which they are asked for.

    Attributes:
        data_set: its place in the blend.
        index: its files.
        documents: [n] the documents in the row, all epochs; numbers in the index.
        starts: [n+1] int64, the token of the row at which each begins; then the row's length.
        shuffle: [k] which sample of the row is given as the k-th.
        sequence_length: s.
    """

    data_set: DataSet
    index: Index
    documents: Ints
    starts: npt.NDArray[np.int64]
    shuffle: Ints
    sequence_length: int

    def __len__(self) -> int:
        """Samples."""
        return len(self.shuffle)

    def span(self, sample: int) -> tuple[int, int]:
        """The tokens [first, end) of the row that the sample-th holds, s + 1 of them."""
        first = int(self.shuffle[sample]) * self.sequence_length
        return first, first + self.sequence_length + 1

    @cached_property
    def given_at(self) -> Ints:
        """[k] the inverse of `shuffle`."""
        inverse = np.empty(len(self.shuffle), np.int64)
        inverse[self.shuffle] = np.arange(len(self.shuffle))
        return inverse


@dataclass
class Blend:
    """All samples of a run's training, in the order of `consumed_train_samples`.

    Attributes:
        orders: of each data set.
        weights: of each, with sum 1; None for one data set that is no blend.
        size: samples.
        which: [size] of each sample, its data set; None: worked out where it is asked for.
        count: [size] of each sample, which of its data set's it is.
    """

    orders: Sequence[Order]
    weights: Sequence[float] | None
    size: int
    which: Ints | None = None
    count: Ints | None = None
    _which: list[int] = field(default_factory=list)  # of each sample so far, its data set
    _count: list[int] = field(default_factory=list)  # of each sample so far, which of its data set's it is
    _taken: list[int] = field(default_factory=list)  # so far, of each data set

    def place(self, sample: int) -> tuple[int, int]:
        """(data set, which of its samples) of a sample.

        Args:
            sample: index in the global order, from 0.

        Raises:
            UsageError: there are not so many.
        """
        if not 0 <= sample < self.size:
            raise UsageError(f"sample {sample}: the run has samples 0 to {self.size - 1}")
        if self.weights is None:
            return 0, sample
        if self.which is not None and self.count is not None:
            return int(self.which[sample]), int(self.count[sample])
        self._extend(sample + 1)
        return self._which[sample], self._count[sample]

    def places_of(self, data_set: int) -> Ints:
        """[k] the samples of the global order that are a data set's, its k-th at k."""
        if self.weights is None:
            return np.arange(self.size)
        if self.which is not None:
            return np.flatnonzero(self.which == data_set)
        self._extend(self.size)
        return np.flatnonzero(np.asarray(self._which, np.int16) == data_set)

    def _extend(self, end: int) -> None:
        """The choice depends on all before it, so it is made once and kept; what nobody asks for is not made."""
        weights = self.weights or ()
        self._taken = self._taken or [0] * len(self.orders)
        numbered = list(enumerate(weights))
        for sample in range(len(self._which), end):
            at = float(max(sample, 1))
            behind, chosen = -math.inf, 0
            for which, weight in numbered:
                if (error := weight * at - self._taken[which]) > behind:
                    behind, chosen = error, which
            self._which.append(chosen)
            self._count.append(self._taken[chosen])
            self._taken[chosen] += 1


def of_run(args: Any) -> Blend:
    """The order of a run's training samples.

    Args:
        args: Megatron's arguments, or those of a bundle or a checkpoint in a namespace: `data_path` and its relatives,
            `split`, `seed`, `seq_length`, `train_samples` or `train_iters` and `global_batch_size`; where they are
            known also `dataloader_type` and `mid_level_dataset_surplus`.

    Raises:
        UsageError: a file is missing or damaged, a flag is missing, or the order is not by this rule.
    """
    for name, why in _NOT_FOLLOWED.items():
        if getattr(args, name, None):
            raise UsageError(f"samples can't be traced: {why}")
    if (kind := getattr(args, "dataloader_type", None)) not in (None, "single"):
        raise UsageError(f"samples can't be traced: --dataloader-type {kind} has an order of its own; single has none")
    wanted, length, seed = _samples(args), int(_needed(args, "seq_length")), int(_needed(args, "seed"))
    sets = [each for each in blends.data_sets(args) if each.split in ("train", "all")]
    if not sets:
        raise UsageError("the run's flags name no training data; give its --data-path")
    found = [indexes.read(each.flag, each.prefix) for each in sets]
    split = getattr(args, "split", None) or splits.DEFAULT
    single = len(sets) == 1 and (sets[0].weight is None or sets[0].split == "train")
    if single or sets[0].weight is None:
        size = wanted if single else None
        orders = [order(each, index, split, size, length, seed) for each, index in zip(sets, found, strict=True)]
        if single:
            return Blend(orders, None, len(orders[0]))
        lengths = [len(each) for each in orders]
        return Blend(orders, _normalized(lengths), min(wanted, sum(lengths)))
    weights = _normalized([each.weight or 0.0 for each in sets])
    surplus = float(getattr(args, "mid_level_dataset_surplus", None) or SURPLUS)
    targets = [math.ceil(wanted * weight) for weight in weights]
    orders = [
        order(each, index, split, math.ceil(target * (1 + surplus)), length, seed)
        for each, index, target in zip(sets, found, targets, strict=True)
    ]
    return Blend(orders, _normalized(weights), sum(targets))


def order(data_set: DataSet, index: Index, split: str, samples: int | None, length: int, seed: int) -> Order:
    """One data set's.

    Args:
        data_set: which.
        index: its index.
        split: as `--split` takes it, for a data set that serves all splits.
        samples: how many are needed; None for one epoch.
        length: s.
        seed: Megatron's `--seed`.

    Raises:
        UsageError: its part of the split has no token.
    """
    part = range(index.sequences) if data_set.split != "all" else splits.ranges(split, index.sequences)["train"]
    sizes = index.lengths()
    here = np.arange(part.start, part.stop, dtype=np.int32) if part else np.zeros(0, np.int32)
    epoch = int(sizes[here].sum(dtype=np.int64))
    if not epoch:
        raise UsageError(f"{data_set.flag} {data_set.prefix}: its training split has no token")
    epochs = 1 if samples is None else max(1, -(-(samples * length + 1) // epoch))
    before_last = ((epochs - 1) * epoch - 1) // length
    apart = (
        samples is not None
        and epochs > 1
        and samples - before_last < int(_LATE_EPOCH * ((epoch - 1) // length))  # Megatron's rounding
    )
    generator = np.random.RandomState(seed)
    documents = _shuffled(here, epochs - 1 if apart else epochs, generator)
    if apart:
        documents = np.concatenate([documents, _shuffled(here, 1, generator)])
    starts = np.zeros(len(documents) + 1, np.int64)
    np.cumsum(sizes[documents], out=starts[1:])
    total = (epochs * epoch - 1) // length
    shuffle: Ints = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    edge = before_last if apart else total
    generator.shuffle(shuffle[:edge])
    if edge < total:
        generator.shuffle(shuffle[edge:])
    return Order(data_set, index, documents, starts, shuffle, length)


def _shuffled(documents: Ints, epochs: int, generator: np.random.RandomState) -> Ints:
    row = np.tile(documents, epochs)
    generator.shuffle(row)
    return row


def _normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, np.float64)
    return (array / array.sum()).tolist()


def _samples(args: Any) -> int:
    if samples := getattr(args, "train_samples", None):
        return int(samples)
    return int(_needed(args, "train_iters")) * int(_needed(args, "global_batch_size"))


def _needed(args: Any, name: str) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise UsageError(f"--{name.replace('_', '-')} of the run is not known; give it")
    return value
