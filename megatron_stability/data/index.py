"""What a data set's index says of it: `PREFIX.idx` beside the tokens in `PREFIX.bin`.

    magic, 9 bytes | version, 8 | dtype code, 1 | S sequences, 8 | D document marks, 8
    S sizes int32 | S byte offsets int64 | D marks int64

The format is that of megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_stability import files
from megatron_stability.errors import UsageError

MAGIC = b"MMIDIDX\x00\x00"
HEAD = 34  # bytes before the sizes
_SIZE, _OFFSET, _MARK = 4, 8, 8
DTYPES: Mapping[int, np.dtype[np.generic]] = MappingProxyType(
    {code: np.dtype(name) for code, name in enumerate(["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"], 1)}
)


@dataclass(frozen=True)
class Index:
    """One data set's.

    Attributes:
        flag: the setting that named the data set, for messages.
        prefix: path without suffix.
        dtype: of the tokens.
        sequences: S; what Megatron's splits are counted in.
        size: bytes that the `.bin` must have, and has.
    """

    flag: str
    prefix: str
    dtype: np.dtype[np.generic]
    sequences: int
    size: int

    @property
    def idx(self) -> Path:
        """The index."""
        return Path(f"{self.prefix}.idx")

    @property
    def bin(self) -> Path:
        """The tokens."""
        return Path(f"{self.prefix}.bin")

    def tokens(self, first: int, end: int) -> int:
        """Tokens of the sequences [first, end), from two offsets of the index."""
        if first >= end:
            return 0
        with files.open_regular(self.idx) as stream:
            begin = _number(stream.fileno(), "<q", HEAD + self.sequences * _SIZE + first * _OFFSET)
            return (_end_of(stream.fileno(), self.sequences, end - 1, self.dtype) - begin) // self.dtype.itemsize

    def lengths(self) -> npt.NDArray[np.int32]:
        """[S] tokens of each sequence, mapped."""
        if not self.sequences:
            return np.zeros(0, np.int32)
        return np.memmap(self.idx, np.int32, "r", HEAD, (self.sequences,))

    def offsets(self, first: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
        """[end - first] where sequences begin in the `.bin`, in tokens."""
        end = self.sequences if end is None else end
        if first >= end:
            return np.zeros(0, np.int64)
        at = HEAD + self.sequences * _SIZE + first * _OFFSET
        return np.fromfile(self.idx, np.int64, end - first, offset=at) // self.dtype.itemsize

    def ids(self) -> npt.NDArray[Any]:
        """The tokens of the `.bin`, mapped."""
        return np.memmap(self.bin, self.dtype, "r") if self.size else np.zeros(0, self.dtype)

    def refuse_wrong_sizes(self) -> None:
        """Add up every sequence's size; reads a third of the index.

        Raises:
            UsageError: they are not those of the `.bin`.
        """
        sizes = np.memmap(self.idx, np.int32, "r", HEAD, (self.sequences,)) if self.sequences else np.zeros(0)
        said = int(sizes.sum(dtype=np.int64)) * self.dtype.itemsize
        if said != self.size:
            raise UsageError(_unlike(self.flag, self.prefix, self.size, said))


def read(flag: str, prefix: str) -> Index:
    """Both files must exist, and the index must describe exactly the bytes that are there. Reads 54 bytes of it.

    Args:
        flag: the setting that names the data set.
        prefix: path without suffix.

    Returns:
        What it says.

    Raises:
        UsageError: names the file that is missing, damaged or cut short.
    """
    try:
        return _read(flag, prefix)
    except OSError as error:
        raise UsageError(f"{flag} {prefix}: its files can't be read ({error.strerror})") from None


def _read(flag: str, prefix: str) -> Index:
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index, data):
        if not file.is_file():
            raise UsageError(f"{flag} {prefix}: {file} does not exist; `megatron-stability prepare-data` makes it")
    with files.open_regular(index) as stream:
        head = stream.read(HEAD)
        if len(head) < HEAD or head[:9] != MAGIC:
            raise UsageError(f"{flag} {prefix}: {index} is not a Megatron index; make it again")
        _, code, sequences, marks = struct.unpack("<QBQQ", head[9:])
        whole = HEAD + sequences * (_SIZE + _OFFSET) + marks * _MARK
        if index.stat().st_size < whole or code not in DTYPES:
            raise UsageError(f"{flag} {prefix}: {index} is cut short or damaged; make it again")
        said = _end_of(stream.fileno(), sequences, sequences - 1, DTYPES[code]) if sequences else 0
    size = data.stat().st_size
    if size != said:
        raise UsageError(_unlike(flag, prefix, size, said))
    return Index(flag, prefix, DTYPES[code], sequences, size)


def _unlike(flag: str, prefix: str, size: int, said: int) -> str:
    return f"{flag} {prefix}: {prefix}.bin has {size} bytes where its index says {said}; make it again"


def _end_of(descriptor: int, sequences: int, at: int, dtype: np.dtype[np.generic]) -> int:
    """The byte after a sequence."""
    offset = _number(descriptor, "<q", HEAD + sequences * _SIZE + at * _OFFSET)
    return offset + _number(descriptor, "<i", HEAD + at * _SIZE) * dtype.itemsize


def _number(descriptor: int, form: str, at: int) -> int:
    return int(struct.unpack(form, os.pread(descriptor, struct.calcsize(form), at))[0])
