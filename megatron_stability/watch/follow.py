"""A ledger that grows, read from where the last look ended: a look costs what is new, not what is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_stability import files
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import FILE, AnyEntry, home, parse

TAIL = 8 << 20  # bytes whose step lines are read at the first look; of what is before, all other kinds of lines
CHUNK = 8 << 20  # bytes read at once
_STEP = b'{"kind":"step"'
_ATTENTION = b'{"kind":"attention"'


class Follower:
    """The whole lines of a folder's ledger that were not seen yet.

    A torn last line is waited for. A file that was replaced, or is shorter than what was read, is read afresh.

    Args:
        folder: that holds `ledger.jsonl`.

    Attributes:
        damaged: lines with a wrong checksum so far.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self.damaged = 0

    def new(self) -> Iterator[AnyEntry]:
        """What was written since the last call.

        Yields:
            Entries in their order; attention tables are left out.

        Raises:
            OSError: the file can't be read.
            UsageError: it is of a newer version.
        """
        with files.open_regular(self._path) as stream:
            found = os.fstat(stream.fileno())
            here = found.st_dev, found.st_ino
            skip_steps_before = 0
            if here != self._file or found.st_size < self._offset:
                self._file, self._offset = here, 0
                skip_steps_before = max(0, found.st_size - TAIL)
            stream.seek(self._offset)
            rest = b""
            while chunk := stream.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    begins = self._offset
                    self._offset += len(line) + 1
                    if line.startswith(_ATTENTION) or (begins < skip_steps_before and line.startswith(_STEP)):
                        continue
                    yield from self._entry(line)

    def _entry(self, line: bytes) -> Iterator[AnyEntry]:
        entries, whole = parse(line, self._path)
        if not whole:
            self.damaged += 1
        yield from entries


def folder_of(run: Path) -> Path:
    """Where a run's ledger lies: in the folder itself, or in its subfolder `stability`.

    Raises:
        UsageError: there is none.
    """
    folder = home(run)
    if (folder / FILE).exists():
        return folder
    raise UsageError(f"{run}: holds no {FILE}; name a run's folder (--stability-record-dir, or its --save folder)")
