"""Across restarts: baselines are remembered, a kill costs no sample its one fate, a halt leaves by the front door."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stability.checkpoints import generations
from megatron_stability.errors import EXIT_HALTED, EXIT_UNUSABLE
from megatron_stability.ledger import entries, fates
from megatron_stability.records import Decision, StepRecord
from tests.dist.pool import Pool, RankDied
from tests.e2e import jobs

pytestmark = pytest.mark.megatron

SCHEDULE = (
    "--lr-decay-iters",
    "60",
    "--save-interval",
    "4",
)  # a resumed run has the same --train-iters: the scheduler checks
BATCH = 4  # samples a step


class Actions:
    """Probe: (step, action, advised, reason)."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, runtime: Any) -> None:
        pass

    def write(self, record: StepRecord, decision: Decision) -> None:
        self.seen.append((record.step, str(decision.action), str(decision.advised), decision.reason))


class Kill(Actions):
    """Probe: rank 0, which writes the ledger, is killed in a step, before the step's line is written."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def write(self, record: StepRecord, decision: Decision) -> None:
        if record.step == self._step and torch.distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def pool(pools: dict[tuple[str, str], Pool]) -> Pool:
    return pools["0.19.2", "patched"]


def _flags(out: Path, steps: int, *more: str, mode: str = "act") -> tuple[str, ...]:
    where = ("--save", str(out), "--stability-record-dir", str(out / "stability"))
    return (*jobs.PP2, *SCHEDULE, *where, "--train-iters", str(steps), "--stability-mode", mode, *more)


def _faults(kind: str, *steps: int) -> tuple[str, ...]:
    return tuple(word for step in steps for word in ("--drill-fault", f"{kind}:step={step},rank=1"))


def _train(pool: Pool, flags: tuple[str, ...], code: int = 0) -> list[Any]:
    results = pool.run(jobs.train, flags, Actions(), world=2, timeout=180)
    assert [answer for answer, _ in results] == [code, code]
    assert results[0][1] == results[1][1]
    return results[0][1]


def test_a_spike_soon_after_a_resume_is_seen_against_the_saved_baseline(pool: Pool, tmp_path: Path) -> None:
    _train(pool, _flags(tmp_path, 28, "--exit-interval", "24"))
    spike = ("--drill-fault", "scale:step=27,factor=100000")
    seen = _train(pool, _flags(tmp_path, 28, "--load", str(tmp_path), *spike))
    assert [row[:2] for row in seen] == [(25, "apply"), (26, "apply"), (27, "skip"), (28, "apply")]
    assert "grad_norm_spike" in seen[2][3]


def test_every_sample_has_one_fate_over_a_kill(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankDied, match="rank 0"):
        pool.run(jobs.train, _flags(tmp_path, 12, *_faults("nan", 3)), Kill(7), world=2, timeout=180)
    killed = entries.read(tmp_path / "stability")
    assert [step.step for step in killed.steps] == [1, 2, 3, 4, 5, 6]
    passed_over = ("--iterations-to-skip", "10")
    _train(pool, _flags(tmp_path, 12, "--load", str(tmp_path), *passed_over, *_faults("nan-loss", 9)))
    view = entries.read(tmp_path / "stability")
    assert fates.audit(view) == []
    assert [(run.generation, run.resumed_step) for run in view.runs] == [(1, 0), (2, 4)]
    assert all(run.settings["num_layers"] == 2 and "model.z_loss" not in run.settings for run in view.runs)
    assert [step.step for step in view.undone] == [5, 6]
    assert [(step.step, step.first_sample) for step in view.surviving] == [(i + 1, BATCH * i) for i in range(12)]
    assert [step.step for step in view.surviving if step.fate == "skipped"] == [3, 9, 10]
    assert fates.count(fates.history(view)) == {"trained": 9 * BATCH, "skipped": 3 * BATCH, "undone": 2 * BATCH}


def test_too_many_skips_halt_every_rank_and_the_last_checkpoint_goes_on(pool: Pool, tmp_path: Path) -> None:
    budget = ("--stability-decide-max-consecutive-skips", "2")
    asynchronous = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
    seen = _train(pool, _flags(tmp_path, 12, *budget, *asynchronous, *_faults("inf", 6, 7, 8)), code=EXIT_HALTED)
    assert [row[1] for row in seen] == ["apply"] * 5 + ["skip", "skip", "halt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    states = {each.folder.name: each.state for each in generations.generations(tmp_path)}
    assert states == {"iter_0000004": "complete", "iter_0000007": "suspect"}  # the last step that stands, as evidence
    seen = _train(pool, _flags(tmp_path, 12, *budget, "--load", str(tmp_path)))
    assert [row[:2] for row in seen] == [(step, "apply") for step in range(5, 13)]
    view = entries.read(tmp_path / "stability")
    assert fates.audit(view) == []
    assert fates.count(fates.fates(view)) == {"trained": 12 * BATCH, "skipped": 0, "undone": 0}


def test_observing_says_the_same_and_does_what_stock_does(pool: Pool, tmp_path: Path) -> None:
    budget = ("--stability-decide-max-consecutive-skips", "1", "--no-check-for-nan-in-loss-and-grad")
    seen = _train(pool, _flags(tmp_path, 8, *budget, *_faults("nan", 3), mode="observe"))
    assert [row[1] for row in seen] == ["apply"] * 8
    assert [row[2] for row in seen] == ["apply", "apply", "skip"] + ["halt"] * 5
    weights = jobs.read_checkpoint(pool, tmp_path, 8)
    assert weights["embedding.word_embeddings.weight"].isnan().any()


def test_the_rerun_machines_verdict_is_in_the_ledger_and_its_exit_code_and_checkpoint_stand(
    pool: Pool, tmp_path: Path
) -> None:
    """Megatron's own error injection: a result that stands when run again has to be judged on another device."""
    inject = ("--error-injection-rate", "12", "--error-injection-type", "persistent_error")
    seen = _train(pool, _flags(tmp_path, 12, *inject, mode="observe"), code=16)
    view, (newest, *_) = entries.read(tmp_path / "stability"), generations.generations(tmp_path)
    (end,) = view.ends
    assert (end.code, end.step) == (16, len(seen))
    assert "rerun state machine" in end.reason
    assert [step.step for step in view.surviving] == [row[0] for row in seen] == list(range(1, len(seen) + 1))
    assert (newest.state, newest.step) == ("complete", len(seen))


def test_optimizer_state_of_another_expert_layout(pool: Pool, tmp_path: Path) -> None:
    """Megatron looks for another chain of optimizers, and ends in a KeyError; the weights alone fit."""
    flags = (*jobs.MOE, *jobs.SHARDED, "--lr-decay-iters", "60", "--save", str(tmp_path))
    assert [code for code, _ in pool.run(jobs.train, (*flags, "--train-iters", "3"), world=2, timeout=120)] == [0, 0]
    allowed = ("--stability-checkpoint-allow-changes", "train_iters", "--override-opt_param-scheduler")
    again = (*flags, *allowed, "--load", str(tmp_path), "--train-iters", "4", "--expert-model-parallel-size", "2")
    for code, more in ((EXIT_UNUSABLE, ()), (0, ("--no-load-optim",))):
        results = pool.run(jobs.train, (*again, *more, "--stability-mode", "act"), world=2, timeout=120)
        assert [each for each, _ in results] == [code, code]
