"""A row a seam for any Megatron tree: what `patch check` prints, whether the tree can be patched or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_stability.megatron.patching.adapter.needs import Missing, missing_needs
from megatron_stability.megatron.patching.anchor import by_anchor
from megatron_stability.megatron.patching.anchor.by_anchor import FileState
from megatron_stability.megatron.patching.anchor.known import Known, function_digest, known_seams, nearest_release
from megatron_stability.megatron.patching.anchor.place import Placement, State
from megatron_stability.megatron.patching.anchor.seam_table import NEW_FILE
from megatron_stability.megatron.patching.diff import to_bytes
from megatron_stability.megatron.patching.series import Placed, render
from megatron_stability.megatron.patching.tree import detect_version


@dataclass(frozen=True)
class Row:
    """One seam in a tree.

    `state` is "fits", "moved by N lines", "changed", "gone" or "not needed"; `function_changed` says that the function
    around it is not the known release's; `there` is the line of source that stands at its place, "" where none does.
    """

    seam: str
    patch: int
    file: str
    function: str
    state: str
    line: int | None
    reason: str
    there: str
    function_changed: bool

    @property
    def holds(self) -> bool:
        """Whether the seam is no obstacle."""
        return self.state not in (State.CHANGED, State.GONE)


@dataclass(frozen=True)
class Survey:
    """What every seam, and every name that the adapter reads, finds in a tree.

    `compared_with` is the release whose lines and functions the rows are compared with.
    """

    root: Path
    version: str
    digest: str
    compared_with: str
    rows: tuple[Row, ...]
    missing: tuple[Missing, ...]
    diffs: dict[str, str]

    @property
    def holds(self) -> bool:
        """Whether the tree can be patched and everything that the adapter reads is there."""
        return all(row.holds for row in self.rows) and not self.missing

    def as_json(self) -> dict[str, Any]:
        """The survey without the diffs."""
        return {
            "target": str(self.root),
            "megatron_core": self.version,
            "tree_digest": self.digest,
            "compared_with": self.compared_with,
            "seams": [asdict(row) for row in self.rows],
            "missing": [asdict(need) for need in self.missing],
        }


def survey(root: Path) -> Survey:
    """Looks for every seam and every need in a tree; writes nothing.

    Args:
        root: a clone's root or a site-packages folder, stock, patched or half-applied.

    Raises:
        UsageError: there is no Megatron, or a file can't be read.
    """
    version, _ = detect_version(root)
    release = nearest_release(version)
    known, files = known_seams(release), by_anchor.read_files(root)
    rows = tuple(row for file in files for row in _rows(file, known))
    diffs = {}
    if all(file.holds for file in files):
        diffs = render([Placed(f.path, f.stock, f.placements) for f in files if f.stock is not None])
    digest = by_anchor.stock_digest({file.path: file.stock for file in files})
    return Survey(root, version, digest, release, rows, missing_needs(root), diffs)


def _rows(file: FileState, known: dict[str, Known]) -> Iterator[Row]:
    if file.path == NEW_FILE:
        state = State.CHANGED if file.problem else "fits"
        yield Row("seam module", 1, file.path, "", state, None, file.problem, "", False)
        return
    lines = to_bytes(file.stock or "").split(b"\n")
    for placement in file.placements:
        seam, reference = placement.seam, known.get(placement.seam.name)
        digest = function_digest(file.path, file.stock, placement) if file.stock and not file.problem else ""
        there = lines[placement.line - 1].decode("utf-8", "replace").strip() if placement.line else ""
        changed = bool(digest and reference and reference.function not in ("", digest))
        where = (seam.name, seam.patch, seam.path, seam.function)
        yield Row(*where, _state(placement, reference), placement.line, placement.reason, there, changed)


def _state(placement: Placement, reference: Known | None) -> str:
    if placement.state is not State.PLACED:
        return str(placement.state)
    by = (placement.line or 0) - (reference.line or 0) if reference and reference.line else 0
    return f"moved by {by:+d} lines" if by else "fits"
