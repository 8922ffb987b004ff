"""Helpers of the patcher's tests: diffs from pairs of texts, and a small Megatron-like tree to patch."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_stability.megatron.patching.tree import detect_version, installed_root
from tests.older_megatron import older_release

HEADER = "What: opens a seam.\nWhy: a test\n  needs one.\nUpstream: none.\nRemove when: the test goes.\n\n"

STOCK = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n",
    "megatron/core/first.py": "".join(f"line_{n} = {n}\n" for n in range(1, 31)),
    "megatron/core/second.py": "def where():\n    return 'stock'\n\n\ndef fail():\n    raise ValueError('here')\n",
    "megatron/training/__init__.py": "# training\n",
    "megatron/training/third.py": "# Größe\r\nvalue = 'no newline at the end'",
}
# Two patches touch first.py; the second one's line numbers are those the first one left.
SERIES: tuple[Mapping[str, tuple[str | None, str]], ...] = (
    {
        "megatron/core/first.py": (STOCK["megatron/core/first.py"], "A = 1\n" + STOCK["megatron/core/first.py"]),
        "megatron/core/seam.py": (None, "VALUE = 'only in the diff'\n"),
    },
    {
        "megatron/core/first.py": (
            "A = 1\n" + STOCK["megatron/core/first.py"],
            "A = 1\n" + STOCK["megatron/core/first.py"].replace("line_20 = 20\n", "line_20 = 20\nB = 2\n"),
        ),
        "megatron/core/second.py": (
            STOCK["megatron/core/second.py"],
            "# one line more\n" + STOCK["megatron/core/second.py"].replace("'stock'", "'patched'"),
        ),
        "megatron/training/third.py": (STOCK["megatron/training/third.py"], "# Größe\r\nvalue = 'still none'"),
    },
)
PATCHED = {path: new for changes in SERIES for path, (_, new) in changes.items()}


def lines(text: str) -> list[str]:
    """Lines with their newline, split at "\\n" alone."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def unified(path: str, old: str | None, new: str, context: int = 3) -> str:
    """The unified diff as `git diff` writes it, from difflib; "" where the texts are equal."""
    from_file = "/dev/null" if old is None else f"a/{path}"
    diff = difflib.unified_diff(lines(old or ""), lines(new), from_file, f"b/{path}", n=context)
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in diff)


def write(root: Path, files: Mapping[str, str]) -> None:
    """Writes texts below `root`, byte for byte."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode("utf-8", "surrogateescape"))


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below `root` with its mode, bytecode caches aside."""
    return {
        file.relative_to(root).as_posix(): (file.read_bytes(), file.stat().st_mode)
        for file in sorted(root.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


def write_series(patches: Path, version: str = "0.19.2") -> Path:
    """Writes SERIES as the patch set of a version; returns `patches`."""
    for number, changes in enumerate(SERIES, 1):
        diffs = "".join(unified(path, old, new) for path, (old, new) in changes.items())
        write(patches, {f"{version}/{number:03}-part.patch": HEADER + diffs})
    return patches


def stock_megatrons() -> dict[str, Path]:
    """Real Megatron trees by version: the installed one, and the older one that `ci/env.sh` unpacks beside it."""
    return {detect_version(root)[0]: root for root in (installed_root(), Path(older_release()))}


def copy_targets(stock: Path, target: Path, paths: Iterable[str]) -> None:
    """Copies what the patcher reads of a Megatron tree: the target files, their folders and the version."""
    for path in (*paths, "megatron/core/package_info.py"):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if (stock / path).exists():
            shutil.copy(stock / path, target / path)
    for info in stock.glob("megatron_core-*.dist-info"):
        shutil.copytree(info, target / info.name)


def python(code: str, cwd: Path, *paths: Path) -> str:
    """What `python -c code` prints in `cwd`, with `paths` and the project importable; fails with its traceback."""
    project = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, project])), "PYTHONDONTWRITEBYTECODE": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, timeout=300, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
