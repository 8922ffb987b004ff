"""The ledger: one append-only file, `ledger.jsonl`, that says what became of every step, and so of every sample.

A line goes out in one `write` to an O_APPEND descriptor, so a kill -9 leaves whole lines; a host that loses power may
tear the last one, which its checksum shows. A torn last line is trimmed at the next open; damage anywhere else is an
error. One process writes (the caller opens the ledger on one rank); anyone may read at any moment (`entries.read`).
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_stability import files
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import (
    FILE,
    SCHEMA,
    AnyEntry,
    AttentionEntry,
    EndEntry,
    EpisodeEntry,
    LedgerView,
    RunEntry,
    SaveEntry,
    UndoEntry,
    line_of,
    parse,
    read,
    step_entry,
)
from megatron_stability.records import AttentionTable, Change, Decision, Episode, StepRecord

__all__ = ["Ledger", "LedgerView", "RunInfo", "read"]

LOCK = "ledger.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a `run` line says of the process, beyond where it resumed."""

    mode: str
    versions: Mapping[str, str]
    layout: Mapping[str, int]  # tensor_model_parallel_size, pipeline_model_parallel_size, ...
    data: Mapping[str, str] = field(default_factory=dict)  # seed, data files, ...
    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON values; those at their defaults may be left out


class Ledger:
    """The one writer of a folder's ledger; a `pipeline.Sink`. Made by `open`, and closed by `close` or `with`.

    Its `generation` is the present one; `open` and `rewind` begin a new one.

    Args:
        path: the ledger's file.
        lock: an open descriptor that holds the folder's lock; the object owns it from here on.
        file: an open O_APPEND descriptor of the file; likewise.
    """

    def __init__(self, path: Path, lock: int, file: int) -> None:
        self._path, self._lock, self._file, self._size = path, lock, file, 0
        self.generation = 0
        # A forked data-loader worker must neither write here nor hold the lock after its parent was killed.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(reference()))

    @classmethod
    def open(cls, folder: str | Path, *, resume_step: int, resume_sample: int, run_info: RunInfo) -> Ledger:
        """Open or create the ledger and begin a new generation.

        Steps after `resume_step` that an earlier generation left are marked undone before the `run` line is written.

        Args:
            folder: made if missing.
            resume_step: the last step the loaded checkpoint contains; 0 from the start.
            resume_sample: the sample index at which training goes on (`consumed_train_samples`).
            run_info: the mode, versions and layout of this run.

        Returns:
            The open ledger.

        Raises:
            UsageError: the folder can't be written, another process writes there, or a line is damaged.
        """
        path = Path(folder) / FILE
        lock = _open(path.with_name(LOCK), 0)
        try:
            _take(lock, path)
            file = _open(path, os.O_APPEND)
        except BaseException:
            os.close(lock)
            raise
        ledger = cls(path, lock, file)
        try:
            ledger._begin(resume_step, resume_sample, run_info)
        except BaseException:
            _close(ledger)
            raise
        return ledger

    def _begin(self, resume_step: int, resume_sample: int, info: RunInfo) -> None:
        data = _read_all(self._file)
        entries, self._size = parse(data, self._path)
        trimmed = len(data) - self._size
        os.ftruncate(self._file, self._size)
        if self._size and data[self._size - 1 : self._size] != b"\n":
            self._append(b"\n")  # torn just before its end: the line itself is whole
        view = LedgerView(entries)
        self.generation = view.generation + 1
        if any(step.step > resume_step for step in view.surviving):
            self._undo(resume_step, resume_sample, "resume")
        self._write(
            RunEntry(
                generation=self.generation,
                schema_version=SCHEMA,
                resumed_step=resume_step,
                resumed_sample=resume_sample,
                mode=info.mode,
                versions=dict(info.versions),
                layout=dict(info.layout),
                data=dict(info.data),
                settings=dict(info.settings),
                trimmed_bytes=trimmed,
            )
        )
        self.flush()
        files.sync_folder(self._path.parent)

    def write(self, record: StepRecord, decision: Decision) -> None:
        """Append one finished step; on stable storage before it returns unless the step was a plain APPLY.

        Args:
            record: the step as all ranks saw it.
            decision: what was done with it.

        Raises:
            UsageError: the line could not be written in full; the file is left with whole lines.
        """
        entry = step_entry(record, decision, self.generation)
        self._write(entry)
        if entry.eventful:
            self.flush()

    def write_attention(self, table: AttentionTable) -> None:
        """Append a table of all layers and heads."""
        self._write(AttentionEntry(generation=self.generation, **dataclasses.asdict(table)))

    def write_episode(self, change: Change, episode: Episode) -> None:
        """Append what became of an episode."""
        self._write(EpisodeEntry(generation=self.generation, change=change, **dataclasses.asdict(episode)))

    def saving(self, step: int) -> None:
        """Note that a checkpoint of `step` is about to be written, and put everything on stable storage."""
        self._write(SaveEntry(generation=self.generation, step=step))
        self.flush()

    def ending(self, step: int, code: int, reason: str) -> None:
        """Note that the process is about to leave with this exit code, and why, in one sentence."""
        self._write(EndEntry(generation=self.generation, step=step, code=code, reason=reason))
        self.flush()

    def rewind(self, to_step: int, to_sample: int, reason: str) -> None:
        """Mark every step after `to_step` undone and begin a new generation, within this process.

        Args:
            to_step: the last step that stands.
            to_sample: the sample index at which training goes on.
            reason: one sentence.
        """
        self.generation += 1
        self._undo(to_step, to_sample, reason)
        self.flush()

    def flush(self) -> None:
        """Put everything on stable storage; called before a checkpoint counts as complete."""
        os.fsync(self._file)

    def close(self) -> None:
        """Flush and give the folder free for another writer."""
        if self._file >= 0:
            self.flush()
            _close(self)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _undo(self, step: int, sample: int, reason: str) -> None:
        self._write(UndoEntry(generation=self.generation, from_step=step, from_sample=sample, reason=reason))

    def _write(self, entry: AnyEntry) -> None:
        self._append(line_of(entry.model_copy(update={"time": round(time.time(), 3)})))

    def _append(self, line: bytes) -> None:
        if self._file < 0:
            raise UsageError(f"{self._path}: this process closed the ledger; open it again to write")
        try:
            written = os.write(self._file, line)
            problem = "" if written == len(line) else f"only {written} of {len(line)} bytes were taken"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            os.ftruncate(self._file, self._size)
            raise UsageError(f"{self._path}: a line could not be written ({problem}); free space on that file system")
        self._size += len(line)


def _open(path: Path, flags: int) -> int:
    """A regular file in an existing or new folder; a symbolic link is refused, so nothing lands elsewhere."""
    try:
        files.make_folder(path.parent)
        return files.open_own(path, os.O_RDWR | flags)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be opened for writing ({error.strerror}); give a writable --stability-record-dir"
        ) from None


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 256, 0).decode(errors="replace").strip() or "an unknown process"
        raise UsageError(
            f"{path}: is being written by {owner}; stop that run or give another --stability-record-dir"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path}: can't be locked ({error.strerror}); give a --stability-record-dir on a file system with locks"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _read_all(file: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as stream:
        stream.seek(0)
        return stream.read()


def _close(ledger: Ledger | None) -> None:
    """Close a ledger's descriptors without a word to the file; in a forked child the parent's lock stands."""
    if ledger is not None and ledger._file >= 0:
        os.close(ledger._file)
        os.close(ledger._lock)
        ledger._file = ledger._lock = -1
