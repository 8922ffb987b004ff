"""What a pattern of a seam's anchor matches, what the nearest release of a version is, and how far a seam has moved."""

from __future__ import annotations

import ast

import pytest

from megatron_stability.megatron.patching.anchor import known, pattern
from megatron_stability.megatron.patching.survey import survey
from tests.patches.small_megatron import small_megatron


def _call(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("asked", "stands", "matches"),
    [
        ("f(a, ...)", "f(a)", True),
        ("f(a, ...)", "f(a, b, *c, d=1)", True),
        ("f(a, ...)", "f()", False),
        ("f(a, ...)", "f(b, a)", False),
        ("f(a, ...)", "g(a)", False),
        ("f(a, ...)", "f", False),
        ("f(..., strict=True)", "f(x, y, other=1, strict=True)", True),
        ("f(..., strict=True)", "f(x, strict=False)", False),
        ("f(..., strict=True)", "f(x)", False),
        ("f(a)", "f(a, b)", False),
        ("f(a)", "f(a, strict=True)", False),
        ("f(g(a, ...), ...)", "f(g(a, b), c)", True),
        ("f(g(a, ...), ...)", "f(g(c), a)", False),
    ],
)
def test_an_ellipsis_at_the_end_of_a_call_lets_others_follow_and_nothing_else(asked, stands, matches):
    assert pattern.matches(_call(asked), _call(stands)) is matches


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.17.1", "0.18.2"),
        ("0.18.0", "0.18.2"),
        ("0.18.9", "0.18.2"),
        ("0.19.0", "0.19.2"),
        ("0.20.0", "0.19.2"),
        ("0.20.0rc1", "0.19.2"),
    ],
)
def test_the_nearest_release_is_of_the_same_minor_one_even_where_it_is_newer(version, nearest, monkeypatch):
    monkeypatch.setattr(known, "supported_versions", lambda: ["0.18.2", "0.19.2"])
    assert known.nearest_release(version) == nearest


def test_of_one_minor_release_the_newest_is_nearest(monkeypatch):
    monkeypatch.setattr(known, "supported_versions", lambda: ["0.18.2", "0.19.0", "0.19.2"])
    assert known.nearest_release("0.19.1") == "0.19.2"


def test_a_seam_has_moved_by_the_lines_from_the_nearest_release(tmp_path):
    path = "megatron/core/optimizer/optimizer.py"
    rows = {}
    for name, lines in (("plain", 0), ("longer", 7)):
        root = small_megatron(tmp_path / name)
        file = root / path
        file.write_text("\n" * lines + file.read_text())
        rows[name] = {row.seam: row for row in survey(root).rows if row.file == path}
    reference = known.known_seams(known.nearest_release("0.77.0"))
    seams = [seam for seam in rows["plain"] if reference[seam].line]
    assert seams
    for seam in seams:
        for name in ("plain", "longer"):
            by = rows[name][seam].line - reference[seam].line
            assert rows[name][seam].state == (f"moved by {by:+d} lines" if by else "fits")
        assert rows["longer"][seam].line - rows["plain"][seam].line == 7
