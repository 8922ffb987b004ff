"""Committed results: what a stamp holds, rows of one code alone, and pages that say of which commit a result is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results

ROOT = Path(results.ROOT)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of two source files."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("a = 1\n")
    (tmp_path / "one.py").write_text("b = 1\n")
    return tmp_path


def test_rows_are_kept_while_the_code_is_the_same_and_never_mixed(tree: Path) -> None:
    out, sources = tree / "r.json", ("room", "one.py")
    first = results.Results(out, sources)
    first.put("x", {"equal": 3})
    assert results.Results(out, sources).rows == {"x": {"equal": 3}}
    assert results.changed(out) == []
    (tree / "room" / "notes.txt").write_text("no source")
    assert results.changed(out) == []
    (tree / "room" / "a.py").write_text("a = 2\n")
    assert results.changed(out) == ["room"]
    after = results.Results(out, sources)
    assert after.rows == {}
    after.put("y", 1)
    assert set(json.loads(out.read_text())) == {"of", "y"}


def test_a_moved_file_is_another_code(tree: Path) -> None:
    before = results.digest("room")
    (tree / "room" / "a.py").rename(tree / "room" / "b.py")
    assert results.digest("room") != before


def test_a_stamp_says_commit_command_and_versions(tree: Path) -> None:
    of = results.stamp(("one.py",))
    assert of["command"].startswith("python ")
    assert set(of["sources"]) == {"one.py"}
    assert of["versions"]["torch"]
    assert of["commit"] == "no repository"


def test_a_result_without_a_stamp_is_told(tree: Path) -> None:
    (tree / "old.json").write_text('{"a": 1}')
    (tree / "list.json").write_text("[1]")
    assert results.changed(tree / "old.json") is None
    assert results.changed(tree / "list.json") is None


def test_a_page_that_cites_a_result_says_of_which_commit_it_is(tree: Path) -> None:
    results.write(tree / "new.json", {"a": 1}, results.stamp(("one.py",)) | {"commit": "abc1234"})
    assert results.cited(tree / "new.json", "`new.json`, of abc1234")
    assert not results.cited(tree / "new.json", "`new.json` has it")
    assert results.cited(tree / "new.json", "nothing of it")


def test_pages_say_of_which_commit_their_results_are() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert len(results.committed()) >= 14
    for path in results.committed():
        assert [page.name for page in pages if not results.cited(path, page.read_text())] == [], path.name
