"""Flags and list files as Megatron reads them (`get_blend_and_blend_per_split`)."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.data.blends import data_sets
from megatron_stability.errors import UsageError


def named(**args: Any) -> list[tuple[str, str, float | None]]:
    return [(each.split, each.prefix, each.weight) for each in data_sets(Namespace(**args))]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["a"], [("all", "a", None)]),
        (["a", "b"], [("all", "a", None), ("all", "b", None)]),
        (["0.3", "a", "7", "b"], [("all", "a", 0.3), ("all", "b", 7.0)]),
        (["1", "a", "2"], [("all", "1", None), ("all", "a", None), ("all", "2", None)]),  # an odd number: no weights
        (["x", "a", "y", "b"], [("all", each, None) for each in ("x", "a", "y", "b")]),
    ],
)
def test_a_blend(tmp_path: Path, words: list[str], found: list[Any]) -> None:
    assert named(data_path=words) == found
    (tmp_path / "list").write_text("\n".join(words))
    assert named(data_args_path=str(tmp_path / "list"), data_path=None) == found


def test_a_blend_for_each_split(tmp_path: Path) -> None:
    found = [("train", "a", 0.5), ("train", "b", 0.5), ("valid", "c", None), ("test", "d", 1.0)]
    assert named(train_data_path=["0.5", "a", "0.5", "b"], valid_data_path=["c"], test_data_path=["1", "d"]) == found
    file = tmp_path / "list.json"
    file.write_text(json.dumps({"train": ["0.5", "a", "0.5", "b"], "valid": "c", "test": "1 d"}))
    assert named(per_split_data_args_path=str(file)) == found
    file.write_text(json.dumps({"train": ["a"], "valid": None, "test": None}))
    assert named(per_split_data_args_path=str(file)) == [("train", "a", None)]


def test_mock_data_are_of_no_file() -> None:
    assert named(mock_data=True, data_path=["a"]) == []


@pytest.mark.parametrize("text", ["[]", '{"train": ["a"]}', "a b", "3"])
def test_a_list_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(UsageError, match=r"--per-split-data-args-path .*list\.json"):
        named(per_split_data_args_path=str(tmp_path / "list.json"))


def test_what_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data-args-path nowhere: there is no such file"):
        named(data_args_path="nowhere")
    with pytest.raises(UsageError, match="drop one of the two"):
        named(data_args_path="nowhere", data_path=["a"])
