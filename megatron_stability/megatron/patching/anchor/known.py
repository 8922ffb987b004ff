"""Where the seams stand in the releases that have diffs, to compare an unknown tree with."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from megatron_stability.megatron.patching.anchor.place import Placement
from megatron_stability.megatron.patching.anchor.source import Source
from megatron_stability.megatron.patching.patch_set import patches_root, supported_versions
from megatron_stability.megatron.patching.series import Placed

_FILE = "seams.json"


@dataclass(frozen=True)
class Known:
    """One seam in a release: its line there, and a digest of the function around it ("" for the module)."""

    line: int | None
    function: str


def known_json(files: Iterable[Placed]) -> str:
    """The text of a release's `seams.json`."""
    rows = {
        p.seam.name: {"line": p.line, "function": function_digest(file.path, file.stock, p)}
        for file in files
        for p in file.placements
    }
    return json.dumps(rows, indent=1) + "\n"


def nearest_release(version: str) -> str:
    """The release with diffs that is nearest: of the same minor release, else the newest before it, else the oldest."""
    supported, asked = supported_versions(), Version(version)
    same = [release for release in supported if Version(release).release[:2] == asked.release[:2]]
    older = [release for release in supported if Version(release) <= asked]
    return (same or older or [supported[0]])[-1]


def known_seams(release: str, patches: Path | None = None) -> dict[str, Known]:
    """Every seam of a release, by its name."""
    rows = json.loads(((patches or patches_root()) / release / _FILE).read_text(encoding="utf-8"))
    return {name: Known(row["line"], row["function"]) for name, row in rows.items()}


def function_digest(path: str, stock: str, placement: Placement) -> str:
    """A digest of the function that a seam stands in, by its syntax tree; "" where there is none."""
    return _digests(path, stock).get(placement.seam.function, "")


@functools.lru_cache(maxsize=16)
def _digests(path: str, stock: str) -> dict[str, str]:
    return {
        name: hashlib.sha256("".join(ast.dump(s.node) for s in scopes if s.node).encode()).hexdigest()[:12]
        for name, scopes in Source(path, stock).scopes.items()
        if name
    }
