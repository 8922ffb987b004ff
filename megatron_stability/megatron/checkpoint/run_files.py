"""The run's data and tokenizer files: read on rank 0 alone, judged before they are used, known to every manifest.

The reading runs in a thread from the runtime's installation on, beside the start of Megatron, so that ranks that wait
for rank 0's answer do not wait for its disk.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_stability.checkpoints.manifest import DataFile
from megatron_stability.config import StabilityConfig
from megatron_stability.data import fingerprint, index, splits
from megatron_stability.data.blends import DataSet, data_sets
from megatron_stability.data.fingerprint import Look
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.collectives import first, from_rank_0
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.megatron.checkpoint.resume import training_args

SEARCH_S = 60.0  # how long a rank may look for an id beyond the vocabulary, once there is one
REMEDY = "train with the vocabulary that the data were made with (--vocab-size, --tokenizer-model), or other data"


@dataclass(frozen=True)
class Found:
    """What rank 0 read.

    Attributes:
        hashes: of configuration, code and tokenizer files.
        looks: at the data sets, in the order of the blends.
    """

    hashes: dict[str, str]
    looks: list[Look]

    @property
    def data(self) -> tuple[DataFile, ...]:
        """Fingerprints in the order of the blends."""
        return tuple(each.file for each in self.looks)


class RunFiles:
    """One a rank."""

    def __init__(self, config: StabilityConfig, args: Namespace) -> None:
        """Begins to read, on rank 0.

        Args:
            config: the validated tree.
            args: Megatron's.
        """
        self._args = args
        self._judged = False

        def read() -> Found:
            return Found(training_args.hashes(args, config), fingerprint.look_at_all(data_sets(args)))

        self._read: Future[Found] | Callable[[], Found] = read
        if args.rank == 0:
            pool = ThreadPoolExecutor(1, thread_name_prefix="data files")
            self._read = pool.submit(read)
            pool.shutdown(wait=False)

    def found(self) -> Found:
        """On rank 0, once it is read.

        Raises:
            UsageError: a data set is missing, damaged or cut short; names it.
            OSError: a file can't be read.
        """
        assert isinstance(self._read, Future), "other ranks are told the verdict"
        return self._read.result()

    def known(self) -> dict[str, Any]:
        """On rank 0: what a manifest keeps of it."""
        found = self.found()
        return {"hashes": found.hashes, "data": found.data}

    def judge(self, vocab_size: int) -> None:
        """Before the data sets are built: splits that hold nothing, ids beyond the vocabulary. Collective, once.

        Args:
            vocab_size: V of the tokenizer, without padding.

        Raises:
            UsageError: on every rank alike; names the data set and the flag.
        """
        if not self._judged:
            self._judged = True
            from_rank_0(lambda: self._judge(vocab_size))

    def _judge(self, vocab_size: int) -> None:
        looks = self.found().looks
        indexes = {each.index.prefix: each.index for each in looks}
        splits.refuse_empty(data_sets(self._args), indexes, argument(self._args, "split"))
        for each in looks:
            if each.largest_id >= vocab_size:
                raise UsageError(f"{each.index.bin} {_beyond(each.largest_id, vocab_size)}")

    def refuse_id(self, found: int, vocab_size: int) -> None:
        """A batch held an id that is no token: say which file has it. Collective, and the end of the run.

        Every rank reads a share of the data sets, at most `SEARCH_S` seconds long.

        Args:
            found: the id, or the absolute value of one below 0.
            vocab_size: V of the tokenizer.

        Raises:
            UsageError: always, on every rank alike.
        """
        found = found if found >= vocab_size else -found
        rank, world, until = dist.get_rank(), dist.get_world_size(), time.monotonic() + SEARCH_S
        mine: str | None = None
        for at, each in enumerate(data_sets(self._args)):
            if mine is None and at % world == rank and time.monotonic() < until:
                mine = _search(each, found, vocab_size, until)
        where = first(mine)
        raise UsageError(f"a batch {_beyond(found, vocab_size)}" if where is None else where[1])


def _search(data_set: DataSet, id_outside: int, vocab_size: int, until: float) -> str | None:
    try:
        read = index.read(data_set.flag, data_set.prefix)
        found = fingerprint.first_outside(read, id_outside, vocab_size, until, time.monotonic)
    except (UsageError, OSError) as error:  # gone since the start; the others are waiting
        return f"{data_set.prefix}: {error}"
    return None if found is None else f"{read.bin} {_beyond(found, vocab_size)}"


def _beyond(found: int, vocab_size: int) -> str:
    return f"holds token id {found}, and the vocabulary has {vocab_size} (0 to {vocab_size - 1}): {REMEDY}"
