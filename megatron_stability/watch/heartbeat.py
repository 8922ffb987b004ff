"""That a node lives: one small file a node, replaced now and then by a thread of its first rank.

A thread, so that the file says that the process lives while a step hangs, and so that a file system that hangs or is
full costs training nothing. What the file says is `Beat`; `watch` tells from it who is silent.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_stability import files
from megatron_stability.ledger.entries import Said
from megatron_stability.records import Decision, StepRecord

FOLDER = "heartbeats"
SCHEMA = 1
LEAST_SECONDS = 10.0  # between two writes of a node
State = Literal["training", "ended", "failed"]


class Beat(BaseModel):
    """What a node's file says. `time` is Unix time by the node's own clock; `step` the last that ended there."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = SCHEMA
    node: Said
    rank: int
    pid: int
    step: int
    time: float
    state: State = "training"
    error: Said = ""  # the kind of exception that it failed with; its words may hold training text


class Heartbeat:
    """A `pipeline.Sink` that keeps this node's file fresh, from `begin` until `close`.

    Args:
        folder: of the ledger; the file lies in its subfolder `heartbeats`.
        rank: global, of this process.
        seconds: between two writes.
        node: its name; default: the host's.
    """

    def __init__(self, folder: Path, *, rank: int, seconds: float = LEAST_SECONDS, node: str | None = None) -> None:
        self._node = node or socket.gethostname()
        self._path = folder / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', self._node)}.json"
        self._rank, self._seconds = rank, seconds
        self._step = 0
        self._over = threading.Event()
        self._complained = False
        self._error = ""
        self._thread = threading.Thread(target=self._beat, name="stability-heartbeat", daemon=True)

    def begin(self) -> None:
        """Write the first beat soon, and go on."""
        self._thread.start()

    def write(self, record: StepRecord, decision: Decision) -> None:
        """Remember the step; the thread writes it."""
        self._step = record.step

    def close(self) -> None:
        """Say that the run ended here, and whether by an exception; waits a second at most, for a disk may hang."""
        self._error = _leaving_with()
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _beat(self) -> None:
        while True:
            over = self._over.is_set()
            self._write(("failed" if self._error else "ended") if over else "training")
            if over:
                return
            self._over.wait(self._seconds)

    def _write(self, state: State) -> None:
        now, pid = time.time(), os.getpid()
        who = {"node": self._node, "rank": self._rank, "pid": pid}
        beat = Beat.model_validate({**who, "step": self._step, "time": now, "state": state, "error": self._error})
        temporary = files.temporary_name(self._path.parent)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with files.open_new(temporary) as stream:  # not synced: a beat that a loss of power takes is old anyway
                    stream.write(beat.model_dump_json().encode())
                os.replace(temporary, self._path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:  # the watcher sees the silence; a run does not end for it
            if not self._complained:
                print(f"> megatron-stability: no heartbeat of {self._node}: {error}", flush=True)
            self._complained = True


def of_node(folder: Path, rank: int, local_rank: int, seconds: float) -> list[Heartbeat]:
    """The heartbeat of this node, begun, where this process is its first rank and one is wanted.

    Args:
        folder: of the ledger.
        rank: global.
        local_rank: as Megatron has it; the launcher's variable goes before.
        seconds: between two writes, raised to `LEAST_SECONDS`; 0: none is wanted.
    """
    if not seconds or _local_rank(local_rank) != 0:
        return []
    heart = Heartbeat(folder, rank=rank, seconds=max(seconds, LEAST_SECONDS))
    heart.begin()
    return [heart]


def _local_rank(said: int) -> int:
    """By torchrun's variable, Slurm's, or what Megatron was told."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or said)


def close(sinks: Iterable[object]) -> None:
    """Close the heartbeat among a run's sinks."""
    for sink in sinks:
        if isinstance(sink, Heartbeat):
            sink.close()


def _leaving_with() -> str:
    """What the process is leaving with, while it unwinds or at its exit; empty: in order."""
    error = sys.exception() or getattr(sys, "last_exc", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return (
        f"exit code {error.code}"
        if isinstance(error, SystemExit) and isinstance(error.code, int)
        else type(error).__name__
    )


def beats(folder: Path) -> Mapping[str, Beat]:
    """The nodes' last beats, by name; a file that is no beat is left out, as one that was never written.

    Args:
        folder: of the ledger.

    Raises:
        OSError: the folder is there and can't be listed.
    """
    found: dict[str, Beat] = {}
    try:
        names = sorted(name for name in os.listdir(folder / FOLDER) if name.endswith(".json"))
    except FileNotFoundError:
        return found
    for name in names:
        try:
            beat = Beat.model_validate_json(files.read_bytes(folder / FOLDER / name, files.SMALL))
        except (OSError, ValidationError):
            continue
        found[beat.node] = beat
    return found
