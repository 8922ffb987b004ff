"""The checkpoints under one `--save` folder: which are good, which one to resume from, which may go.

Megatron names them `iter_0000100` and points at one with `latest_checkpointed_iteration.txt`. The pointer is a hint:
what can be loaded is what `manifest.verify` says of the folder.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_stability import files
from megatron_stability.checkpoints import manifest as manifests
from megatron_stability.checkpoints.manifest import SUSPECT, THREADS, Manifest, OnBytes, Problem
from megatron_stability.echo import said
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import strict

TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,})(\.suspect-[0-9]+)?")  # other zeros Megatron would not find
_DELETED = ".stability-deleted-"

State = Literal["complete", "incomplete", "suspect", "corrupt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One checkpoint folder.

    complete: marker, manifest and sizes fit (and checksums, where `verified`). incomplete: no marker. suspect: whole,
    but marked as made by a run that had gone wrong. corrupt: a file speaks against it.
    """

    folder: Path
    step: int
    state: State
    problems: tuple[Problem, ...] = ()
    manifest: Manifest | None = None
    reason: str = ""  # why it is suspect
    verified: bool = False  # every byte was read

    def __str__(self) -> str:
        why = f": {self.problems[0]}" if self.problems else f": {self.reason}" if self.reason else ""
        return f"{self.folder.name} is {self.state}{why}"


def is_folder_name(name: str) -> bool:
    """Whether a folder of this name is one checkpoint, of Megatron's or set aside by `set_aside`."""
    return _FOLDER.fullmatch(name) is not None


def folder_of(root: Path, step: int) -> Path:
    """The folder of a step, as Megatron names it (`training/checkpointing.py get_checkpoint_name`)."""
    return root / f"iter_{step:07d}"


def generation(
    folder: Path, *, full: bool = False, threads: int = THREADS, on_bytes: OnBytes | None = None
) -> Generation:
    """The state of one folder.

    Args:
        folder: named as Megatron names it.
        full: read and hash every byte, else marker, manifest and sizes.
        threads: as `manifest.verify`.
        on_bytes: as `manifest.verify`.

    Returns:
        What it is, with every problem.

    Raises:
        UsageError: the name is not a checkpoint folder's.
    """
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise UsageError(
            f"{folder}: is not a checkpoint folder (iter_0000100); name one, or the folder that holds them"
        )
    manifest, problems = manifests.check(folder)
    if full and manifest is not None and not problems:
        problems = manifests.verify(folder, threads=threads, on_bytes=on_bytes)
    found = Generation(
        folder=folder,
        step=int(match[1]),
        state="complete",
        problems=tuple(problems),
        manifest=manifest,
        verified=full and manifest is not None,
    )
    if any(problem.kind == "incomplete" for problem in problems):
        return replace(found, state="incomplete")
    if problems:
        return replace(found, state="corrupt")
    if manifest is not None and manifest.step != found.step:
        other = Problem("schema", manifests.MANIFEST, f"is of step {manifest.step}: the folder was renamed or swapped")
        return replace(found, state="corrupt", problems=(other,))
    if (folder / SUSPECT).exists() or match[2]:
        return replace(found, state="suspect", reason=_reason(folder))
    return found


def generations(
    root: Path, *, full: bool = False, threads: int = THREADS, on_bytes: OnBytes | None = None
) -> list[Generation]:
    """Every checkpoint folder under `root`, newest first; arguments as `generation`."""
    return [generation(folder, full=full, threads=threads, on_bytes=on_bytes) for folder in _folders(root)]


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: (int(path.name[5:].partition(".")[0]), path.name), reverse=True)


def candidates(root: Path) -> Iterator[Generation]:
    """Generations that may be resumed from, newest first, as far as marker, manifest and sizes say."""
    return (each for each in generations(root) if each.state == "complete")


def newest_good(root: Path, *, threads: int = THREADS, on_bytes: OnBytes | None = None) -> Generation | None:
    """The newest complete, non-suspect generation whose every byte was verified; None where there is none."""
    for each in candidates(root):
        verified = generation(each.folder, full=True, threads=threads, on_bytes=on_bytes)
        if verified.state == "complete":
            return verified
    return None


# --- suspects ---------------------------------------------------------------------------------------------------------


def mark_suspect(folder: Path, reason: str) -> None:
    """Keep a generation as evidence and out of every resume.

    Args:
        folder: the checkpoint's.
        reason: one sentence.
    """
    files.write_atomically(folder / SUSPECT, json.dumps(strict({"reason": reason})).encode())


def _reason(folder: Path) -> str:
    try:
        reason = files.read_json(folder / SUSPECT, files.SMALL)["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        reason = None
    return said(reason) if isinstance(reason, str) else "marked so, without a reason that can be read"


def set_aside(folder: Path) -> Path | None:
    """Before a folder is written anew: what is there and suspect moves to `NAME.suspect-N`, so that it is kept."""
    if not (folder / SUSPECT).exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.suspect-{number}")).exists():
        number += 1
    folder.rename(aside)
    files.sync_folder(folder.parent)
    return aside


# --- the tracker ------------------------------------------------------------------------------------------------------


def read_tracker(root: Path) -> int | Literal["release"] | None:
    """The step that the tracker names; None where it is missing or says nothing that Megatron could read."""
    try:
        text = files.read_bytes(root / TRACKER, files.SMALL).decode().strip()
        if text == "release":
            return "release"
        return int(text) if text.isdecimal() else None
    except (OSError, ValueError):  # no file, no text, or more digits than Python reads
        return None


def write_tracker(root: Path, step: int) -> None:
    """Point Megatron at a step, atomically."""
    files.write_atomically(root / TRACKER, str(step).encode())


def repair_tracker(root: Path, *, threads: int = THREADS, on_bytes: OnBytes | None = None) -> tuple[str, int]:
    """Let the tracker name the newest good generation.

    Args:
        root: the folder with the generations.
        threads: as `manifest.verify`.
        on_bytes: as `manifest.verify`.

    Returns:
        The tracker's text before ("" where it was missing), and the step it names now.

    Raises:
        UsageError: there is no good generation; the tracker is left as it was.
    """
    good = newest_good(root, threads=threads, on_bytes=on_bytes)
    if good is None:
        raise UsageError(f"{root}: holds no complete, verified checkpoint to point at{_why_none(root)}")
    before = _tracker_text(root)
    if before != str(good.step):
        write_tracker(root, good.step)
    return before, good.step


def _tracker_text(root: Path) -> str:
    try:
        return said(files.read_bytes(root / TRACKER, files.SMALL).decode(errors="replace").strip())
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)


def _why_none(root: Path) -> str:
    found = generations(root)
    return f"; {found[0]}" if found else f"; name the folder that holds iter_* and {TRACKER}"


# --- retention --------------------------------------------------------------------------------------------------------


def retire(root: Path, keep: int) -> list[Path]:
    """Delete old generations: complete ones beyond the newest `keep`, and incomplete ones between two complete ones.

    The newest good generation always stays, whatever is newer; suspect and corrupt ones stay as evidence. What is older
    than every complete one may be whole, and saved before there were manifests; what is linked in lies elsewhere.

    Args:
        root: the folder with the generations.
        keep: complete, non-suspect generations kept, at least 1.

    Returns:
        The folders that went.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: the last known-good generation always stays")
    found = generations(root)
    good = [each for each in found if each.state == "complete"]
    if not good:
        return []
    stale = [each for each in found if each.state == "incomplete" and good[-1].step < each.step < good[0].step]
    gone = [each.folder for each in good[keep:] + stale if not each.folder.is_symlink()]
    _sweep(root)
    for folder in gone:  # a half-deleted folder is not taken for a checkpoint, and goes next time
        folder.rename(files.temporary_name(root, _DELETED))
    files.sync_folder(root)
    _sweep(root)
    return gone


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_DELETED}*"):
        files.remove(folder)


def size_on_disk(folder: Path) -> int:
    """Bytes of every file below a folder, of which a run may be writing or deleting some."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.lstat().st_size if path.is_file() else 0
    return size
