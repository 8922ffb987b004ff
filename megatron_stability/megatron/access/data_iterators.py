"""Megatron's data iterators, put back to the cursor of a checkpoint, and drawn from for a step that is passed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
from megatron.training import training
from torch.utils.data.dataloader import DataLoader, _MultiProcessingDataLoaderIter


class LookAhead:
    """An iterator whose next items can be looked at before they are asked for."""

    def __init__(self, source: Iterator[Any]) -> None:
        """`source`: gives the items."""
        self.source = source
        self._kept: deque[Any] = deque()

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> Any:
        return self._kept.popleft() if self._kept else next(self.source)

    def peek(self, count: int) -> list[Any]:
        """The next items, fewer where the source ends."""
        while len(self._kept) < count:
            try:
                self._kept.append(next(self.source))
            except StopIteration:
                break
        return list(self._kept)[:count]


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
        self._rebuilding: int | None = None  # the chunk
        self._loader: Any = None  # behind the training iterator of the first chunk
        self._ahead = 0

    def ready(self, provider: Any, loaders: tuple[Any, Any, Any], train: Any, valid: Any) -> None:
        """`build_train_valid_test_data_iterators`, once for each model chunk.

        Args:
            provider: the script's data-set provider.
            loaders: train, list of validation, and test loader; None where this rank has none.
            train: the iterator that `train` draws from.
            valid: the validation iterator, or a list of them.
        """
        first, many, last = loaders
        if not self._chunks or self._rebuilding == 0:
            self._loader = first
        if self._rebuilding is not None:
            return
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
        """The training iterator of this rank's first model chunk; None where it reads nothing, or somebody's own."""
        train = self._chunks[0].train if self._chunks else None
        return train if isinstance(train, RerunDataIterator) else None

    def peek(self, items: int) -> list[Any]:
        """What the first chunk's training iterator gives next; none where this rank has no iterator.

        Args:
            items: how many; fewer come where the data end.
        """
        if self.first is None:
            return []
        if not isinstance(self.first.iterable, LookAhead):
            self.first.iterable = LookAhead(self.first.iterable)
        self.read_ahead(items)
        found: list[Any] = self.first.iterable.peek(items)
        return found

    def read_ahead(self, items: int) -> None:
        """Let the training loader's workers read `items` more than they do by default, which is two each.

        Whoever looks at the whole next step asks for as many at once, and would wait for the workers while no device
        computes. The order of the items, the sampler's draws and every generator are as ever.
        """
        self._ahead = items
        if self.first is not None:
            _deepen(self._loader, self.first.iterable, items)

    def rebuild(self) -> None:
        """Collective: fresh iterators at `consumed_train_samples`, inside the objects that Megatron holds already."""
        try:
            for at, chunk in enumerate(self._chunks):
                self._rebuilding = at
                train, valid, _ = training.build_train_valid_test_data_iterators(_Provider(chunk))
                if at == 0 and self._ahead and train is not None:
                    _deepen(self._loader, train.iterable, self._ahead)
                _take_over(chunk.train, train)
                _take_over(chunk.valid, valid)
        finally:
            self._rebuilding = None


class _Provider:
    """Gives data sets that are there already, to whom asks for so many samples."""

    def __init__(self, chunk: _Chunk) -> None:
        self.is_distributed = chunk.distributed
        self._datasets = chunk.datasets

    def __call__(self, num_samples: Any) -> tuple[Any, Any, Any]:
        return self._datasets


def _deepen(loader: Any, iterator: Any, items: int) -> None:
    """An iterator that is there already gets what it would have been made with; one to come, by the loader's setting.

    A `DataLoader`'s iterator takes its depth from the loader once, and Megatron makes it in the same breath as the
    loader (`build_train_valid_test_data_iterators`), but for the cyclic one, which it makes with the first item.
    """
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.prefetch_factor = max(loader.prefetch_factor or 0, _depth(items, loader.num_workers))
    if isinstance(iterator, LookAhead):
        iterator = iterator.source
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return
    iterator._prefetch_factor = max(iterator._prefetch_factor, _depth(items, iterator._num_workers))
    sent, most = -1, iterator._prefetch_factor * iterator._num_workers
    # not `_tasks_outstanding`, which leaves out items that came before their turn: each asks for another in its turn
    while sent < iterator._send_idx < iterator._rcvd_idx + most:
        sent = iterator._send_idx
        iterator._try_put_index()  # sends nothing where the sampler has come to its end


def _depth(items: int, workers: int) -> int:
    return -(-items // workers) + 2


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
