"""Applies and reverts the patches in a Megatron tree on disk, all files or none.

Everything is planned in memory, then written to temporary files beside the targets, then moved over them. A target is
never edited in place: uv and conda hard-link the files of a wheel, and an edit would reach every environment and the
cache. A failure before or during the moves puts everything back. A kill between two moves leaves a half-applied tree:
`status` says so, `apply` refuses it, and `revert` undoes it exactly, since each file is still either stock or patched.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching.diff import read_text, to_bytes
from megatron_stability.megatron.patching.tree import State, Tree, read_tree

_NEW_FILE_MODE = 0o644
_PREFIX = ".megatron-stability-"
# PEP 552: the flags of a hash-based .pyc that Python trusts without a look at the source.
_UNCHECKED_HASH = (1).to_bytes(4, "little")
_NOTHING_CHANGED = (
    "nothing was changed; make the tree writable, or use `megatron-stability run`, which patches in memory."
)


@dataclass(frozen=True)
class Change:
    """One file to write; `text` None removes it."""

    path: Path
    text: str | None


def apply(root: Path, patches: Path | None = None) -> Tree:
    """Patches the tree below `root`; does nothing where it is patched already.

    Args:
        root: a clone's root or a site-packages folder.
        patches: the folder of patch folders; the project's own by default.

    Returns:
        The tree as it was found: its `state` tells whether there was anything to do.

    Raises:
        UsageError: the tree does not fit, is half-applied or can't be written; nothing was changed.
    """
    tree = read_tree(root, patches)
    if tree.state is State.HALF_APPLIED:
        raise UsageError(
            f"{root} is half-applied: {', '.join(tree.paths(applied=True))} patched, "
            f"{', '.join(tree.paths(applied=False))} not; nothing was changed; run "
            f"`megatron-stability patch revert --target {root}` first."
        )
    _write(tree, [Change(root / file.path, file.patched) for file in tree.files if not file.applied])
    return tree


def revert(root: Path, patches: Path | None = None) -> Tree:
    """Restores the stock bytes, of a half-applied tree too; does nothing where the tree is stock already.

    Arguments, result and errors as in `apply`.
    """
    tree = read_tree(root, patches)
    _write(tree, [Change(root / file.path, file.stock) for file in tree.files if file.applied])
    return tree


def _write(tree: Tree, changes: list[Change]) -> None:
    """Makes all changes or, on an OSError, none."""
    _refuse_read_only(changes)
    root, done = tree.root, list[Change]()
    try:
        _discard(_leftovers(tree))
        before = [Change(c.path, read_text(c.path) if c.path.exists() else None) for c in changes]
        staged = _stage(changes)
        try:
            _drop_trusted_caches(changes)
            for change, old in zip(changes, before, strict=True):
                _move(change, staged)
                done.append(old)
        finally:
            _discard(staged.values())
        _sync_folders({change.path.parent for change in changes})
    except OSError as error:
        _put_back(root, done)
        raise UsageError(f"{error.filename or root} can't be written: {error.strerror}; {_NOTHING_CHANGED}") from error


def _refuse_read_only(changes: list[Change]) -> None:
    """Refuses files and folders without write permission, and those marked read-only where the user is root."""
    for change in changes:
        for path in (change.path, change.path.parent):
            if path.exists() and not (os.access(path, os.W_OK) and path.stat().st_mode & 0o222):
                raise UsageError(f"{path} is read-only; {_NOTHING_CHANGED}")


def _put_back(root: Path, done: list[Change]) -> None:
    """Undoes the moves made before a failure."""
    try:
        staged = _stage(done)
        try:
            for change in reversed(done):
                _move(change, staged)
        finally:
            _discard(staged.values())
    except OSError as error:
        raise UsageError(
            f"{error.filename or root} can't be written: {error.strerror}; the tree is left half-applied: make it "
            f"writable and run `megatron-stability patch revert --target {root}`."
        ) from error


def _stage(changes: Iterable[Change]) -> dict[Path, Path]:
    """Writes each new text to a temporary file beside its target, with the target's mode and owner; target to file."""
    staged: dict[Path, Path] = {}
    try:
        for change in changes:
            if change.text is None:
                continue
            descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".tmp", dir=change.path.parent)
            staged[change.path] = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(to_bytes(change.text))
                file.flush()
                _copy_attributes(change.path, descriptor)
                os.fsync(descriptor)
    except BaseException:
        _discard(staged.values())
        raise
    return staged


def _copy_attributes(target: Path, descriptor: int) -> None:
    """Gives the temporary file the target's mode and owner, and a later mtime.

    A .pyc is stale when the mtime in whole seconds or the size of its source differs, so the mtime moves on by at least
    one second, however fast apply and revert follow each other.
    """
    mtime = time.time()
    if target.exists():
        old = target.stat()
        new = os.fstat(descriptor)
        if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
            os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, old.st_mode & 0o7777)  # after fchown, which clears mode bits
        mtime = max(mtime, float(int(old.st_mtime) + 1))
    else:
        os.fchmod(descriptor, _NEW_FILE_MODE)
    os.utime(descriptor, (mtime, mtime))


def _move(change: Change, staged: dict[Path, Path]) -> None:
    """Puts one staged file in place, or removes the target."""
    if change.text is None:
        change.path.unlink()
    else:
        os.replace(staged[change.path], change.path)


def _drop_trusted_caches(changes: Iterable[Change]) -> None:
    """Removes each .pyc that Python would run without a look at the changed source."""
    shrunk = set()
    for change in changes:
        for cache in (change.path.parent / "__pycache__").glob(f"{change.path.stem}.*.pyc"):
            with cache.open("rb") as file:
                unchecked = file.read(8)[4:] == _UNCHECKED_HASH
            if unchecked:
                cache.unlink()
                shrunk.add(cache.parent)
    _sync_folders(shrunk)  # before the sources change: a cache that came back would run the old one


def _discard(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _leftovers(tree: Tree) -> list[Path]:
    """Temporary files of an apply or revert that was killed."""
    folders = {(tree.root / file.path).parent for file in tree.files}
    return [file for folder in folders for file in folder.glob(f"{_PREFIX}*.tmp")]


def _sync_folders(folders: Iterable[Path]) -> None:
    """Makes moves and removals in them durable."""
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
