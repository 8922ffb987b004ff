"""A file, function or class that is too long to be read in one go is two things."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_stability

ROOT = Path(megatron_stability.__file__).parent
FILE, CLASS, FUNCTION = 400, 250, 60


def too_long(name: str, source: str) -> list[str]:
    """What is longer than it may be, as "FILE:NAME LINES"."""
    lines = len(source.splitlines())
    found = [f"{name} {lines}"] if lines > FILE else []
    for node in ast.walk(ast.parse(source)):
        limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [f"{name}:{node.name} {lines}"] if lines > limit else []
    return found


def test_nothing_is_too_long() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 200
    assert [each for path in files for each in too_long(str(path.relative_to(ROOT)), path.read_text("utf-8"))] == []


def test_one_line_more_is_too_long() -> None:
    function = "def f() -> None:\n" + "    pass\n" * (FUNCTION - 1)
    assert too_long("a", function) == []
    assert too_long("a", function + "    pass\n") == [f"a:f {FUNCTION + 1}"]
    assert too_long("a", "class C:\n" + "    x = 1\n" * CLASS) == [f"a:C {CLASS + 1}"]
    assert too_long("a", "x = 1\n" * (FILE + 1)) == [f"a {FILE + 1}"]
