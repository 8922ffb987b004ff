"""A step that is saved again: what counted there is set aside, until the new one is complete or the save has failed.

iter_0000008.aside        complete, and put back where the save of iter_0000008 did not come to its end
iter_0000008.suspect-1    evidence, or what another trajectory had there: kept
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megatron_stability import files
from megatron_stability.checkpoints import manifest
from megatron_stability.checkpoints.manifest import MARKER, SUSPECT

ASIDE, _DELETED = ".aside", ".stability-deleted-"


def is_aside(name: str) -> bool:
    """Whether a folder of this name waits for the end of a save."""
    return name.endswith(ASIDE)


def is_kept(name: str) -> bool:
    """Whether a folder of this name was kept when its step was saved again."""
    return ".suspect-" in name


def keep_as_suspect(folder: Path) -> Path:
    """Move a folder to `NAME.suspect-N`: its step is saved again, and it is kept."""
    plain, number = folder.with_suffix(""), 1
    while (kept := plain.with_name(f"{plain.name}.suspect-{number}")).exists():
        number += 1
    folder.rename(kept)
    files.sync_folder(folder.parent)
    return kept


def set_aside(folder: Path) -> Path | None:
    """Before a folder is written anew: what counts there moves away.

    Args:
        folder: as Megatron names it.

    Returns:
        `NAME.suspect-N` for evidence, which is kept; `NAME.aside` for a complete checkpoint, until it is replaced or
        put back; None where nothing counts.
    """
    if (folder / SUSPECT).exists():
        return keep_as_suspect(folder)
    if not (folder / MARKER).exists():
        return None
    aside = folder.with_name(folder.name + ASIDE)
    if aside.exists():
        keep_as_suspect(aside)
    folder.rename(aside)
    files.sync_folder(folder.parent)
    return aside


def aside_of(folder: Path) -> Path | None:
    """What was set aside for a folder, if anything still is."""
    aside = folder.with_name(folder.name + ASIDE)
    return aside if aside.is_dir() else None


def put_back(root: Path) -> list[Path]:
    """What was set aside for saves that did not come to their end takes its place again; no save may be under way.

    Returns:
        The folders that are there again.
    """
    back = []
    for aside in sorted(root.glob(f"iter_*{ASIDE}")):
        folder = aside.with_suffix("")
        evidence = (folder / SUSPECT).exists()
        if folder.exists() and not evidence and not manifest.check(folder)[1]:
            keep_as_suspect(aside)
            continue
        if evidence or (folder / MARKER).exists():
            keep_as_suspect(folder)
        elif folder.exists():
            delete([folder])
        aside.rename(folder)
        back.append(folder)
    files.sync_folder(root)
    return back


def delete(folders: Collection[Path]) -> None:
    """Remove folders of one root; a half-deleted one is not taken for a checkpoint, and goes next time."""
    roots = {folder.parent for folder in folders}
    for root in roots:
        _sweep(root)
    for folder in folders:
        folder.rename(files.temporary_name(folder.parent, _DELETED))
    for root in roots:
        files.sync_folder(root)
        _sweep(root)


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_DELETED}*"):
        files.remove(folder)
