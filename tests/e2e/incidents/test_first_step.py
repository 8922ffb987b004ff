"""A save before the first applied update: it is written, it loads, and the run goes on in the same bits."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatron_stability.errors import EXIT_HALTED
from megatron_stability.watch.heartbeat import beats
from tests.dist.pool import Context, Pool
from tests.e2e import artifacts, jobs
from tests.e2e.conftest import RELEASES

pytestmark = pytest.mark.megatron

OPTIMIZERS = {"plain": ((), 1), "distributed": (jobs.SHARDED, 2), "muon": (("--optimizer", "muon"), 1)}
ACT = ("--stability-mode", "act", "--train-iters", "4", "--save-interval", "1")


def faults(*steps: int) -> tuple[str, ...]:
    return tuple(word for step in steps for word in ("--drill-fault", f"nan:step={step},rank=0"))


def logged(context: Context, flags: tuple[str, ...], log: Path) -> int:
    """`jobs.train` with what it prints in a file; the exit code."""
    file = os.open(log.with_suffix(f".{context.rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    return jobs.train(context, flags)[0]


EVERYDAY = {("0.19.2", "plain"), ("0.19.2", "muon"), ("0.18.2", "distributed")}
CASES = [
    pytest.param(release, optimizer, marks=[] if (release, optimizer) in EVERYDAY else pytest.mark.rare)
    for release in RELEASES
    for optimizer in OPTIMIZERS
    if (release, optimizer) != ("0.18.2", "muon")  # the same code as 0.19.2's
]


@pytest.mark.parametrize(("release", "optimizer"), CASES)
def test_a_save_after_a_first_step_that_was_skipped(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, release: str, optimizer: str
) -> None:
    (flags, world), pool = OPTIMIZERS[optimizer], pools[release, "patched"]
    whole = (*ACT, *flags, *faults(1), "--save", str(tmp_path / "whole"))
    assert pool.run(logged, whole, tmp_path / "log", world=world, timeout=120) == [0] * world
    lines = (tmp_path / f"log.{world - 1}").read_text().splitlines()
    steps = [line for line in lines if " iteration " in line and "consumed samples" in line]
    assert ["lm loss" in line for line in steps] == [False, True, True, True], "a skipped step has no loss to log"
    (beat,) = beats(tmp_path / "whole" / "stability").values()
    assert (beat.node, beat.step, beat.state) == (socket.gethostname(), 4, "ended")
    again = (*ACT, *flags, "--load", str(tmp_path / "whole"), "--ckpt-step", "1", "--save", str(tmp_path / "again"))
    assert [code for code, _ in pool.run(jobs.train, again, world=world, timeout=120)] == [0] * world
    one, other = (jobs.read_checkpoint(pool, tmp_path / name, 4) for name in ("whole", "again"))
    assert artifacts.differences(one, other) == []
    assert any("exp_avg" in name or "momentum" in name for name in one)


def test_a_halt_before_the_first_applied_update(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    flags = (*ACT, *jobs.SHARDED, *faults(1, 2, 3), "--stability-decide-max-consecutive-skips", "2")
    flags = (*flags, "--save", str(tmp_path), "--save-interval", "1000")
    results = pools["0.19.2", "patched"].run(jobs.train, flags, world=2, timeout=120)
    assert [code for code, _ in results] == [EXIT_HALTED] * 2
    assert (tmp_path / "iter_0000002").is_dir()
