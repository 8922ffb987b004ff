"""No process is left behind: a rank ends its children, a launcher its ranks, however the one or the other ends.

Three rules. What `multiprocessing` calls a daemon ends with its rank, also where it does not heed SIGTERM: with
`--exit-signal-handler` Megatron gives its own handler to the workers of data loaders, and Python would wait for them
for ever. A rank whose launcher has gone ends, and its descendants with it. A launcher adopts what its ranks leave
behind, and ends it. Linux only, as Megatron is.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing import resource_tracker, util
from pathlib import Path

GRACE_S = 10.0  # how long a process may take to end by itself once it has to
DAEMON_GRACE_S = 1.0  # the same for a daemon, which has nothing to finish
ORPHAN_GRACE_S = 2.0  # the same for what an ended rank left behind
POLL_S = 0.1
WATCH = "launcher watch"
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ASK_TO_END = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_at_exit: util.Finalize | None = None


def end_daemons_at_exit() -> None:
    """Let this process end its daemons when it ends: after `main`, `sys.exit` or an exception, in forks too.

    Registered with `multiprocessing` and not with `atexit`, whose callbacks a forked process does not run.
    """
    global _at_exit
    if _at_exit is None or not _at_exit.still_active():
        _at_exit = util.Finalize(None, _end_daemons, exitpriority=0)


def _end_daemons() -> None:
    """SIGTERM, and SIGKILL for what does not heed it. Others than daemons are waited for, as Python does."""
    daemons = [child for child in mp.active_children() if child.daemon]
    if not daemons:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises where a loader's worker is killed
    families = [(child, [pid for pid in (child.pid, *descendants(child.pid or 0)) if pid]) for child in daemons]
    for child in daemons:
        child.terminate()
    deadline = time.monotonic() + DAEMON_GRACE_S
    for child, family in families:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            _kill(family)
            child.join()


def follow(launcher: int) -> None:
    """Let this rank, and all that descends from it, end when its launcher has gone, by SIGKILL too.

    A thread watches, and no signal of the kernel, which would end the rank alone: a checkpoint writer, or the manager
    of its queues, would stay. Where SIGTERM is handled (Megatron then saves, and ends) that is given time first.

    Args:
        launcher: the parent's process id.
    """
    if all(thread.name != WATCH for thread in threading.enumerate()):
        threading.Thread(target=_end_after, args=(launcher,), name=WATCH, daemon=True).start()


def follow_torchrun() -> None:
    """`follow` the parent where that is torchrun's agent; any other may be a shell that has done its work."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow(os.getppid())


def _end_after(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_S)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
    _kill([*descendants(os.getpid()), os.getpid()])


@contextlib.contextmanager
def orphans_end_here() -> Iterator[Callable[[Collection[int]], None]]:
    """Adopt what children leave behind within the block, as a killed rank its checkpoint writer, and end it.

    Yields:
        Ends it before, too: an orphan holds its rank's sockets open, so that no peer sees that the rank is gone. It
        takes the ids of children that are none.
    """
    resource_tracker.ensure_running()  # a child of this process that stays
    before = set(children(os.getpid()))
    _adopt(True)
    try:
        yield lambda wanted: _end_orphans(before.union(wanted))
    finally:
        _adopt(False)
        _end_orphans(before)


def _end_orphans(wanted: Collection[int]) -> None:
    deadline = time.monotonic() + ORPHAN_GRACE_S
    while left := [pid for pid in children(os.getpid()) if pid not in wanted and not _reaped(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                kill_with_descendants(pid)
        time.sleep(POLL_S)


def _adopt(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _reaped(pid: int) -> bool:
    """Whether a child has ended, and is gone from the table of processes."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


@contextlib.contextmanager
def passes_signals_on(others: Callable[[], Collection[int]]) -> Iterator[None]:
    """Within the block, a signal that asks this process to end goes to others instead, which end it by ending.

    Args:
        others: process ids of children that have not ended.
    """

    def pass_on(number: int, frame: object) -> None:
        print(f"megatron-stability: {signal.Signals(number).name} is passed on to the ranks", file=sys.stderr)
        for pid in others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    asked = [each for each in ASK_TO_END if signal.getsignal(each) is not signal.SIG_IGN]  # as nohup has it
    handlers = {number: signal.signal(number, pass_on) for number in asked}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def kill_with_descendants(pid: int) -> None:
    """SIGKILL lets a process end nothing of its own; a writer of its checkpoints would wait for it for ever."""
    _kill([pid, *descendants(pid)])


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on."""
    for child in children(pid):
        yield from (child, *descendants(child))


def children(pid: int) -> list[int]:
    """Of all threads of a process; those that ended and were not waited for, too."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += map(int, listed.read_text().split())
    return found
