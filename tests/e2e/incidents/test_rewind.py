"""REWIND: as if the run had been started from that checkpoint with the window left out by hand, to the bit.

Dropout is Megatron's default 0.1, so that every draw of random numbers counts. The reference starts in a fresh process
from the checkpoint that the rewind went back to, and leaves the window out by `--iterations-to-skip`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stability.checkpoints import generations, run_state
from megatron_stability.errors import EXIT_HALTED, EXIT_REWIND
from megatron_stability.ledger import entries, fates
from tests.dist.pool import Pool
from tests.e2e import artifacts, jobs
from tests.e2e.incidents.test_resume_and_halt import Actions

pytestmark = pytest.mark.megatron

OVERLAP = (*jobs.SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
SAVES = ("--save-interval", "4")


def iterations(steps: int) -> tuple[str, ...]:
    return ("--train-iters", str(steps), "--lr-decay-iters", "60")


def rules(skip_steps: int, **more: Any) -> tuple[str, ...]:
    rule = {"detector": "non_finite", "tier": "non_finite", "action": "rewind", "generations": 1, **more}
    return ("--stability-decide-rules", json.dumps([rule | {"skip_steps": skip_steps}]))


def faults(*steps: int) -> tuple[str, ...]:
    return tuple(word for step in steps for word in ("--drill-fault", f"nan:step={step},rank=1"))


def run(pool: Pool, flags: tuple[str, ...], world: int, out: Path, code: int = 0) -> list[tuple[int, str]]:
    """(step, action) of each finished step; every rank ended with `code` and saw the same."""
    where = ("--save", str(out), "--stability-record-dir", str(out / "stability"), "--stability-mode", "act")
    results = pool.run(jobs.train, (*SAVES, *where, *flags), Actions(), world=world, timeout=300)
    assert [answer for answer, _ in results] == [code] * world
    assert all(seen == results[0][1] for _, seen in results)
    return [row[:2] for row in results[0][1]]


def assert_as_by_hand(
    pool: Pool,
    flags: tuple[str, ...],
    world: int,
    folder: Path,
    left_out: tuple[int, ...] = (10, 11),
    generations_back: int = 1,
    back_to: int = 8,
) -> dict[str, Any]:
    """Rewind from step 11 to step 8, leave steps out; compare with a start from 8 that leaves them out, at step 12.

    Args:
        pool: of patched ranks.
        flags: the layout and what else the run is, with its length: 12 steps.
        world: ranks.
        folder: for both runs.
        left_out: the steps of the window, up to 11.
        generations_back: that lead to step 8.
        back_to: the step that the rewind goes back to, if it is not that of a checkpoint.

    Returns:
        The entries of the checkpoint.
    """
    ours = rules(len(left_out), generations=generations_back)
    seen = run(pool, (*flags, *ours, *faults(11)), world, folder / "rewound")
    again = [(step, "skip" if step in left_out else "apply") for step in range(9, 13)]
    assert seen == [*((step, "apply") for step in range(1, 11)), (11, "rewind"), *again[back_to - 8 :]]
    start = ("--load", str(folder / "rewound"), "--ckpt-step", "8", "--iterations-to-skip", *map(str, left_out))
    assert run(pool, (*flags, *start), world, folder / "by-hand") == again
    rewound, by_hand = (jobs.read_checkpoint(pool, folder / name, 12) for name in ("rewound", "by-hand"))
    assert artifacts.differences(rewound, by_hand) == []
    tensors = {name: value for name, value in rewound.items() if isinstance(value, torch.Tensor)}
    moments = [value for name, value in tensors.items() if "exp_avg" in name or "momentum_buffer" in name]
    assert sum(value.numel() for value in moments) > 50_000  # of some 90 000 weights
    assert any("rng" in name for name in tensors)
    view = entries.read(folder / "rewound" / "stability")
    assert fates.audit(view) == []
    assert [step.step for step in view.surviving if step.fate == "skipped"] == list(left_out)
    assert [step.step for step in view.undone] == list(range(back_to + 1, 12))
    return rewound


def test_a_rewind_is_a_start_from_that_checkpoint(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    assert_as_by_hand(pools["0.19.2", "patched"], (*jobs.TP2, *jobs.PP2, *iterations(12)), 4, tmp_path)


def test_from_a_checkpoint_or_from_memory_with_gathers_under_way(
    pools: dict[tuple[str, str], Pool], tmp_path: Path
) -> None:
    """The snapshot is of step 9, and checkpoints are of every fourth step."""
    pool, flags = pools["0.19.2", "patched"], (*OVERLAP, *iterations(12))
    by_hand = assert_as_by_hand(pool, flags, 2, tmp_path)
    memory = ("--stability-decide-snapshot-steps", "9")
    seen = run(pool, (*flags, *memory, *rules(2), *faults(11)), 2, tmp_path / "memory")
    assert seen[10:] == [(11, "rewind"), (10, "skip"), (11, "skip"), (12, "apply")]
    assert artifacts.differences(jobs.read_checkpoint(pool, tmp_path / "memory", 12), by_hand) == []


def test_each_attempt_goes_further_back_and_the_last_one_halts(
    pools: dict[tuple[str, str], Pool], tmp_path: Path
) -> None:
    pool = pools["0.19.2", "patched"]
    flags = (*jobs.PP2, *iterations(16), *rules(1))
    seen = run(pool, (*flags, *faults(10, 11, 14)), 2, tmp_path, code=EXIT_HALTED)
    first = [(step, "apply") for step in range(1, 10)]
    second = [(9, "apply"), (10, "skip"), (11, "rewind")]
    third = [*((step, "apply") for step in range(5, 10)), (10, "skip"), (11, "skip"), (12, "apply"), (13, "apply")]
    assert seen == [*first, (10, "rewind"), *second, *third, (14, "halt")]
    view = entries.read(tmp_path / "stability")
    assert fates.audit(view) == []
    assert [step.step for step in view.surviving] == list(range(1, 15))
    states = {each.folder.name: each.state for each in generations.generations(tmp_path)}
    good = {f"iter_{step:07d}": "complete" for step in (4, 8, 12)}
    assert states == {**good, "iter_0000008.suspect-1": "suspect", "iter_0000013": "suspect"}
    assert generations.read_tracker(tmp_path) == 12
    state = run_state.read(tmp_path / "stability")
    assert state is not None
    assert (state.status, state.step, state.exit_code) == ("halt", 14, EXIT_HALTED)
    assert [window[:2] for window in state.pass_over["windows"]] == [[36, 40], [40, 44]]
    after = run(pool, (*flags, "--load", str(tmp_path)), 2, tmp_path)
    assert after == [(step, "apply") for step in range(13, 17)]


def test_by_a_restart_it_ends_in_the_same_bits(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    pool = pools["0.19.2", "patched"]
    flags = (*jobs.PP2, *iterations(8), *faults(7))
    again = [(5, "apply"), (6, "apply"), (7, "skip"), (8, "apply")]
    relief = rules(1, factor=0.5, steps=8)
    assert run(pool, (*flags, *relief), 2, tmp_path / "within")[-4:] == again
    restart = (*flags, *relief, "--stability-decide-rewind", "restart")
    assert run(pool, restart, 2, tmp_path / "restart", code=EXIT_REWIND)[-1] == (7, "rewind")
    state = run_state.read(tmp_path / "restart" / "stability")
    assert state is not None
    assert (state.status, state.exit_code) == ("rewind", EXIT_REWIND)
    assert run(pool, (*restart, "--load", str(tmp_path / "restart")), 2, tmp_path / "restart") == again
    within, restarted = (jobs.read_checkpoint(pool, tmp_path / name, 8) for name in ("within", "restart"))
    assert artifacts.differences(within, restarted) == []
    assert run(pool, (*flags, *rules(1)), 2, tmp_path / "plain")[-4:] == again
    plain = jobs.read_checkpoint(pool, tmp_path / "plain", 8)
    assert any(name.startswith("decoder") for name in artifacts.differences(within, plain))
