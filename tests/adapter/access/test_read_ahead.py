"""A loader's workers read the next step while this one computes, and nothing else about the data changes."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import training
from torch.utils.data import DataLoader, Dataset

from megatron_stability.megatron.access.data_iterators import DataIterators

pytestmark = pytest.mark.megatron
MICRO_BATCHES, WORKERS = 24, 2
DEFAULT = 2 * WORKERS  # what workers read ahead by themselves
WAIT_S = 30.0


class Counted(Dataset):  # type: ignore[type-arg]
    """Tells how many of its samples workers have read."""

    def __init__(self, length: int = 400, uneven: bool = False) -> None:
        self._uneven = uneven
        self._length, self._read = length, multiprocessing.get_context("fork").Value("i", 0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self._uneven and index % WORKERS == 0:
            time.sleep(0.01)
        with self._read.get_lock():
            self._read.value += 1
        return {"tokens": torch.tensor([index])}

    def read(self, at_least: int) -> int:
        """How many, once they are `at_least` so many, or the time is over."""
        end = time.monotonic() + WAIT_S
        while self._read.value < at_least and time.monotonic() < end:
            time.sleep(0.01)
        return int(self._read.value)

    def settled(self, at_least: int) -> int:
        """How many, once they stay `at_least` so many."""
        before = self.read(at_least)
        while True:
            time.sleep(0.5)
            if before == self._read.value:
                return before
            before = self._read.value


def _loader(data: Counted) -> DataLoader:  # type: ignore[type-arg]
    return DataLoader(data, batch_size=1, num_workers=WORKERS, multiprocessing_context="fork")


def _iterator(kind: str, loader: Any) -> RerunDataIterator:
    return RerunDataIterator(iter(loader if kind == "single" else training.cyclic_iter(loader)))


def _given(kind: str, data: Counted) -> DataIterators:
    iterators, loader = DataIterators(), _loader(data)
    iterators.ready(None, (loader, [None], None), _iterator(kind, loader), None)
    return iterators


def _numbers(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    return [int(batch["tokens"]) for batch in batches]


@pytest.fixture(params=["single", "cyclic"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_case_53_the_next_step_is_there_before_it_is_looked_at(kind: str) -> None:
    data = Counted()
    iterators, generator = _given(kind, data), torch.get_rng_state()
    iterators.read_ahead(MICRO_BATCHES)
    if kind == "cyclic":  # which has no workers before its first item
        generator = torch.get_rng_state()
        first = [next(iterators.first)]
        assert data.read(1 + MICRO_BATCHES) > MICRO_BATCHES
    else:
        first = []
        assert data.read(MICRO_BATCHES) >= MICRO_BATCHES
        assert torch.equal(torch.get_rng_state(), generator)
    seen = len(first)
    for _ in range(3):  # steps: look at the next, then compute it
        coming = _numbers(iterators.peek(MICRO_BATCHES))
        assert coming == list(range(seen, seen + MICRO_BATCHES))
        assert data.read(seen + 2 * MICRO_BATCHES) >= seen + 2 * MICRO_BATCHES  # those after them, meanwhile
        assert _numbers([next(iterators.first) for _ in range(MICRO_BATCHES)]) == coming
        seen += MICRO_BATCHES
    assert data.settled(seen + MICRO_BATCHES) <= seen + MICRO_BATCHES + 2 * DEFAULT  # a step, and no more than that


def test_without_it_workers_are_as_many_items_ahead_as_ever() -> None:
    data = Counted()
    iterators = _given("single", data)
    assert data.settled(DEFAULT) == DEFAULT
    assert iterators.first is not None


def test_a_worker_may_be_slower_than_the_other() -> None:
    """Items that come before their turn wait in the iterator, and count among those that were asked for."""
    iterators = _given("single", Counted(uneven=True))
    found = []
    for _ in range(6):
        iterators.peek(MICRO_BATCHES)
        iterators.read_ahead(MICRO_BATCHES)  # again, now that fast items have come before their turn
        source = iterators.first.iterable.source
        assert source._send_idx - source._rcvd_idx <= source._prefetch_factor * WORKERS
        found += _numbers([next(iterators.first) for _ in range(MICRO_BATCHES)])
    assert found == list(range(6 * MICRO_BATCHES))


def test_the_end_of_the_data_and_generators_are_those_of_the_plain_loader(kind: str) -> None:
    def drawn(ahead: bool) -> tuple[list[int], torch.Tensor]:
        torch.manual_seed(7)
        iterators = _given(kind, Counted(50))
        found = []
        for _ in range(2 if kind == "single" else 5):  # the cyclic one comes to its end, and begins again
            if ahead:
                iterators.peek(MICRO_BATCHES)
            found += _numbers([next(iterators.first) for _ in range(MICRO_BATCHES)])
        return found, torch.get_rng_state()

    plain, ahead = drawn(False), drawn(True)
    assert plain[0] == ahead[0] == [at % 50 for at in range(len(plain[0]))]
    assert torch.equal(plain[1], ahead[1])


def test_iterators_that_a_rewind_builds_read_ahead_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    iterators, fresh = _given(kind, Counted()), Counted()
    iterators.read_ahead(MICRO_BATCHES)

    def build(provider: Any) -> tuple[Any, None, None]:
        loader = _loader(fresh)
        made = _iterator(kind, loader)
        iterators.ready(provider, (loader, [None], None), made, None)
        return made, None, None

    monkeypatch.setattr(training, "build_train_valid_test_data_iterators", build)
    iterators.rebuild()
    assert int(next(iterators.first)["tokens"]) == 0
    assert fresh.read(1 + MICRO_BATCHES) > MICRO_BATCHES
