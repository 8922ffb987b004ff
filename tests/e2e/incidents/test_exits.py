"""Every way a run ends, with loader workers that do not heed SIGTERM: an exit code, and no process is left.

A rank of the pool, which has imported Megatron, plays the launcher; its ranks are forks of it. What is left is counted
by the process group that all of them share.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_stability.checkpoints import generations
from megatron_stability.errors import EXIT_HALTED
from megatron_stability.megatron.access import processes
from megatron_stability.megatron.start.job import rank_main
from megatron_stability.megatron.start.ranks import Ranks
from megatron_stability.records import Action, Decision, StepRecord
from tests.dist.pool import Context, Pool
from tests.e2e import jobs
from tests.e2e.incidents.test_rewind import rules

pytestmark = pytest.mark.megatron

LOADERS = 3  # train, validation and test
WORKERS = 2
FLAGS = (
    *("--num-workers", str(WORKERS), "--exit-signal-handler", "--eval-iters", "1", "--eval-interval", "2"),
    *("--train-iters", "6", "--save-interval", "2", "--stability-mode", "act", *jobs.SHARDED),
)


def fault(*steps: int) -> tuple[str, ...]:
    return tuple(word for step in steps for word in ("--drill-fault", f"nan:step={step},rank=0"))


@dataclass
class Event:
    """A sink that does something to this process in a step, and writes down how many daemons it has."""

    what: str
    step: int
    folder: Path
    rank: int = 0

    def begin(self, runtime: Any) -> None:
        self._here = runtime.rank == self.rank

    def write(self, record: StepRecord, decision: Decision) -> None:
        workers = sum(child.daemon for child in multiprocessing.active_children())
        (self.folder / f"workers-{record.step}-{os.environ['RANK']}").write_text(str(workers))
        if record.step != self.step or not self._here or decision.action is not Action.APPLY:
            return
        if self.what == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.what == "exception":
            raise RuntimeError("a failure of this rank")
        elif self.what == "stuck":
            (self.folder / "stuck").touch()
            time.sleep(600)
        elif self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "waits":
            (self.folder / "waits").touch()
            while not (self.folder / "go on").exists():
                time.sleep(0.05)


@dataclass(frozen=True)
class Run:
    """What a launcher gives its ranks."""

    flags: tuple[str, ...]
    event: Event

    def prepare(self) -> None:
        raise AssertionError("the template has prepared")

    def train(self) -> None:
        from megatron_stability.megatron.access import handle
        from megatron_stability.megatron.start import pretrain_gpt

        sys.argv = ["megatron-stability pretrain", *jobs.command_line(self.flags)]
        off = "off" in self.flags  # then there is no runtime to look at
        provider = pretrain_gpt.model_provider if off else partial(jobs._probed_model, self.event)
        try:
            pretrain_gpt.main(model_provider=provider)
        finally:
            handle.uninstall()


def launch(run: Run, world: int) -> int:
    with Ranks(world, fork=True) as ranks:
        return ranks.run(rank_main, run)


def launched(context: Context, run: Run, world: int) -> tuple[int, list[int]]:
    """The exit code, and what the run left behind."""
    _no_longer_a_rank()
    code = launch(run, world)
    return code, _others_of_this_group()


def _others_of_this_group() -> list[int]:
    """What this process and its descendants have forked, whoever is its parent by now."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == os.getpgid(0) and pid != os.getpid():
                found.append(pid)
    return found


def _no_longer_a_rank() -> None:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


ENDS = {
    "done": (0, Event("", 0, Path()), ()),
    "signal": (0, Event("signal", 3, Path()), ()),
    "halt": (EXIT_HALTED, Event("", 0, Path()), (*fault(3, 4, 5), "--stability-decide-max-consecutive-skips", "2")),
    "rewind": (0, Event("", 0, Path()), (*rules(1), *fault(5))),
    "exception": (1, Event("exception", 3, Path(), rank=1), ()),
    "save after its worker has ended": (
        0,
        Event("", 0, Path()),
        ("--train-iters", "3", "--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"),
    ),
    "killed": (128 + signal.SIGKILL, Event("killed", 3, Path(), rank=1), ()),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_end_has_its_code_and_leaves_no_process(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, end: str
) -> None:
    code, event, flags = ENDS[end]
    world = event.rank + 1
    event = Event(event.what, event.step, tmp_path, event.rank)
    run = Run((*FLAGS, "--save", str(tmp_path / "save"), *flags), event)
    assert pools["0.19.2", "patched"].run(launched, run, world, world=1, timeout=120) == [(code, [])]
    saver = "--use-persistent-ckpt-worker" in flags
    assert (tmp_path / "workers-1-0").read_text() == str(LOADERS * WORKERS + saver)
    if end == "rewind":  # iterators were built anew, and the workers of the old ones have ended
        assert (tmp_path / "workers-6-0").read_text() == str(LOADERS * WORKERS)
    if end in ("signal", "save after its worker has ended"):
        assert generations.read_tracker(tmp_path / "save") == 3


@pytest.mark.parametrize("mode", [pytest.param("observe", marks=pytest.mark.rare), "off"])
def test_a_save_after_its_worker_has_ended_is_whole_in_every_mode(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, mode: str
) -> None:
    """Three steps, an interval of two: Megatron closes its worker, then saves the third. `act` is among the ends."""
    save = tmp_path / "save"
    _, _, flags = ENDS["save after its worker has ended"]
    run = Run((*FLAGS, *flags, "--save", str(save), "--stability-mode", mode), Event("", 0, tmp_path))
    pool = pools["0.19.2", "patched"]
    assert pool.run(launched, run, 1, world=1, timeout=120) == [(0, [])]
    assert generations.read_tracker(save) == 3
    assert (save / "iter_0000003" / ".metadata").stat().st_size > 0
    assert [each.step for each in generations.candidates(save)] == ([] if mode == "off" else [3, 2])
    last = jobs.read_checkpoint(pool, save, 3)
    assert any("embedding" in name for name in last)


def ended_launcher(context: Context, run: Run, number: int, until: str) -> tuple[int | None, list[int]]:
    """As `launched`, of a launcher that gets a signal; what it leaves behind comes to this process."""
    _no_longer_a_rank()
    processes.GRACE_S = 1.0
    processes._adopt(True)
    launcher = multiprocessing.get_context("fork").Process(target=_be_launcher, args=(run,))
    launcher.start()
    assert launcher.pid is not None
    _wait_for(lambda: (run.event.folder / until).exists())
    os.kill(launcher.pid, number)
    if number == signal.SIGTERM:
        time.sleep(0.2)  # the signal is on its way to the rank, which may see it in any later step
        (run.event.folder / "go on").touch()
    launcher.join()
    _wait_for(lambda: all(processes._reaped(pid) for pid in processes.children(os.getpid())))
    return launcher.exitcode, _others_of_this_group()


def _be_launcher(run: Run) -> None:
    sys.exit(launch(run, 1))


def _wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_launcher_passes_a_signal_on(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    """The rank saves, and ends with 0; so does the launcher."""
    run = Run((*FLAGS, "--train-iters", "1000", "--save", str(tmp_path / "save")), Event("waits", 3, tmp_path))
    pool = pools["0.19.2", "patched"]
    assert pool.run(ended_launcher, run, signal.SIGTERM, "waits", world=1, timeout=120) == [(0, [])]
    assert (generations.read_tracker(tmp_path / "save") or 0) >= 3


def test_a_killed_launcher_takes_a_stuck_rank_and_its_workers_along(
    pools: dict[tuple[str, str], Pool], tmp_path: Path
) -> None:
    run = Run((*FLAGS, "--save", str(tmp_path / "save")), Event("stuck", 3, tmp_path))
    pool = pools["0.19.2", "patched"]
    killed = [(-signal.SIGKILL, [])]
    assert pool.run(ended_launcher, run, signal.SIGKILL, "stuck", world=1, timeout=120) == killed


def test_under_torchrun(tmp_path: Path) -> None:
    """Loader workers with the signal handler, and a last asynchronous save after its worker has ended."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "megatron_stability")
    flags = (*jobs.MODEL, "--bf16", *FLAGS, *ENDS["save after its worker has ended"][2], "--save", str(tmp_path))
    mark = f"TEST_MARK={tmp_path}"
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "TEST_MARK": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        command = (sys.executable, *launcher, "pretrain", "--cpu", *flags)
        run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            assert run.wait(timeout=240) == 0, (tmp_path / "log").read_text()[-2000:]
            assert generations.read_tracker(tmp_path) == 3
            _wait_for(lambda: _marked(mark) == [], seconds=10.0)  # servers of multiprocessing end with their pipes
        finally:
            for pid in _marked(mark):
                processes.kill_with_descendants(pid)


def _marked(mark: str) -> list[int]:
    """Processes with a variable in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found
