"""Real runs that save, die and resume: what is written, what is refused, and that a resumed run is the same run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.checkpoints import compare, generations, manifest
from megatron_stability.ledger import ledger
from tests.dist import small_gpt
from tests.dist.pool import Context, Pool
from tests.drills import kill_around_save

TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
DP2 = ("--use-distributed-optimizer",)
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
RUN = ("--train-iters", "6", "--ckpt-format", "torch_dist", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def train(context: Context, *flags: str) -> tuple[Any, dict[str, Any]]:
    """A run with the plugin; also the generators as they stand at its end. A refusal comes back as its exit code.

    Fingerprints are slower than a step's forward and backward, so that an update has to wait for them.
    """
    from megatron_stability.megatron.access import handle, rank_state
    from megatron_stability.observe import fingerprint

    quick = fingerprint._of_bytes

    def slow(data: memoryview, dtype: Any) -> fingerprint.Fingerprint:
        time.sleep(0.01)
        return quick(data, dtype)

    try:
        fingerprint._of_bytes = slow
        run = small_gpt.train(context, *flags)
        state = rank_state.generators()
        return run, {name: compare.text(state[name]) for name in state}
    except SystemExit as end:
        return end.code, {}
    finally:
        fingerprint._of_bytes = quick
        handle.uninstall()


def run(pool: Pool, folder: Path, *flags: str, world: int = 2) -> list[tuple[Any, dict[str, Any]]]:
    where = ("--save-interval", "1000", "--save", str(folder), "--stability-record-dir", str(folder / "stability"))
    return pool.run(train, *RUN, *where, *flags, world=world, timeout=400)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("layout", "world", "how"),
    [(TP2_PP2, 4, ()), (DP2, 2, ASYNC)],
    ids=["tp2-pp2", "dp2-async"],
)
def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(
    patched_ranks: Pool, tmp_path: Path, layout: tuple[str, ...], world: int, how: tuple[str, ...]
) -> None:
    """Megatron-Bridge#5257: also torch's host generator goes on where the uninterrupted run's does."""
    straight = run(patched_ranks, tmp_path, *layout, *how, "--save-interval", "3", world=world)
    found = generations.generations(tmp_path, full=True)
    assert [(each.step, each.state) for each in found] == [(6, "complete"), (3, "complete")]
    assert generations.read_tracker(tmp_path) == 6
    shutil.move(tmp_path / "iter_0000006", tmp_path / "straight")
    resumed = run(patched_ranks, tmp_path, *layout, "--load", str(tmp_path), "--save-interval", "3", world=world)
    for (one, one_rng), (two, two_rng) in zip(straight, resumed, strict=True):
        assert one.losses[len(one.losses) // 2 :] == two.losses
        assert one_rng == two_rng
        assert one_rng["torch"]
    said, equal = compare.compare(tmp_path / "straight", tmp_path / "iter_0000006", bitwise=True)
    assert equal, said
    prints = tmp_path / "straight" / manifest.fingerprints_name(1)
    prints.write_bytes(prints.read_bytes()[::-1])
    assert not compare.compare(tmp_path / "straight", tmp_path / "iter_0000006", bitwise=True)[1]
    view = ledger.read(tmp_path / "stability")
    assert [step.step for step in view.surviving] == [1, 2, 3, 4, 5, 6]
    assert manifest.read(tmp_path / "iter_0000006").samples == view.surviving[-1].last_sample == 48


@pytest.mark.megatron
def test_refusals_end_with_code_2_and_a_bad_file_means_the_older_one(patched_ranks: Pool, tmp_path: Path) -> None:
    """A missing --load; other arguments; then a corrupt newest generation, which the run passes over."""
    load = ("--load", str(tmp_path))
    nowhere = ("--load", str(tmp_path / "elsewhere"))  # the folder of --save itself would be a first start
    assert [code for code, _ in run(patched_ranks, tmp_path, *nowhere)] == [2, 2]
    run(patched_ranks, tmp_path, "--save-interval", "3")
    assert [code for code, _ in run(patched_ranks, tmp_path, *load, "--lr", "2e-3")] == [2, 2]
    shard = tmp_path / "iter_0000006" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    resumed = run(patched_ranks, tmp_path, *load, "--save-interval", "1000")
    assert all(len(each.losses) == 6 for each, _ in resumed)  # steps 4 to 6, two micro-batches each
    view = ledger.read(tmp_path / "stability")
    assert view.runs[-1].resumed_step == 3
    assert [step.step for step in view.surviving] == [1, 2, 3, 4, 5, 6]


@pytest.mark.megatron
def test_another_world_size_goes_on_with_the_same_samples(patched_ranks: Pool, tmp_path: Path) -> None:
    """Saved by two ranks, resumed by one: no rank's own state fits, and the run says so and agrees within tolerance."""
    run(patched_ranks, tmp_path, "--save-interval", "3")
    straight = tmp_path / "straight"
    shutil.move(tmp_path / "iter_0000006", straight)
    run(patched_ranks, tmp_path, "--load", str(tmp_path), "--save-interval", "3", world=1)
    said, close = compare.compare(straight, tmp_path / "iter_0000006", bitwise=False)
    assert close, said
    assert [step.first_sample for step in ledger.read(tmp_path / "stability").surviving] == [0, 8, 16, 24, 32, 40]


@pytest.mark.megatron
@pytest.mark.parametrize("how", [(), kill_around_save.ASYNC], ids=["sync", "async"])
def test_killed_around_saves(patched_ranks: Pool, tmp_path: Path, how: tuple[str, ...]) -> None:
    """The committed drill's fast subset."""
    result = kill_around_save.chain(patched_ranks, tmp_path / "chain", kills=2, seed=7, how=how)
    assert kill_around_save.passed(result), result
