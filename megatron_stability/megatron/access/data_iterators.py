"""Megatron's data iterators, put back to the cursor of a checkpoint, and drawn from for a step that is passed over."""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
from megatron.training import print_rank_0, training
from torch.utils.data.dataloader import DataLoader, _MultiProcessingDataLoaderIter

from megatron_stability.megatron.access.collectives import agree
from megatron_stability.megatron.access.flags.argument_table import argument, is_set
from megatron_stability.megatron.access.skipped import Masked, SkippedDocuments


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
    brought: bool = False  # a script's own training iterator: `--dataloader-type external`


class DataIterators:
    """The iterators of this rank's model chunks; their data sets are kept, so that none is built a second time."""

    def __init__(self) -> None:
        """None yet; Megatron makes them before the first step."""
        self._chunks: list[_Chunk] = []
        self._rebuilding: int | None = None  # the chunk
        self._loader: Any = None  # behind the training iterator of the first chunk
        self._ahead = 0
        self.skipped: SkippedDocuments | None = None

    def ready(self, provider: Any, loaders: tuple[Any, Any, Any], train: Any, valid: Any) -> None:
        """`build_train_valid_test_data_iterators`, once for each model chunk.

        Args:
            provider: the script's data-set provider.
            loaders: train, list of validation, and test loader; None where this rank has none.
            train: the iterator that `train` draws from.
            valid: the validation iterator, or a list of them.
        """
        first, many, last = loaders
        brought = isinstance(train, list) or (train is not None and getattr(train, "iterable", None) is first)
        if self.skipped is not None and train is not None and not brought:
            train.iterable = self.skipped.masked(first.dataset, train.iterable)
        if not self._chunks or self._rebuilding == 0:
            self._loader = first
        if self._rebuilding is not None:
            return
        sets = [getattr(loader, "dataset", None) for loader in many or ()]
        valids = sets if len(sets) > 1 else next(iter(sets), None)
        datasets = getattr(first, "dataset", None), valids, getattr(last, "dataset", None)
        distributed = bool(getattr(provider, "is_distributed", False))
        self._chunks.append(_Chunk(distributed, datasets, train, valid, brought))

    def given(self, train: Any) -> None:
        """The training iterator of a loop that does not say when it builds it; it can be drawn from, not rebuilt."""
        if not self._chunks:
            self._chunks.append(_Chunk(True, (None, None, None), train, None))

    def close(self) -> None:
        """Let go of them: loaders whose last user is gone end their workers."""
        self._chunks.clear()
        self._loader = None

    def state_dict(self, args: Namespace) -> list[Any] | None:
        """Of each chunk's training iterator, if a script brought it with a state of its own; `args` are Megatron's."""
        if not _external(args):
            return None
        return [each.state_dict() if _has_state(each) else None for each in self._brought()]

    def train_begins(self, args: Namespace, saved: Sequence[Any] | None, positioned: bool) -> None:
        """Put a script's own iterators (`--dataloader-type external`) where the checkpoint has them. Collective.

        Args:
            args: Megatron's; `iteration` is where the run goes on.
            saved: `state_dict` of the same rank of the same layout; None where the checkpoint has none.
            positioned: the script does that itself.

        Raises:
            UsageError: on every rank alike: an iterator would be read from its start, or has a state that a later
                start could not load.
        """
        if positioned or not _external(args):
            return
        complaint = self._resume(args, saved)
        agree(
            complaint
            and f"--dataloader-type external: {complaint}; give it state_dict and load_state_dict (as torchdata's "
            "StatefulDataLoader has), or save_state with --dataloader-save, or, if the script positions it by itself, "
            "give --stability-checkpoint-data-positions-itself true"
        )
        if not args.iteration:
            print_rank_0(
                "> megatron-stability: --dataloader-type external: a resume needs the iterator's own state (state_dict "
                "and load_state_dict, or save_state with --dataloader-save); no batch is scored ahead of its step"
            )

    def _resume(self, args: Namespace, saved: Sequence[Any] | None) -> str | None:
        """What speaks against it on this rank."""
        if not self._chunks and args.iteration:
            return "its iterator is not known before the first step"
        brought = self._brought()
        states = saved if saved is not None and len(saved) == len(brought) else [None] * len(brought)
        for iterator, state in zip(brought, states, strict=True):
            kind = type(iterator).__name__
            if iterator is not None and _has_state(iterator):
                if args.iteration and state is None:
                    return f"the checkpoint has no state of {kind} for this layout and these flags"
                if args.iteration:
                    iterator.load_state_dict(state)
                elif not _loads_safely(iterator.state_dict()):
                    return f"the state_dict of {kind} holds more than tensors and primitives"
            elif iterator is not None and args.iteration and not _saves_by_itself(iterator, args):
                return f"{kind} has no state_dict and load_state_dict, and would be read from its start again"
        return None

    def _brought(self) -> list[Any]:
        held = [each for chunk in self._chunks for each in _as_list(chunk.train)]
        return [getattr(each, "iterable", None) for each in held]

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
        first = self.ahead
        if first is None:
            return []
        if not isinstance(first.iterable, LookAhead):
            first.iterable = LookAhead(first.iterable)
        self.read_ahead(items)
        found: list[Any] = first.iterable.peek(items)
        return found

    def read_ahead(self, items: int) -> None:
        """Let the training loader's workers read `items` more than they do by default, which is two each.

        Whoever looks at the whole next step asks for as many at once, and would wait for the workers while no device
        computes. The order of the items, the sampler's draws and every generator are as ever.
        """
        self._ahead = items
        if self.first is not None:
            _deepen(self._loader, self.first.iterable, items)

    @property
    def ahead(self) -> Any:
        """`first`, where its items may be drawn before their step: a script's own would be saved at a later place."""
        return None if self._chunks and self._chunks[0].brought else self.first

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
    while isinstance(iterator, LookAhead | Masked):
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


def _as_list(iterators: Any) -> list[Any]:
    return iterators if isinstance(iterators, list) else [iterators]


def _external(args: Namespace) -> bool:
    return argument(args, "dataloader_type") == "external"


def _saves_by_itself(iterator: Any, args: Namespace) -> bool:
    return is_set(args, "dataloader_save") and hasattr(iterator, "save_state")


def _has_state(iterator: Any) -> bool:
    return hasattr(iterator, "state_dict") and hasattr(iterator, "load_state_dict")


def _loads_safely(state: Any) -> bool:
    """Whether a checkpoint with it can be loaded by a loader that runs no code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def draw(data_iterator: Any) -> None:
    """Take one step's micro-batches and drop them, with the rerun machine counting the iteration.

    An iterator is there where the data set is, which is where a forward would draw: not on tensor ranks other than 0,
    not on middle pipeline stages, one for each virtual chunk.
    """
    iterators = _as_list(data_iterator)
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(data_iterator):
        for iterator in iterators:
            for _ in range(get_num_microbatches() if iterator is not None else 0):
                next(iterator)
