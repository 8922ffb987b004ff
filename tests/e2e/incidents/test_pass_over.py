"""Steps that are passed over: with virtual pipeline chunks, with stages without data, and through saves, evaluation and
exits, all of which Megatron's own `--iterations-to-skip` fails at or leaves out.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.checkpoints import generations
from megatron_stability.ledger import bundle, entries, fates
from megatron_stability.records import Decision, StepRecord
from tests import effort
from tests.dist.pool import Pool
from tests.e2e import artifacts, jobs
from tests.e2e.equality.test_skip_equality import COUNTERS
from tests.e2e.incidents.test_resume_and_halt import Actions

pytestmark = pytest.mark.megatron

OVERLAP = (*jobs.SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
THROUGH = ("--save-interval", "2", "--eval-interval", "2", "--eval-iters", "1")
BATCH = 4
LAYOUTS = {"vpp2": (jobs.VPP2, 2), "pp4": (("--pipeline-model-parallel-size", "4", "--num-layers", "4"), 4)}


class Terminate(Actions):
    """Probe: every rank is asked to end, in a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def write(self, record: StepRecord, decision: Decision) -> None:
        super().write(record, decision)
        if record.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def pool(pools: dict[tuple[str, str], Pool]) -> Pool:
    return pools["0.19.2", "patched"]


def _run(pool: Pool, flags: tuple[str, ...], world: int, out: Path, steps: int, probe: Any = None) -> list[Any]:
    where = ("--save", str(out), "--tensorboard-dir", str(out / "tensorboard"), "--stability-mode", "act")
    flags = (*where, "--train-iters", str(steps), "--lr-decay-iters", "60", *flags)
    results = pool.run(jobs.train, flags, probe or Actions(), world=world, timeout=180)
    assert [code for code, _ in results] == [0] * world
    assert all(seen == results[0][1] for _, seen in results)
    view = entries.read(out / "stability")
    assert fates.audit(view) == []
    assert bundle.bundles(out / "stability") == []  # nothing went wrong, and old incidents are not crowded out
    return [row[:2] for row in results[0][1]]


@pytest.mark.parametrize("layout", effort.sampled(LAYOUTS, ("vpp2",)))
def test_chunks_and_stages_without_data_end_as_if_the_gradient_had_been_withheld(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    flags, world = LAYOUTS[layout]
    passed = _run(pool, (*flags, *NO_DROPOUT, "--iterations-to-skip", "3"), world, tmp_path / "passed", 5)
    assert passed == [(step, "skip" if step == 3 else "apply") for step in range(1, 6)]
    fault = ("--drill-fault", "nan:step=3,rank=0", "--stability-record-max-bundles", "0")
    _run(pool, (*flags, *NO_DROPOUT, *fault), world, tmp_path / "withheld", 5)
    one, other = (jobs.read_checkpoint(pool, tmp_path / name, 5) for name in ("passed", "withheld"))
    assert artifacts.differences(one, other, excluded=COUNTERS) == []


def test_saves_evaluations_and_exits_go_on_in_a_window(pool: Pool, tmp_path: Path) -> None:
    """The first two steps too, where Megatron has no forward pre-hooks yet."""
    windows = ("--stability-decide-skip-samples", f"[[0, {2 * BATCH}], [{3 * BATCH}, {6 * BATCH}]]")
    seen = _run(pool, (*OVERLAP, *THROUGH, *windows, "--exit-interval", "5"), 2, tmp_path, 9)
    assert seen == [(1, "skip"), (2, "skip"), (3, "apply"), (4, "skip"), (5, "skip")]
    states = {each.step: each.state for each in generations.generations(tmp_path)}
    assert states == {2: "complete", 4: "complete", 5: "complete"}
    assert [step for step, _ in artifacts.scalars(tmp_path / "tensorboard")["lm loss validation"]] == [2, 4]
    resumed = _run(pool, (*OVERLAP, *THROUGH, *windows, "--load", str(tmp_path)), 2, tmp_path, 9)
    assert resumed == [(6, "skip"), (7, "apply"), (8, "apply"), (9, "apply")]


def test_a_signal_ends_the_run_in_a_window(pool: Pool, tmp_path: Path) -> None:
    flags = (*jobs.PP2, "--iterations-to-skip", "3", "4", "5", "--exit-signal-handler")
    seen = _run(pool, flags, 2, tmp_path, 9, Terminate(4))
    assert seen == [(1, "apply"), (2, "apply"), (3, "skip"), (4, "skip")]
    assert [(each.step, each.state) for each in generations.generations(tmp_path)] == [(4, "complete")]
