"""Real runs that save, die and resume: what is written, what is refused, and that a resumed run is the same run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.record import compare_checkpoints, generations, ledger, manifest
from tests.dist import small_gpt
from tests.dist.pool import Context, Pool, megatron_on_cpu

TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
DP2 = ("--use-distributed-optimizer",)
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
RUN = ("--train-iters", "6", "--ckpt-format", "torch_dist", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def patched_megatron_on_cpu() -> None:
    """Prepare a template whose Megatron has the seams."""
    from megatron_stability.megatron.patching import in_memory

    in_memory.install()
    megatron_on_cpu()


@pytest.fixture(scope="module")
def patched_ranks() -> Iterator[Pool]:
    pool = Pool(patched_megatron_on_cpu)
    yield pool
    pool.close()


def train(context: Context, *flags: str) -> tuple[Any, dict[str, Any]]:
    """A run with the plugin; also the generators as they stand at its end. A refusal comes back as its exit code."""
    from megatron_stability.megatron import rank_state, seams

    try:
        run = small_gpt.train(context, *flags)
        state = rank_state.generators()
        return run, {name: repr(state[name]) for name in state}
    except SystemExit as end:
        return end.code, {}
    finally:
        seams.uninstall()


def run(pool: Pool, folder: Path, *flags: str, world: int = 2) -> list[tuple[Any, dict[str, Any]]]:
    where = ("--save", str(folder), "--stability-record-dir", str(folder / "stability"))
    return pool.run(train, *RUN, *where, *flags, world=world, timeout=400)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("layout", "world", "how"),
    [(TP2_PP2, 4, ()), (DP2, 2, ()), (DP2, 2, ASYNC)],
    ids=["tp2-pp2", "dp2-distributed-optimizer", "dp2-async"],
)
def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(
    patched_ranks: Pool, tmp_path: Path, layout: tuple[str, ...], world: int, how: tuple[str, ...]
) -> None:
    straight = run(patched_ranks, tmp_path, *layout, *how, "--save-interval", "3", world=world)
    found = generations.generations(tmp_path, full=True)
    assert [(each.step, each.state) for each in found] == [(6, "complete"), (3, "complete")]
    assert generations.read_tracker(tmp_path) == 6
    shutil.move(tmp_path / "iter_0000006", tmp_path / "straight")
    resumed = run(patched_ranks, tmp_path, *layout, "--load", str(tmp_path), "--save-interval", "3", world=world)
    for (one, one_rng), (two, two_rng) in zip(straight, resumed, strict=True):
        assert one.losses[len(one.losses) // 2 :] == two.losses
        assert one_rng == two_rng
    said, equal = compare_checkpoints.compare(tmp_path / "straight", tmp_path / "iter_0000006", bitwise=True)
    assert equal, said
    view = ledger.read(tmp_path / "stability")
    assert [step.step for step in view.surviving] == [1, 2, 3, 4, 5, 6]
    assert manifest.read(tmp_path / "iter_0000006").samples == view.surviving[-1].last_sample == 48
