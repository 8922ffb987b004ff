"""Which documents a split takes, and the splits that Megatron would wait for."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stability.data import index, splits
from megatron_stability.data.blends import data_sets
from megatron_stability.errors import UsageError
from tests.unit.data.maker import make


@pytest.mark.parametrize(
    ("split", "documents", "lengths"),
    [  # read off Megatron's own builder
        ("969, 30, 1", 9, (9, 0, 0)),
        ("9999,8,2", 9, (9, 0, 0)),
        ("9999,8,2", 1000, (999, 1, 0)),
        ("969,30,1", 1000, (969, 30, 1)),
        ("8,1,1", 10, (8, 1, 1)),
        ("1,0,0", 5, (5, None, None)),
        ("90,10", 10, (9, 1, None)),
        ("98,1,1", 50, (49, 1, 0)),  # 49.5 is rounded to the even 50
    ],
)
def test_megatrons_arithmetic(split: str, documents: int, lengths: tuple[int | None, ...]) -> None:
    found = splits.ranges(split, documents)
    assert tuple(None if part is None else len(part) for part in found.values()) == lengths


def test_a_split_beside_data_for_each_split_is_refused() -> None:
    own, shared = data_sets(Namespace(train_data_path=["a"])), data_sets(Namespace(data_path=["a"]))
    with pytest.raises(UsageError, match=r"--split 9,1,0: --train-data-path says what each split reads; drop --split"):
        splits.refuse_unread(own, "9,1,0")
    splits.refuse_unread(own, None)
    splits.refuse_unread(shared, "9,1,0")


@pytest.mark.parametrize("split", ["banana", "0,0,0", "1,2,3,4", ""])
def test_shares_that_are_none(split: str) -> None:
    with pytest.raises(UsageError, match=r"--split .*: give three shares, such as 7,1,1"):
        splits.ranges(split, 9)


@given(st.integers(3, 2_000_000))
def test_a_fitting_split_leaves_none_empty(documents: int) -> None:
    parts = list(splits.ranges(splits.fitting(documents), documents).values())
    assert all(parts), "every split has a document"
    assert sum(map(len, parts)) == documents
    assert abs(len(parts[1]) - 0.03 * documents) <= 1
    assert abs(len(parts[2]) - 0.001 * documents) <= 1


def test_a_fitting_split_of_one_and_two_documents() -> None:
    assert [splits.fitting(number) for number in (1, 2, 3, 9)] == ["1,0,0", "1,1,0", "1,1,1", "7,1,1"]


def refuse(tmp_path: Path, numbers: dict[str, int], split: str | None = None, **flags: Any) -> None:
    for name, number in numbers.items():
        make(tmp_path / name, [[1, 2]] * number)
    given_sets = data_sets(
        Namespace(
            **{
                flag: [word if word.replace(".", "").isdigit() else str(tmp_path / word) for word in words]
                for flag, words in flags.items()
            }
        )
    )
    splits.refuse_empty(given_sets, {each.prefix: index.read(each.flag, each.prefix) for each in given_sets}, split)


@pytest.mark.parametrize("split", [None, "9999,8,2"])
def test_an_empty_split_is_named_with_its_documents_and_a_remedy(tmp_path: Path, split: str | None) -> None:
    with pytest.raises(UsageError, match=r"--split .*: the validation split would be empty, for .*a has 9 doc.*7,1,1"):
        refuse(tmp_path, {"a": 9}, split, data_path=["a"])
    refuse(tmp_path, {"a": 9}, "7,1,1", data_path=["a"])
    refuse(tmp_path, {"a": 9}, "1,0,0", data_path=["a"])


def test_an_empty_test_split_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the test split would be empty, for .*a has 1000 documents"):
        refuse(tmp_path, {"a": 1000}, "9999,8,2", data_path=["a"])


def test_a_blend_with_weights_needs_a_document_of_each_and_one_without_of_any(tmp_path: Path) -> None:
    both = {"a": 1000, "b": 9}
    with pytest.raises(UsageError, match=r"the validation split would be empty, for .*b has 9 documents"):
        refuse(tmp_path, both, data_path=["0.5", "a", "0.5", "b"])
    refuse(tmp_path, both, data_path=["a", "b", "a"])
    with pytest.raises(UsageError, match="the validation split would be empty"):
        refuse(tmp_path, both, data_path=["b", "b", "b"])


def test_data_of_one_split_without_a_token(tmp_path: Path) -> None:
    make(tmp_path / "nothing", [[], []])
    refuse(tmp_path, {"a": 1}, train_data_path=["a"])
    with pytest.raises(UsageError, match=r"--valid-data-path: the validation split would be empty, for .* no token"):
        refuse(tmp_path, {"a": 1}, train_data_path=["a"], valid_data_path=["nothing"])
