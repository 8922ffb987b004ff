"""Links in a folder of training text: what lies elsewhere is read only where it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_stability.data.sources import DEFAULT_PATTERNS, discover
from megatron_stability.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    root.mkdir()
    (root / "a.txt").write_text("a")
    (tmp_path / "private.txt").write_text("private")
    return root


def test_a_link_out_of_the_folder_is_refused_by_its_name(folder: Path, tmp_path: Path) -> None:
    (folder / "b.txt").symlink_to(tmp_path / "private.txt")
    with pytest.raises(UsageError, match=r"docs/b\.txt is a link that leads out of .*--exclude b\.txt.*--follow-links"):
        discover([folder], DEFAULT_PATTERNS, ())
    assert [each.path for each in discover([folder], DEFAULT_PATTERNS, ("b.txt",))] == ["a.txt"]
    assert [each.path for each in discover([folder], DEFAULT_PATTERNS, (), follow_links=True)] == ["a.txt", "b.txt"]


def test_a_link_that_stays_inside_and_one_that_is_named_are_read(folder: Path, tmp_path: Path) -> None:
    (folder / "b.txt").symlink_to("a.txt")
    (tmp_path / "given").symlink_to(folder)
    (tmp_path / "named.txt").symlink_to(tmp_path / "private.txt")
    found = discover([tmp_path / "given", tmp_path / "named.txt"], DEFAULT_PATTERNS, ())
    assert [each.path for each in found] == ["a.txt", "b.txt", "named.txt"]


def test_folders_behind_links_fifos_and_dangling_links_are_not_entered(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "c.txt").write_text("c")
    (folder / "more").symlink_to(elsewhere)
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe.txt")
    assert [each.path for each in discover([folder], DEFAULT_PATTERNS, ())] == ["a.txt"]
