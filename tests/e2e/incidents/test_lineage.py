"""Real runs: a rollback by hand stands, a poisoned checkpoint is got away from, and a complete one is never at risk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stability.checkpoints import generations, manifest, run_state
from megatron_stability.errors import EXIT_HALTED, EXIT_UNUSABLE
from megatron_stability.records import Decision, StepRecord
from tests.dist.pool import Pool
from tests.e2e import jobs
from tests.e2e.incidents.test_resume_and_halt import Actions

pytestmark = pytest.mark.megatron


@pytest.fixture
def pool(pools: dict[tuple[str, str], Pool]) -> Pool:
    return pools["0.19.2", "patched"]


def run(
    pool: Pool, folder: Path, *flags: str, steps: int, every: int, code: int = 0, probe: Any = None
) -> list[tuple[int, str]]:
    """One start on one rank; (step, action) of each step."""
    where = ("--save", str(folder), "--stability-record-dir", str(folder / "stability"), "--lr-decay-iters", "60")
    length = ("--train-iters", str(steps), "--save-interval", str(every), "--stability-mode", "act")
    ((answer, seen),) = pool.run(jobs.train, (*where, *length, *flags), probe or Actions(), world=1, timeout=180)
    assert answer == code
    return [row[:2] for row in seen]


def states(folder: Path) -> dict[str, str]:
    return {each.folder.name: each.state for each in generations.generations(folder)}


def applied(*steps: int) -> list[tuple[int, str]]:
    return [(step, "apply") for step in steps]


def test_a_rollback_by_hand_stands(pool: Pool, tmp_path: Path) -> None:
    """Megatron-Bridge#5260, #5964. Also from another start's point of view: what is refused leaves every byte."""
    load, tracker = ("--load", str(tmp_path)), tmp_path / generations.TRACKER
    run(pool, tmp_path, steps=6, every=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run(pool, tmp_path, *load, "--ckpt-step", "3", "--lr", "0.5", steps=6, every=3, code=EXIT_UNUSABLE)
    run(pool, tmp_path, steps=6, every=3, code=EXIT_UNUSABLE)  # a fresh start into a used folder
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    back = (*load, "--ckpt-step", "3", "--stability-decide-skip-samples", "[[12,16]]", "--exit-interval", "4")
    assert run(pool, tmp_path, *back, steps=6, every=4) == [(4, "skip")]
    assert states(tmp_path) == {"iter_0000004": "complete", "iter_0000003": "complete", "iter_0000006": "suspect"}
    assert tracker.read_text() == "4"
    assert run(pool, tmp_path, *load, "--exit-interval", "5", steps=6, every=50) == applied(5)
    tracker.write_text("3\n")  # by hand
    assert run(pool, tmp_path, *load, steps=6, every=3) == [(4, "skip"), *applied(5, 6)]
    assert states(tmp_path)["iter_0000006.suspect-1"] == "suspect"
    assert generations.candidates(tmp_path)[0].step == 6


class Poison(Actions):
    """Probe: after a step one gain and its master are 3e38, which is finite and makes every loss NaN."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step, self._runtime = step, None

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime

    def write(self, record: StepRecord, decision: Decision) -> None:
        super().write(record, decision)
        if record.step == self._step:
            runtime: Any = self._runtime
            with torch.no_grad():
                for chunk in runtime.model:
                    for name, weight in chunk.named_parameters():
                        if "final_layernorm" in name:
                            weight[0] = 3e38
                            weight.main_param.view(-1)[0] = 3e38
            self._runtime = None


def test_a_poisoned_checkpoint_is_got_away_from(pool: Pool, tmp_path: Path) -> None:
    load, budget = ("--load", str(tmp_path)), ("--stability-decide-max-consecutive-skips", "5")
    keep = ("--stability-checkpoint-keep", "1")
    run(pool, tmp_path, *budget, "--exit-interval", "10", steps=20, every=5, probe=Poison(10))
    seen = run(pool, tmp_path, *load, *budget, *keep, steps=20, every=5, code=EXIT_HALTED)
    assert seen == [*((step, "skip") for step in range(11, 16)), (16, "halt")]
    assert states(tmp_path) == {"iter_0000015": "suspect", "iter_0000010": "suspect", "iter_0000005": "complete"}
    always = tuple(word for step in range(6, 12) for word in ("--drill-fault", f"nan:step={step},rank=0"))
    for starts in (1, 2):  # and the older one fails as well, by a cause of its own
        seen = run(pool, tmp_path, *load, *budget, *always, steps=20, every=50, code=EXIT_HALTED)
        assert seen[-1] == (11, "halt")
        state = run_state.read(tmp_path / "stability")
        assert state is not None
        assert state.attempt is not None
        assert (state.attempt.place.step, state.attempt.starts) == (5, starts)
    assert run(pool, tmp_path, *load, *budget, *always, steps=20, every=50, code=EXIT_HALTED) == []
    seen = run(pool, tmp_path, *load, "--ckpt-step", "5", *budget, "--exit-interval", "7", steps=20, every=50)
    assert seen == applied(6, 7)
    state = run_state.read(tmp_path / "stability")
    assert state is not None
    assert state.attempt is None


class NoWay(Actions):
    """Probe: once a save has begun, a folder stands where its shard should be, as if the disk were full."""

    def begin(self, runtime: Any) -> None:
        begins = runtime.checkpoints.save_begins

        def blocked(save_dir: str, step: int) -> None:
            begins(save_dir, step)
            (generations.folder_of(Path(save_dir), step) / "__0_0.distcp" / "in the way").mkdir(parents=True)

        runtime.checkpoints.save_begins = blocked


def test_a_complete_step_that_is_saved_again_is_never_at_risk(pool: Pool, tmp_path: Path) -> None:
    run(pool, tmp_path, steps=6, every=3)
    marker, load = tmp_path / "iter_0000006" / manifest.MARKER, ("--load", str(tmp_path))
    before = marker.read_bytes()
    back = (*load, "--ckpt-step", "3")
    assert run(pool, tmp_path, *back, steps=6, every=3, probe=NoWay()) == applied(4, 5, 6)
    assert marker.read_bytes() == before
    assert states(tmp_path) == {"iter_0000003": "complete", "iter_0000006": "suspect"}
    assert manifest.verify(marker.parent) == []
    assert run(pool, tmp_path, *load, "--ckpt-step", "6", steps=6, every=4) == []  # no step, and saved at the end
    assert marker.read_bytes() != before
    assert states(tmp_path) == {"iter_0000003": "complete", "iter_0000006": "complete"}
    assert generations.read_tracker(tmp_path) == 6
