"""A save that failed: said, and its remains removed where the disk was full, so that run and last checkpoint go on."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_stability.echo import said
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


def tell(folder: Path, failure: Failure) -> None:
    """Rank 0: say why a folder does not count, and remove it where it only takes space."""
    print(f"> megatron-stability: {folder.name} does not count as a checkpoint: {said(failure.text)}", flush=True)
    if failure.no_space:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"> megatron-stability: {folder.name} was removed to give its space back", flush=True)
