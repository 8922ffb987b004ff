"""What a data set's files hold, in a few reads: enough to tell them from others, and to know ids beyond a vocabulary.

Of the index every byte is hashed. Of the tokens `BLOCKS` blocks of `BLOCK` bytes are, one at a fixed place in each of
as many equal parts of the file; a file that is no longer than all blocks is hashed whole. Beside them stands the
SHA-256 of all tokens, where the sidecar `PREFIX.meta.json` has it and is of this index. So

    another size, another index, a file with other content throughout    is found,
    a stretch of a share p >= 2/BLOCKS of the file                        is found,
    a change of a share p of the file, wherever                           is found with probability >= 1 - (1-p)^BLOCKS

with 1 - (1-p)^128 = 0.72 at p = 1 %, 0.99 at 3.6 %. Times of files are no evidence and are not looked at.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_stability import files
from megatron_stability.checkpoints.manifest import DataFile
from megatron_stability.data import index as indexes
from megatron_stability.data.blends import DataSet
from megatron_stability.data.index import Index
from megatron_stability.errors import UsageError

BLOCKS = 128
BLOCK = 4096
THREADS = 16
META = ".meta.json"
LARGEST = "largest_id"  # the sidecar's key of the largest id in the data
_CHUNK = 1 << 22
_SCAN = 1 << 26


@dataclass(frozen=True)
class Look:
    """What one pass over a data set's files found.

    Attributes:
        index: its index.
        file: for manifests; split and weight are those of its place in the blend.
        largest_id: in the sidecar's words, or in the blocks that were read; -1 without a token.
    """

    index: Index
    file: DataFile
    largest_id: int


def look(data_set: DataSet) -> Look:
    """Read and judge one data set.

    Args:
        data_set: which.

    Returns:
        Its fingerprint, and ids.

    Raises:
        UsageError: its files are missing, damaged or cut short.
        OSError: they can't be read.
    """
    index = indexes.read(data_set.flag, data_set.prefix)
    index.refuse_wrong_sizes()
    sidecar = _sidecar(index)
    digest, largest = _sampled(index)
    file = DataFile(
        split=data_set.split,
        weight=data_set.weight,
        prefix=data_set.prefix,
        size=index.size,
        index=_hash(index, xxhash.xxh3_128()),
        blocks=digest,
        sha256=str(sidecar.get("sha256", {}).get(".bin", "")),
    )
    return Look(index, file, max(largest, int(sidecar.get(LARGEST, -1))))


def look_at_all(data_sets: Sequence[DataSet]) -> list[Look]:
    """`look` at each, in parallel threads: reading and hashing leave Python's lock.

    Args:
        data_sets: in the order of the blends.

    Returns:
        In the same order.
    """
    if not data_sets:
        return []
    with ThreadPoolExecutor(min(THREADS, len(data_sets))) as pool:
        return list(pool.map(look, data_sets))


def places(size: int) -> list[tuple[int, int]]:
    """Where a file of so many bytes is read: (offset, bytes), all of it where it is no longer than all blocks.

    The offsets are multiples of 8, and depend on the size alone.
    """
    if size <= BLOCKS * BLOCK:
        return [(0, size)] if size else []
    found = []
    for at in range(BLOCKS):
        first, end = at * size // BLOCKS, (at + 1) * size // BLOCKS - BLOCK
        offset = first + xxhash.xxh64_intdigest(f"{size}:{at}".encode()) % max(1, end - first + 1)
        found.append((min(offset // 8 * 8, size - BLOCK), BLOCK))
    return found


def _sampled(index: Index) -> tuple[str, int]:
    """(hash, largest id) of the blocks."""
    digest, largest = xxhash.xxh3_128(), -1
    descriptor = os.open(index.bin, os.O_RDONLY)
    try:
        for offset, length in places(index.size):
            block = os.pread(descriptor, length, offset)
            digest.update(block)
            ids = np.frombuffer(block, index.dtype, len(block) // index.dtype.itemsize)
            largest = max(largest, int(ids.max()))
    finally:
        os.close(descriptor)
    return digest.hexdigest(), largest


def _hash(index: Index, digest: Any) -> str:
    with files.open_regular(index.idx) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return str(digest.hexdigest())


def _sidecar(index: Index) -> dict[str, Any]:
    """What `prepare-data` said of this data set; nothing where it is of another index."""
    try:
        said = files.read_json(Path(f"{index.prefix}{META}"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{index.prefix}{META}: can't be read ({error.strerror}); make the data set again") from None
    except ValueError as error:
        raise UsageError(f"{index.prefix}{META}: is not JSON ({error}); make the data set again") from None
    ours = isinstance(said, dict) and isinstance(said.get("sha256"), dict) and isinstance(said.get(LARGEST, -1), int)
    return said if ours and said["sha256"].get(".idx") == _hash(index, hashlib.sha256()) else {}


def changes(saved: Sequence[DataFile], present: Sequence[DataFile]) -> list[str]:
    """What differs between the data of a checkpoint's run and those of this one, one phrase each.

    Args:
        saved: of the checkpoint.
        present: of this run; another path of the same content is the same data.

    Returns:
        Phrases that name the prefix; none where the data are the same.
    """
    if len(saved) != len(present):
        gone = [each.prefix for each in saved if each.prefix not in {file.prefix for file in present}]
        new = [each.prefix for each in present if each.prefix not in {file.prefix for file in saved}]
        names = f" (gone: {', '.join(gone) or 'none'}; new: {', '.join(new) or 'none'})"
        return [f"{len(saved)} data sets -> {len(present)}{names}"]
    return [text for was, now in zip(saved, present, strict=True) if (text := _change(was, now))]


def _change(was: DataFile, now: DataFile) -> str | None:
    if now.size != was.size:
        return f"{now.prefix}.bin has {now.size} bytes and had {was.size}"
    if now.index != was.index:
        return f"{now.prefix}.idx has other content"
    if now.blocks != was.blocks or (now.sha256 and was.sha256 and now.sha256 != was.sha256):
        return f"{now.prefix}.bin has other content"
    if now.split != was.split:
        return f"{now.prefix} served {was.split} and serves {now.split}"
    return None if now.weight == was.weight else f"{now.prefix} had weight {was.weight} and has {now.weight}"


def first_outside(index: Index, found: int, vocab_size: int, until: float, clock: Callable[[], float]) -> int | None:
    """An id of the data set that is no token, by reading all of it, up to the part that has one.

    Args:
        index: of the data set.
        found: an id of its kind: beyond the vocabulary, or below 0.
        vocab_size: V.
        until: when to give up, on `clock`.
        clock: seconds.

    Returns:
        The id of that part that is farthest outside; None where there is none, or time ran out.
    """
    tokens = np.memmap(index.bin, index.dtype, "r") if index.size else np.zeros(0, index.dtype)
    step = _SCAN // index.dtype.itemsize
    for at in range(0, len(tokens), step):
        part = tokens[at : at + step]
        worst = int(part.max() if found >= vocab_size else part.min())
        if not 0 <= worst < vocab_size:
            return worst
        if clock() > until:
            break
    return None
