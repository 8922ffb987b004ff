"""A save that failed: said, and its remains removed where the disk was full, so that run and last checkpoint go on."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from megatron_stability.echo import say
from megatron_stability.errors import UsageError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Failure(NamedTuple):
    """Why a save does not count; `no_space`: what it left is in part, and takes the space that training needs."""

    text: str
    no_space: bool = False


class SaveError(Exception):
    """Another rank's failure."""

    def __init__(self, failure: Failure) -> None:
        """Takes what that rank said."""
        super().__init__(failure.text)
        self.failure = failure


def attempt[T](work: Callable[[], T]) -> tuple[T | None, Failure | None]:
    """The result, or what went wrong with a file: a full disk ends this checkpoint, not the run.

    Args:
        work: writes or reads files.

    Returns:
        Its result and None, or None and the failure.
    """
    try:
        return work(), None
    except OSError as error:
        return None, Failure(f"{error.filename or 'a file'}: {error.strerror or error}", error.errno in NO_SPACE)
    except SaveError as error:
        return None, error.failure
    except UsageError as error:
        return None, Failure(str(error))


class Writing:
    """Of one save: Megatron's writing, and whether it failed, which it tells every rank by an exception on each."""

    def __init__(self) -> None:
        """Nothing failed."""
        self._failure: Failure | None = None

    def take(self) -> Failure | None:
        """What failed since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def guarded[**P, T](self, write: Callable[P, T]) -> Callable[P, T | None]:
        """Let training go on where a write fails.

        Args:
            write: Megatron's own writing, or the end of it.

        Returns:
            The same, but that a failed write is remembered, and returns None.
        """

        @wraps(write)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            if self._failure is not None:  # an asynchronous save's next part, which rank 0 would write to a full disk
                return None
            try:
                return write(*args, **kwargs)
            except CheckpointException as error:
                whose = {rank: f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items()}
                self._failure = Failure(next(iter(whose.values()), "another rank could not write"), no_space=True)
                return None

        return guarded


def tell(folder: Path, failure: Failure) -> None:
    """Rank 0: say why a folder does not count, and remove it where it only takes space."""
    say(f"{folder.name} does not count as a checkpoint: {failure.text}")
    if failure.no_space:
        shutil.rmtree(folder, ignore_errors=True)
        say(f"{folder.name} was removed to give its space back")
