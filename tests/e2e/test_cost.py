"""What the layer adds to a step, counted: nothing when off, two all-reduces when on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.dist.pool import Context, Pool
from tests.e2e import jobs

pytestmark = pytest.mark.megatron

FEW, MORE = 3, 6


def collectives(context: Context, flags: tuple[str, ...]) -> tuple[int, Counter[str]]:
    """The exit code of a run, and its collectives by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        code, _ = jobs.train(context, flags)
    return code, Counter({e.key: e.count for e in profile.key_averages() if e.key.startswith("c10d::")})


def _a_step(pool: Pool, mode: str, out: Path) -> Counter[str]:
    """Collectives that FEW..MORE steps add, so that those of start and end cancel."""
    counts = []
    for steps in (FEW, MORE):
        flags = (*jobs.SHARDED, "--train-iters", str(steps), "--stability-mode", mode)
        record = ("--stability-record-dir", str(out / f"{mode}-{steps}"))
        results = pool.run(collectives, (*flags, *record), world=2, timeout=240)
        assert [code for code, _ in results] == [0, 0]
        counts.append(results[0][1])
    assert counts[1] >= counts[0]
    return counts[1] - counts[0]


def test_off_adds_no_collective_and_on_adds_two_a_step(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    stock = _a_step(pools["0.19.2", "stock"], "off", tmp_path)
    assert sum(stock.values()) >= 2 * (MORE - FEW)
    assert _a_step(pools["0.19.2", "patched"], "off", tmp_path) == stock
    on = _a_step(pools["0.19.2", "patched"], "act", tmp_path)
    assert on - stock == Counter({"c10d::allreduce_": 2 * (MORE - FEW)})
    assert stock - on == Counter()
