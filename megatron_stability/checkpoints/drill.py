"""Checkpoint drills: each hurts a copy of a real checkpoint, and says whether what should happen did."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_stability import files
from megatron_stability.checkpoints import generations, manifest
from megatron_stability.checkpoints.generations import TRACKER, Generation
from megatron_stability.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One drill. `expected` and `got` are what a resume would use, or that it stops."""

    drill: str
    expected: str
    got: str
    passed: bool
    detail: str = ""


def link_copy(source: Path, target: Path) -> None:
    """A copy by hard links, or by bytes where the file system has none: to be read, and changed by `replace` only."""
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
            continue
        files.refuse_special(path, path.stat())  # a copy of a FIFO would wait for its writer
        try:
            os.link(path.resolve(), place)
        except OSError:
            shutil.copy2(path, place)


def replace(path: Path, data: bytes) -> None:
    """New bytes under a name, never through a hard link."""
    path.unlink(missing_ok=True)
    with files.open_new(path) as stream:
        stream.write(data)


# --- what is done to a copy; each returns the name of the file to blame, or "" ----------------------------------------


def _shard(folder: Path) -> Path:
    """The largest of Megatron's files."""
    return max((folder / name for name in manifest.file_names(folder)), key=lambda path: path.stat().st_size)


def _corrupt(folder: Path) -> str:
    path = _shard(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    replace(path, bytes(data))
    return path.relative_to(folder).as_posix()


def _missing(folder: Path) -> str:
    path = _shard(folder)
    path.unlink()
    return path.relative_to(folder).as_posix()


def _truncated(folder: Path) -> str:
    path = _shard(folder)
    replace(path, path.read_bytes()[: path.stat().st_size // 2])
    return path.relative_to(folder).as_posix()


def _unfinished(folder: Path) -> str:
    (folder / manifest.MARKER).unlink()
    return manifest.MARKER


def _suspect(folder: Path) -> str:
    generations.mark_suspect(folder, "drill")
    return ""


DAMAGES: dict[str, Callable[[Path], str]] = {
    "corrupt shard": _corrupt,
    "missing shard": _missing,
    "truncated file": _truncated,
    "unfinished save": _unfinished,
    "rewind past a suspect": _suspect,
}


def file_drills(root: Path, work: Path) -> Iterator[Outcome]:
    """Every drill that needs no run: damage to the newest generation, and bad trackers.

    Args:
        root: the folder with the generations; it is only read.
        work: an empty folder on the same file system, best.

    Yields:
        One outcome a drill.

    Raises:
        UsageError: there is no good generation to begin with.
    """
    good = good_ones(root, 2)
    yield _judge("intact", _copy(good, work / "intact"), good[0].step, "")
    for name, damage in DAMAGES.items():
        copy = _copy(good, work / name.replace(" ", "-"))
        blamed = damage(copy / good[0].folder.name)
        yield _judge(name, copy, good[1].step if len(good) > 1 else None, blamed)
    for text in ("", "not a step", "999999999"):
        copy = _copy(good, work / f"tracker-{len(text)}")
        replace(copy / TRACKER, text.encode())
        _, now = generations.repair_tracker(copy)
        reads = generations.read_tracker(copy)
        yield Outcome(
            drill="bad tracker",
            expected=f"step {good[0].step}",
            got=f"step {now}",
            passed=now == good[0].step == reads,
            detail=f"the tracker said {text!r}",
        )


def good_ones(root: Path, count: int) -> list[Generation]:
    """The newest `count` complete and verified generations.

    Raises:
        UsageError: there is none.
    """
    found: list[Generation] = []
    for each in generations.candidates(root):
        if len(found) < count and generations.generation(each.folder, full=True).state == "complete":
            found.append(each)
    if not found:
        raise UsageError(f"{root}: holds no complete, verified checkpoint to drill with")
    return found


def _copy(good: Sequence[Generation], target: Path) -> Path:
    for each in good:
        link_copy(each.folder, target / each.folder.name)
        if manifest.check(target / each.folder.name)[1]:
            raise UsageError(f"{each.folder}: was deleted while it was copied; drill where no run saves")
    generations.write_tracker(target, good[0].step)
    return target


def _judge(name: str, copy: Path, expected: int | None, blamed: str) -> Outcome:
    newest = generations.generations(copy, full=True)[0]
    chosen = generations.newest_good(copy)
    got = chosen.step if chosen is not None else None
    named = not blamed or any(problem.file == blamed for problem in newest.problems)
    return Outcome(
        drill=name,
        expected=_resume_from(expected),
        got=_resume_from(got),
        passed=got == expected and named,
        detail=str(newest) if newest.state != "complete" else "",
    )


def _resume_from(step: int | None) -> str:
    return "stops" if step is None else f"step {step}"


# --- drills that train ------------------------------------------------------------------------------------------------


def resume_drill(root: Path, work: Path, command: Sequence[str], *, nproc: int | None, timeout_s: float) -> Outcome:
    """Resume from the second newest generation up to the newest, and compare the two.

    Args:
        root: the folder with the generations; it is only read.
        work: an empty folder.
        command: `pretrain ...` or `run ...` as the run was started, without `megatron-stability`.
        nproc: another number of ranks, or None: as in `command`.
        timeout_s: for the whole run.

    Returns:
        Equal to the bit with the same ranks; with others the same samples, and weights within `TOLERANCE`.
    """
    from megatron_stability.checkpoints import compare

    name = "same world size" if nproc is None else f"world size {nproc}"
    good = good_ones(root, 2)
    if len(good) < 2:
        return Outcome(drill=name, expected="two good generations", got="one", passed=False)
    newest, older = good
    shutil.copytree(older.folder, work / older.folder.name)
    generations.write_tracker(work, older.step)
    flags = ["--load", str(work), "--save", str(work), "--exit-interval", str(newest.step)]
    flags += ["--stability-record-dir", str(work / "stability")]
    ranks = [] if nproc is None else ["--nproc", str(nproc)]
    argv = [sys.executable, "-m", "megatron_stability.cli", *command, *ranks, *flags]
    expected = "equal to the bit" if nproc is None else f"same samples, weights within {compare.TOLERANCE}"
    with files.open_log(work / "log.txt") as log:
        try:
            done = subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
            failure = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"no end after {timeout_s:g} s"
    made = generations.folder_of(work, newest.step)
    if failure or not made.is_dir():
        tail = (work / "log.txt").read_text(errors="replace").strip().splitlines()[-1:]
        got = failure or "no checkpoint"
        return Outcome(drill=name, expected=expected, got=got, passed=False, detail="".join(tail))
    got, passed = compare.compare(newest.folder, made, bitwise=nproc is None)
    return Outcome(drill=name, expected=expected, got=got, passed=passed, detail=f"steps {older.step} to {newest.step}")
