"""A replaced or truncated data set is told surely, a changed one with the probability that the page states."""

from __future__ import annotations

import hashlib
import json
import os
import random
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from megatron_stability.checkpoints.manifest import DataFile
from megatron_stability.data import fingerprint
from megatron_stability.data import index as indexes
from megatron_stability.data.blends import DataSet, data_sets
from megatron_stability.data.fingerprint import BLOCK, BLOCKS, changes, look, places
from megatron_stability.errors import UsageError
from tests.unit.data.maker import make

TOKENS = 2_000_000  # of uint16: 4 MB, of which the blocks are an eighth


def seen(prefix: str, weight: float | None = None) -> DataFile:
    return look(DataSet("--data-path", "all", prefix, weight)).file


@pytest.fixture
def big(tmp_path: Path) -> Path:
    ids = np.random.default_rng(1).integers(0, 200, TOKENS)
    make(tmp_path / "big", np.split(ids, 20))
    return tmp_path / "big.bin"


def rewrite(file: Path, first: int, new: bytes) -> None:
    """In place, and with the times that it had."""
    times = file.stat()
    with file.open("r+b") as stream:
        stream.seek(first)
        stream.write(new)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("size", [0, 1, 4096, 300_000, BLOCKS * BLOCK, BLOCKS * BLOCK + 2, 10**6, 12_345_678, 10**12])
def test_places_are_inside_one_in_each_part_and_of_the_size_alone(size: int) -> None:
    found = places(size)
    assert found == places(size)
    assert all(offset >= 0 and offset + length <= size for offset, length in found)
    if size <= BLOCKS * BLOCK:
        assert sum(length for _, length in found) == size, "all of it"
    else:
        assert len(found) == BLOCKS
        part = size / BLOCKS
        assert all(at * part - 9 <= offset <= (at + 1) * part for at, (offset, _) in enumerate(found))
        if part > 8 * BLOCK:
            assert len({int(4 * (offset / part - at)) for at, (offset, _) in enumerate(found)}) >= 4, "all over a part"


def test_another_file_of_equal_size_and_times_is_found(big: Path) -> None:
    first = seen(str(big.with_suffix("")))
    rewrite(big, 0, np.random.default_rng(2).integers(0, 200, TOKENS).astype("u2").tobytes())
    assert changes([first], [seen(str(big.with_suffix("")))]) == [f"{big} has other content"]


def test_a_stretch_of_two_parts_is_found_wherever_it_lies(big: Path) -> None:
    prefix, size = str(big.with_suffix("")), big.stat().st_size
    first, length = seen(prefix), 2 * size // BLOCKS + 16
    draw = random.Random(3)
    for _ in range(20):
        at = draw.randrange(size - length) // 2 * 2
        before = big.read_bytes()[at : at + length]
        rewrite(big, at, bytes(byte ^ 1 for byte in before))
        assert changes([first], [seen(prefix)]), at
        rewrite(big, at, before)
    assert changes([first], [seen(prefix)]) == []


def test_a_change_of_a_share_is_found_as_often_as_stated() -> None:
    """Changes of 1 % of a file's bytes, one stretch of a random place each: 1 - 0.99^128 = 0.72 or more."""
    size, share, draw = 40_000_000, 0.01, random.Random(4)
    blocks, hits = places(size), 0
    for _ in range(2000):
        length = int(size * share / 8)
        stretches = [draw.randrange(size - length) for _ in range(8)]
        hits += any(at < offset + BLOCK and offset < at + length for offset, _ in blocks for at in stretches)
    assert hits / 2000 > 1 - (1 - share) ** BLOCKS


def test_a_file_no_longer_than_the_blocks_is_read_whole(tmp_path: Path) -> None:
    prefix = make(tmp_path / "small", [[7] * 1000, [8] * 50])
    first = seen(prefix)
    for at in (0, 1001, 2098):
        rewrite(tmp_path / "small.bin", at, b"\x01")
        assert changes([first], [seen(prefix)]) == [f"{prefix}.bin has other content"], at
        first = seen(prefix)


def test_other_documents_of_the_same_tokens(tmp_path: Path) -> None:
    first = seen(make(tmp_path / "text", [[1, 2], [3]]))
    assert changes([first], [seen(make(tmp_path / "text", [[1], [2, 3]]))]) == [
        f"{tmp_path}/text.idx has other content"
    ]
    assert "has 8 bytes and had 6" in changes([first], [seen(make(tmp_path / "text", [[1], [2, 3], [4]]))])[0]


def test_moved_data_are_the_same_and_the_blend_is_not_another(tmp_path: Path) -> None:
    a, b = (make(tmp_path / name, [[number]]) for number, name in enumerate("ab"))
    (tmp_path / "elsewhere").mkdir()
    moved = make(tmp_path / "elsewhere" / "a", [[0]])
    assert changes([seen(a), seen(b)], [seen(moved), seen(b)]) == []
    assert changes([seen(a, 0.3)], [seen(a, 0.5)]) == [f"{a} had weight 0.3 and has 0.5"]
    assert changes([seen(a), seen(b)], [seen(a)]) == [f"2 data sets -> 1 (gone: {b}; new: none)"]
    assert changes([seen(a), seen(b)], [seen(b), seen(a)]) == [f"{each}.bin has other content" for each in (b, a)]


def sidecar(prefix: str, **said: object) -> None:
    index = hashlib.sha256(Path(f"{prefix}.idx").read_bytes()).hexdigest()
    Path(f"{prefix}.meta.json").write_text(json.dumps({"sha256": {".bin": "b" * 64, ".idx": index}, **said}))


def test_the_sidecar_tells_what_no_block_shows(big: Path) -> None:
    prefix = str(big.with_suffix(""))
    sidecar(prefix, largest_id=256)
    found = look(DataSet("--data-path", "all", prefix, None))
    assert found.largest_id == 256
    assert found.file.sha256 == "b" * 64
    other = found.file.model_copy(update={"sha256": "c" * 64})
    assert changes([found.file], [other]) == [f"{big} has other content"]
    assert changes([found.file], [other.model_copy(update={"sha256": ""})]) == []
    Path(f"{prefix}.idx").write_bytes(Path(f"{prefix}.idx").read_bytes() + b"\0")  # of another index, it says nothing
    assert look(DataSet("--data-path", "all", prefix, None)).largest_id == 199
    Path(f"{prefix}.meta.json").write_text("{")
    with pytest.raises(UsageError, match=r"big\.meta\.json: is not JSON"):
        seen(prefix)


def test_ids_in_blocks_and_in_all_of_the_file(big: Path) -> None:
    inside = places(big.stat().st_size)
    free = next(at for at in range(0, 2 * TOKENS, 2) if not any(o <= at < o + n for o, n in inside))
    prefix = str(big.with_suffix(""))
    rewrite(big, free, np.array([256], "u2").tobytes())
    found = look(DataSet("--data-path", "all", prefix, None))
    assert found.largest_id == 199
    assert fingerprint.first_outside(found.index, 500, 200, until=9.0, clock=lambda: 0.0) == 256
    assert fingerprint.first_outside(found.index, 500, 257, until=9.0, clock=lambda: 0.0) is None
    negative = indexes.read("--data-path", make(big.parent / "negative", [[1, 500, -7]], "i4"))
    assert fingerprint.first_outside(negative, -2, 200, until=9.0, clock=lambda: 0.0) == -7
    rewrite(big, inside[5][0], np.array([300], "u2").tobytes())
    assert look(DataSet("--data-path", "all", prefix, None)).largest_id == 300


def test_a_thousand_data_sets_keep_the_order_of_the_blend(tmp_path: Path) -> None:
    words = [make(tmp_path / str(number), [[number]], "i4") for number in range(1000)]
    looks = fingerprint.look_at_all(data_sets(Namespace(data_path=words)))
    assert [each.largest_id for each in looks] == list(range(1000))
