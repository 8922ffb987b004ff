"""Start the ranks of one machine, watch them, and tell of a failure once."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_stability.errors import EXIT_FINE, EXIT_HALTED, EXIT_REWIND, EXIT_UNUSABLE, UsageError

GRACE_S = 10.0  # how long the other ranks may take to end by themselves once one has failed
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TAIL = 60  # lines of the failing rank's standard error that are shown


class Ranks:
    """The ranks of one machine.

    Standard output is shared; each rank's standard error goes to a file, and of a failed run only the first failing
    rank's is shown: the others' say no more than that their peer went away.
    """

    def __init__(self, world: int, fork: bool) -> None:
        """`fork`: ranks inherit what this process has imported (CPU backend); else each is a fresh interpreter."""
        self._world, self._fork = world, fork
        self._context = mp.get_context("fork" if fork else "spawn")
        self._logs = tempfile.TemporaryDirectory(prefix="megatron-stability-")
        self._environment = rendezvous() | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._logs.cleanup()

    def ask_once(self, question: Callable[..., str | None], *arguments: Any) -> str | None:
        """The answer of a function that is run in a process of its own, so that what it changes stays there."""
        mine, theirs = self._context.Pipe(duplex=False)
        process: Any = self._context.Process(target=_answer, args=(theirs, question, arguments, self._fork))  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        try:
            kind, answer = mine.recv()
        except EOFError:
            raise RuntimeError(f"the check of the arguments ended with exit code {process.exitcode}") from None
        finally:
            process.join()
        if kind == "error":
            raise RuntimeError(answer)
        return str(answer) if answer is not None else None

    def run(self, target: Callable[[Any, bool], None], job: Any) -> int:
        """Run `target(job, prepared)` on every rank.

        Args:
            target: a module-level function.
            job: its picklable argument.

        Returns:
            0, or the exit code of the first rank that failed.
        """
        os.environ.update(self._environment)
        processes: list[Any] = []
        for rank in range(self._world):
            process: Any = self._context.Process(  # type: ignore[attr-defined]
                target=_rank, args=(rank, target, job, self._fork, self._log(rank), os.getpid()), name=f"rank-{rank}"
            )
            process.start()
            processes.append(process)
        try:
            return self._watch(processes)
        finally:
            for process in processes:
                if process.is_alive():
                    _kill_with_children(process)
                process.join()

    def _watch(self, processes: list[Any]) -> int:
        pending = dict(enumerate(processes))
        while pending:
            wait([process.sentinel for process in pending.values()])
            for rank, process in list(pending.items()):
                if process.exitcode is None:
                    continue
                del pending[rank]
                if process.exitcode != EXIT_FINE:
                    _let_end(list(pending.values()))
                    speaker = 0 if processes[0].exitcode == process.exitcode else rank  # what all know, rank 0 says
                    self._tell(speaker, process.exitcode)
                    return int(process.exitcode) if process.exitcode > 0 else 128 - int(process.exitcode)
        return EXIT_FINE

    def _tell(self, rank: int, code: int) -> None:
        if code in (EXIT_UNUSABLE, EXIT_HALTED, EXIT_REWIND):
            sys.stderr.write(without_usage(self._log(rank).read_text(errors="replace")))
            return
        lines = self._log(rank).read_text(errors="replace").splitlines()
        print(f"megatron-stability: rank {rank} failed first, with exit code {code}; it said:", file=sys.stderr)
        print("\n".join(lines[-TAIL:]), file=sys.stderr)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank-{rank}.err"


def without_usage(said: str) -> str:
    """What a script said, without argparse's usage: of Megatron's flags it is a thousand lines before the error."""
    return re.sub(r"^usage: .*?\n(?=\S[^\n]*: error: )", "", said, flags=re.MULTILINE | re.DOTALL)


def _let_end(processes: list[Any]) -> None:
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _kill_with_children(process: Any) -> None:
    """SIGKILL lets a rank end nothing of its own; a writer of its checkpoints would wait for it for ever."""
    pids = [process.pid, *_descendants(process.pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in map(int, listed.read_text().split()):
                yield from (child, *_descendants(child))


def _end_with(launcher: int) -> None:
    """Let a launcher that is killed, by SIGKILL too, take its ranks along; they get SIGTERM."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _rank(rank: int, target: Callable[[Any, bool], None], job: Any, prepared: bool, log: Path, launcher: int) -> None:
    error = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    sys.stderr.flush()
    os.dup2(error, 2)
    _end_with(launcher)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    target(job, prepared)


def _answer(pipe: Any, question: Callable[..., str | None], arguments: tuple[Any, ...], prepared: bool) -> None:
    try:
        pipe.send(("answer", question(*arguments, prepared=prepared)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def rendezvous() -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT: the environment's, if free, else loopback and a free port."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    text = os.environ.get("MASTER_PORT", "0")
    if not (text.isdecimal() and int(text) < 2**16):
        raise UsageError(f"MASTER_PORT={text} is not a port; unset it, or give a number below 65536")
    port = int(text)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UsageError(
                f"MASTER_PORT={port} on {address} can't be used ({error.strerror}); unset it, or choose a free port"
            ) from None
        return {"MASTER_ADDR": address, "MASTER_PORT": str(probe.getsockname()[1])}
