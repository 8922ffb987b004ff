"""Start the ranks of one machine, watch them, and tell of a failure once."""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_stability.errors import EXIT_FINE, EXIT_HALTED, EXIT_REWIND, EXIT_UNUSABLE, UsageError
from megatron_stability.megatron.access import processes

AGAIN = (  # a rewind that no supervisor carries out
    f"exit code {EXIT_REWIND}: the policy rewinds; start the same command again, a recipe's with --supervise N, which "
    "goes back by itself (docs/rewind.md, docs/bridge.md)"
)
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
        with processes.orphans_end_here() as end_orphans:
            ranks = [self._start(rank, target, job) for rank in range(self._world)]
            try:
                with processes.passes_signals_on(lambda: _pids(ranks)):
                    return self._watch(ranks, end_orphans)
            finally:
                for rank in ranks:
                    if rank.is_alive():
                        processes.kill_with_descendants(rank.pid)
                    rank.join()

    def _start(self, rank: int, target: Callable[[Any, bool], None], job: Any) -> Any:
        process: Any = self._context.Process(  # type: ignore[attr-defined]
            target=_rank, args=(rank, target, job, self._fork, self._log(rank), os.getpid()), name=f"rank-{rank}"
        )
        process.start()
        return process

    def _watch(self, ranks: list[Any], end_orphans: Callable[[Collection[int]], None]) -> int:
        """Not by `Process.sentinel`: that is a pipe which a killed rank's own children hold open."""
        pending = dict(enumerate(ranks))
        while pending:
            time.sleep(processes.POLL_S)
            for rank, process in list(pending.items()):
                if process.exitcode is None:
                    continue
                del pending[rank]
                if process.exitcode != EXIT_FINE:
                    end_orphans(_pids(ranks))
                    _let_end(ranks)
                    speaker = 0 if ranks[0].exitcode == process.exitcode else rank  # what all know, rank 0 says
                    self._tell(speaker, process.exitcode)
                    return int(process.exitcode) if process.exitcode > 0 else 128 - int(process.exitcode)
        return EXIT_FINE

    def _tell(self, rank: int, code: int) -> None:
        if code in (EXIT_UNUSABLE, EXIT_HALTED, EXIT_REWIND):
            sys.stderr.write(sentence_last(without_usage(self._log(rank).read_text(errors="replace"))))
            if code == EXIT_REWIND:
                print(f"megatron-stability: {AGAIN}", file=sys.stderr)
            return
        lines = self._log(rank).read_text(errors="replace").splitlines()
        print(f"megatron-stability: rank {rank} failed first, with exit code {code}; it said:", file=sys.stderr)
        print("\n".join(lines[-TAIL:]), file=sys.stderr)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank-{rank}.err"


def without_usage(said: str) -> str:
    """What a script said, without argparse's usage: of Megatron's flags it is a thousand lines before the error."""
    kept: list[str] = []
    usage: int | None = None  # where it begins
    for line in io.StringIO(said, newline="\n"):
        if usage is None and line.startswith("usage: "):
            usage = len(kept)
        elif usage is not None and not line[0].isspace() and ": error: " in line[1:]:
            del kept[usage:]
            usage = None
        kept.append(line)
    return "".join(kept)


def sentence_last(said: str) -> str:
    """What a rank said, with our last sentence once more at its end where something else came after it.

    Tracebacks of the host's clean-up follow the reason by dozens of lines; the reason is the last word on the screen.
    """
    lines = said.rstrip("\n").split("\n")
    ours = [line for line in lines if line.startswith("megatron-stability") and ": " in line]
    if not ours or lines[-1] == ours[-1]:
        return said
    return said.rstrip("\n") + f"\n\n{ours[-1]}\n"


def _let_end(ranks: list[Any]) -> None:
    deadline = time.monotonic() + processes.GRACE_S
    while _pids(ranks) and time.monotonic() < deadline:
        time.sleep(processes.POLL_S)


def _pids(ranks: list[Any]) -> list[int]:
    """Of those that have not ended."""
    return [rank.pid for rank in ranks if rank.exitcode is None]


def _rank(rank: int, target: Callable[[Any, bool], None], job: Any, prepared: bool, log: Path, launcher: int) -> None:
    error = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    sys.stderr.flush()
    os.dup2(error, 2)
    processes.follow(launcher)
    processes.end_daemons_at_exit()
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
