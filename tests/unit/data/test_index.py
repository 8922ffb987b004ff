"""What an index says, by a few reads, and what speaks against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stability.data import index
from megatron_stability.errors import UsageError
from tests.unit.data.maker import make

DOCUMENTS = ([1, 2, 3], [4], [], [5, 6])


@pytest.mark.parametrize("dtype", ["u2", "i4"])
def test_tokens_of_a_range_of_documents(tmp_path: Path, dtype: str) -> None:
    found = index.read("--data-path", make(tmp_path / "text", DOCUMENTS, dtype))
    assert (found.sequences, found.size) == (4, 6 * found.dtype.itemsize)
    for first in range(5):
        for end in range(first, 5):
            assert found.tokens(first, end) == sum(map(len, DOCUMENTS[first:end])), (first, end)
    found.refuse_wrong_sizes()


def test_no_document_at_all(tmp_path: Path) -> None:
    found = index.read("--data-path", make(tmp_path / "text", []))
    assert (found.sequences, found.size, found.tokens(0, 0)) == (0, 0, 0)
    found.refuse_wrong_sizes()


@pytest.mark.parametrize("change", [-2, 2])
def test_tokens_that_are_cut_short_or_too_many(tmp_path: Path, change: int) -> None:
    prefix = make(tmp_path / "text", DOCUMENTS)
    data = tmp_path / "text.bin"
    data.write_bytes(data.read_bytes()[:-2] if change < 0 else data.read_bytes() + b"xx")
    with pytest.raises(UsageError, match=rf"--data-path .*text: .*text\.bin has {12 + change} bytes .* says 12"):
        index.read("--data-path", prefix)


def test_a_size_that_the_offsets_do_not_bear_out(tmp_path: Path) -> None:
    prefix = make(tmp_path / "text", DOCUMENTS)
    file = tmp_path / "text.idx"
    data = bytearray(file.read_bytes())
    data[index.HEAD] += 1  # of the first document
    file.write_bytes(data)
    found = index.read("--data-path", prefix)  # the last offset and size alone do not show it
    with pytest.raises(UsageError, match=r"text\.bin has 12 bytes where its index says 14"):
        found.refuse_wrong_sizes()
