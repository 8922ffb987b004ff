"""A Megatron tree without diffs of its own: what its seams find there, file by file."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching.anchor.place import Placement, State
from megatron_stability.megatron.patching.anchor.seam_table import IMPORT_TEXT, NEW_FILE, NEW_TEXT, SEAMS
from megatron_stability.megatron.patching.anchor.splice import closed, opened
from megatron_stability.megatron.patching.diff import ContextError, parse_patch, read_text, to_bytes
from megatron_stability.megatron.patching.patch_set import PatchSet
from megatron_stability.megatron.patching.series import Placed, render

PATHS = tuple(dict.fromkeys(seam.path for seam in SEAMS))


@dataclass(frozen=True)
class FileState:
    """One target file: its stock text (None: absent), what the seams make of it (None: not all hold), and which it has.

    `problem` says why a file that is neither stock nor patched can't be used.
    """

    path: str
    stock: str | None
    patched: str | None
    applied: bool
    placements: tuple[Placement, ...] = ()
    problem: str = ""

    @property
    def holds(self) -> bool:
        """Whether the file can be patched, or is."""
        return self.patched is not None and not self.problem


def read_files(root: Path) -> tuple[FileState, ...]:
    """Looks for every seam in the files below `root`; never raises for what it finds there.

    Raises:
        UsageError: a file can't be read.
    """
    return tuple(_file(path, _text(root / path)) for path in (NEW_FILE, *PATHS))


def _text(file: Path) -> str | None:
    try:
        return read_text(file) if file.exists() else None
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}.") from error


@functools.lru_cache(maxsize=4 * len(PATHS))
def _file(path: str, text: str | None) -> FileState:
    """One file; a second question about the same bytes costs nothing."""
    if path == NEW_FILE:
        problem = "" if text in (None, NEW_TEXT) else f"{path} is there already, and is not the plugin's"
        return FileState(path, None, NEW_TEXT, text == NEW_TEXT, problem=problem)
    seams = [seam for seam in SEAMS if seam.path == path]
    if text is None:
        gone = tuple(Placement(seam, State.GONE, None, f"there is no {path}") for seam in seams)
        return FileState(path, None, None, False, gone)
    try:
        if IMPORT_TEXT.strip() in text:
            stock = closed(path, text, seams)
            return FileState(path, stock, text, True, opened(path, stock, seams)[0])
        placements, patched = opened(path, text, seams)
        return FileState(path, text, patched, False, placements)
    except ContextError as error:
        by_hand = " (patched by hand, or by another release)" if "megatron_stability" in text or "seams" in text else ""
        changed = tuple(Placement(seam, State.CHANGED, None, f"{error}{by_hand}") for seam in seams)
        return FileState(path, text, None, False, changed, problem=f"{error}{by_hand}")


def patch_set(files: tuple[FileState, ...], version: str, supported: tuple[str, ...]) -> PatchSet:
    """The series of diffs that opens the seams of these very files.

    Args:
        files: all of which hold.
        version: what the tree calls itself.
        supported: the releases that have diffs of their own, for errors.
    """
    label = f"{version} by anchor"
    placed = [Placed(file.path, file.stock, file.placements) for file in files if file.stock is not None]
    patches = tuple(parse_patch(text, f"{label}/{name}.patch") for name, text in render(placed).items())
    return PatchSet(label, patches, supported)


def refusal(files: tuple[FileState, ...]) -> str:
    """Which seams do not hold, and why: one line each."""
    problems = list(dict.fromkeys(file.problem for file in files if file.problem))
    of_seams = [p for file in files if not file.problem for p in file.placements if not p.holds]
    problems += [
        f"{p.seam.path}, {p.seam.name}: {p.reason}" + (f" (line {p.line})" if p.line else "") for p in of_seams
    ]
    return "; ".join(problems)


def stock_digest(files: dict[str, str | None]) -> str:
    """sha256, 12 digits of it, of the stock text of the target files."""
    content = b"".join(
        f"{path}\0{len(to_bytes(text))}\0".encode() + to_bytes(text) for path, text in sorted(files.items()) if text
    )
    return hashlib.sha256(content).hexdigest()[:12]
