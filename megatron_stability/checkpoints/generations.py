"""The checkpoints under one `--save` folder: which are good, which one to resume from, which may go.

Megatron names them `iter_0000100` and points at one with `latest_checkpointed_iteration.txt`. The pointer is a hint:
what can be loaded is what `manifest.verify` says of the folder, and what comes next is `lineage`'s to say.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from megatron_stability import files
from megatron_stability.checkpoints import asides, history
from megatron_stability.checkpoints import manifest as manifests
from megatron_stability.checkpoints.asides import ASIDE
from megatron_stability.checkpoints.lineage import Lineage, Place, Save
from megatron_stability.checkpoints.manifest import SUSPECT, THREADS, Manifest, OnBytes, Problem
from megatron_stability.echo import said
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import strict

TRACKER = "latest_checkpointed_iteration.txt"
TRACKERS = (TRACKER, "latest_train_state.pt")  # Megatron's, and Bridge's own
_FOLDER = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,})(\.suspect-[0-9]+|\.aside)?")

State = Literal["complete", "incomplete", "suspect", "corrupt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One checkpoint folder.

    complete: marker, manifest and sizes fit (and checksums, where `verified`). incomplete: no marker. suspect: whole,
    but marked as made by a run that had gone wrong, or left behind (`lineage`). corrupt: a file speaks against it.
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

    @property
    def place(self) -> Place | None:
        """Where it stands in the folder's history; None where its manifest can't be believed."""
        return None if self.manifest is None else Place(self.manifest.counter, self.manifest.step)


class Survey:
    """Every checkpoint folder under a root, with the history that says which of them survive.

    Attributes:
        found: newest first, by lineage.
        lineage: of those whose manifest can be believed.
    """

    def __init__(self, root: Path, *, full: bool = False, threads: int = THREADS, on_bytes: OnBytes | None = None):
        """Looks at each folder; arguments as `generation`."""
        looked = [_look(folder, full=full, threads=threads, on_bytes=on_bytes) for folder in _folders(root)]
        whole = {each.folder for each in looked if each.state == "complete"}
        self._here = {
            each.place: each
            for each in looked
            if each.place is not None
            and (each.folder.name == folder_of(root, each.step).name or _is_needed(each.folder, whole))
        }
        saves = [_save(each, self._here.get(each.place) is each) for each in looked if each.place is not None]
        self.lineage = Lineage(sorted(saves, key=lambda save: save.here), history.read(root))
        found = [self._judged(each) for each in looked]
        self.found = sorted(found, key=partial(_order, found), reverse=True)

    def _judged(self, each: Generation) -> Generation:
        if each.state != "complete" or each.place is None:
            return each
        here = self._here.get(each.place)
        if here is None or here.folder != each.folder:
            return replace(each, state="suspect", reason="its step was saved again")
        objection = self.lineage.objection(each.place)
        return each if objection is None else replace(each, state="suspect", reason=objection)

    def at(self, place: Place) -> Generation:
        """The generation at a place that `lineage` named."""
        return self._here[place]

    @property
    def candidates(self) -> list[Generation]:
        """Generations that may be resumed from, newest first, as far as marker, manifest and sizes say."""
        return [self._here[place] for place in self.lineage.candidates]


def _is_needed(folder: Path, whole: Collection[Path]) -> bool:
    """Whether it was set aside for a save that did not come to its end."""
    return folder.suffix == ASIDE and folder.with_suffix("") not in whole


def _save(each: Generation, here: bool) -> Save:
    manifest = each.manifest
    assert manifest is not None
    assert each.place is not None
    return Save(
        place=each.place,
        parent=manifest.parent,
        applied=manifest.step if manifest.applied is None else manifest.applied,
        withheld=manifest.withheld,
        here=here,
        sound=each.state == "complete",
    )


def _order(found: list[Generation], each: Generation) -> tuple[int, int, str]:
    """By lineage; what has no place in it stands by its step."""
    if each.place is not None:
        return (*each.place, each.folder.name)
    older = [other.place.counter for other in found if other.place is not None and other.step <= each.step]
    return max(older, default=0), each.step, each.folder.name


def is_folder_name(name: str) -> bool:
    """Whether a folder of this name is one checkpoint, of Megatron's or set aside."""
    return _FOLDER.fullmatch(name) is not None


def folder_of(root: Path, step: int) -> Path:
    """The folder of a step, as Megatron names it (`training/checkpointing.py get_checkpoint_name`)."""
    return root / f"iter_{step:07d}"


def generation(
    folder: Path, *, full: bool = False, threads: int = THREADS, on_bytes: OnBytes | None = None
) -> Generation:
    """The state of one folder, in the light of those beside it.

    Args:
        folder: named as Megatron names it.
        full: read and hash every byte, else marker, manifest and sizes.
        threads: as `manifest.verify`.
        on_bytes: as `manifest.verify`.

    Returns:
        What it is, with every problem.

    Raises:
        UsageError: the name is not a checkpoint folder's, or the history beside it can't be read.
    """
    found = _look(folder, full=full, threads=threads, on_bytes=on_bytes)
    return Survey(folder.parent)._judged(found)


def _look(folder: Path, *, full: bool, threads: int, on_bytes: OnBytes | None) -> Generation:
    """What the folder itself says."""
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
        return replace(found, state="corrupt", problems=(other,), manifest=None)
    if (folder / SUSPECT).exists() or (match[2] or ASIDE) != ASIDE:
        return replace(found, state="suspect", reason=_reason(folder))
    return found


def generations(
    root: Path, *, full: bool = False, threads: int = THREADS, on_bytes: OnBytes | None = None
) -> list[Generation]:
    """Every checkpoint folder under `root`, newest first; arguments as `generation`."""
    return Survey(root, full=full, threads=threads, on_bytes=on_bytes).found


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: (int(path.name[5:].partition(".")[0]), path.name), reverse=True)


def candidates(root: Path) -> list[Generation]:
    """Generations that may be resumed from, newest first, as far as marker, manifest and sizes say."""
    return Survey(root).candidates


def newest_good(root: Path, *, threads: int = THREADS, on_bytes: OnBytes | None = None) -> Generation | None:
    """The newest candidate whose every byte was verified; None where there is none."""
    for each in candidates(root):
        verified = _look(each.folder, full=True, threads=threads, on_bytes=on_bytes)
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
    known = history.read(root)
    if known.tracker not in ("unknown", good.step):
        history.write(root, known.model_copy(update={"tracker": good.step}))
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

    Newest is by lineage, and what is unproven does not count. The newest good generation always stays, whatever is
    newer; suspect, left behind and corrupt ones stay as evidence. What is older than every complete one may be whole,
    and saved before there were manifests; what is linked in lies elsewhere.

    Args:
        root: the folder with the generations.
        keep: complete, non-suspect generations kept, at least 1.

    Returns:
        The folders that went.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: the last known-good generation always stays")
    survey = Survey(root)
    good = survey.candidates
    if not good:
        return []
    stale = [each for each in survey.found if each.state == "incomplete" and good[-1].step < each.step < good[0].step]
    old = [survey.at(place) for place in survey.lineage.retired(keep)]
    gone = [each.folder for each in old + stale if not each.folder.is_symlink()]
    asides.delete(gone)
    return gone


def size_on_disk(folder: Path) -> int:
    """Bytes of every file below a folder, of which a run may be writing or deleting some."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.lstat().st_size if path.is_file() else 0
    return size
