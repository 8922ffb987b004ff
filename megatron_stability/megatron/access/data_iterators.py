"""Megatron's data iterators, put back to the cursor of a checkpoint, and drawn from for a step that is passed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
from megatron.training import training


@dataclass(frozen=True)
class _Chunk:
    """What belongs to one model chunk: its data sets, and the iterators that `pretrain` and `train` hold."""

    distributed: bool  # the provider is called on every rank
    datasets: tuple[Any, Any, Any]
    train: Any
    valid: Any


class DataIterators:
    """The iterators of this rank's model chunks; their data sets are kept, so that none is built a second time."""

    def __init__(self) -> None:
        """None yet; Megatron makes them before the first step."""
        self._chunks: list[_Chunk] = []
        self._rebuilding = False

    def ready(self, provider: Any, loaders: tuple[Any, Any, Any], train: Any, valid: Any) -> None:
        """`build_train_valid_test_data_iterators`, once for each model chunk.

        Args:
            provider: the script's data-set provider.
            loaders: train, list of validation, and test loader; None where this rank has none.
            train: the iterator that `train` draws from.
            valid: the validation iterator, or a list of them.
        """
        if self._rebuilding:
            return
        first, many, last = loaders
        sets = [getattr(loader, "dataset", None) for loader in many or ()]
        datasets = (getattr(first, "dataset", None), sets if len(sets) > 1 else next(iter(sets), None))
        distributed = bool(getattr(provider, "is_distributed", False))
        self._chunks.append(_Chunk(distributed, (*datasets, getattr(last, "dataset", None)), train, valid))

    def given(self, train: Any) -> None:
        """The training iterator of a loop that does not say when it builds it; it can be drawn from, not rebuilt."""
        if not self._chunks:
            self._chunks.append(_Chunk(True, (None, None, None), train, None))

    @property
    def first(self) -> Any:
        """The training iterator of this rank's first model chunk; None where it reads nothing."""
        return self._chunks[0].train if self._chunks else None

    def rebuild(self) -> None:
        """Collective: fresh iterators at `consumed_train_samples`, inside the objects that Megatron holds already."""
        self._rebuilding = True
        try:
            for chunk in self._chunks:
                train, valid, _ = training.build_train_valid_test_data_iterators(_Provider(chunk))
                _take_over(chunk.train, train)
                _take_over(chunk.valid, valid)
        finally:
            self._rebuilding = False


class _Provider:
    """Gives data sets that are there already, to whom asks for so many samples."""

    def __init__(self, chunk: _Chunk) -> None:
        self.is_distributed = chunk.distributed
        self._datasets = chunk.datasets

    def __call__(self, num_samples: Any) -> tuple[Any, Any, Any]:
        return self._datasets


def _take_over(old: Any, new: Any) -> None:
    if isinstance(old, list):
        for one, other in zip(old, new, strict=True):
            _take_over(one, other)
    elif old is not None:
        assert isinstance(old, RerunDataIterator), f"{type(old).__name__} was not made by Megatron's own builder"
        vars(old).update(vars(new))


def draw(data_iterator: Any) -> None:
    """Take one step's micro-batches and drop them, with the rerun machine counting the iteration.

    An iterator is there where the data set is, which is where a forward would draw: not on tensor ranks other than 0,
    not on middle pipeline stages, one for each virtual chunk.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(data_iterator):
        for iterator in iterators:
            for _ in range(get_num_microbatches() if iterator is not None else 0):
                next(iterator)
