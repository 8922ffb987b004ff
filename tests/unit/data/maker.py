"""Data sets in Megatron's format, byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"u2": 8, "i4": 4, "i2": 3, "u1": 1}


def make(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "u2") -> str:
    """Write `PREFIX.idx` and `PREFIX.bin`.

    Args:
        prefix: without suffix.
        documents: ids of each.
        dtype: of the tokens.

    Returns:
        The prefix.
    """
    sizes = np.array([len(each) for each in documents], np.int32)
    offsets = (np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize).astype(np.int64)[: len(sizes)]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sizes), len(sizes) + 1)
    marks = np.arange(len(sizes) + 1, dtype=np.int64)
    Path(f"{prefix}.idx").write_bytes(head + sizes.tobytes() + offsets.tobytes() + marks.tobytes())
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(each, dtype).tobytes() for each in documents))
    return str(prefix)
