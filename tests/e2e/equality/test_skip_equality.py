"""A skip leaves no trace: a run that skips step k ends as a stock run that never ran it (`--iterations-to-skip k`).

Dropout is 0, since a skipped step did run its forward and drew its random numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.pool import Pool
from tests.e2e import artifacts, jobs

pytestmark = pytest.mark.megatron

type Pools = dict[tuple[str, str], Pool]

STEPS, SKIPPED = 8, 5
# The host's own count of what it skipped and of its arithmetic; the same step, counted under another name.
COUNTERS = ("skipped_train_samples", "num_floating_point_operations_so_far")
LAYOUTS = {
    "tp2-pp2": ((*jobs.TP2, *jobs.PP2), 4),
    "dp2-distributed-optimizer": (jobs.SHARDED, 2),
    "pp2-dp2-distributed-optimizer": ((*jobs.PP2, *jobs.SHARDED), 4),
}
OPTIMIZERS = {"adam": (), "muon": ("--optimizer", "muon")}


def _run(pools: Pools, kind: tuple[str, str], flags: tuple[str, ...], world: int, out: Path) -> Any:
    base = ("--save", str(out), "--train-iters", str(STEPS), "--hidden-dropout", "0", "--attention-dropout", "0")
    results = pools[kind].run(jobs.train, (*base, *flags), world=world, timeout=180)
    assert [code for code, _ in results] == [0] * world
    return jobs.read_checkpoint(pools[kind], out, STEPS)


def _compare(pools: Pools, release: str, flags: tuple[str, ...], world: int, tmp_path: Path) -> dict[str, Any]:
    stock = _run(
        pools, (release, "stock"), (*flags, "--iterations-to-skip", str(SKIPPED)), world, tmp_path / "passed-over"
    )
    fault = ("--drill-fault", f"nan:step={SKIPPED},rank={world - 1}", "--stability-mode", "act")
    ours = _run(pools, (release, "patched"), (*flags, *fault), world, tmp_path / "skipped")
    assert artifacts.differences(stock, ours, excluded=COUNTERS) == []
    tensors = {name: value for name, value in ours.items() if isinstance(value, torch.Tensor)}
    moments = [value for name, value in tensors.items() if "exp_avg" in name or "momentum_buffer" in name]
    assert sum(value.numel() for value in moments) > 50_000  # of some 90 000 weights
    assert all(torch.isfinite(value).all() for value in tensors.values())
    return ours


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("tp2-pp2", "adam"),
        pytest.param("tp2-pp2", "muon", marks=pytest.mark.rare),
        pytest.param("dp2-distributed-optimizer", "adam", marks=pytest.mark.rare),
        ("dp2-distributed-optimizer", "muon"),
    ],
)
def test_dense(pools: Pools, tmp_path: Path, layout: str, optimizer: str) -> None:
    flags, world = LAYOUTS[layout]
    _compare(pools, "0.19.2", (*flags, *OPTIMIZERS[optimizer]), world, tmp_path)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("dp2-distributed-optimizer", "adam"),
        pytest.param("dp2-distributed-optimizer", "muon", marks=pytest.mark.rare),
        pytest.param("pp2-dp2-distributed-optimizer", "adam", marks=pytest.mark.rare),
        pytest.param("pp2-dp2-distributed-optimizer", "muon", marks=pytest.mark.rare),
    ],
)
def test_mixture_of_experts(pools: Pools, tmp_path: Path, layout: str, optimizer: str) -> None:
    """Megatron refuses MoE with tensor parallelism unless sequence parallelism is on."""
    flags, world = LAYOUTS[layout]
    state = _compare(pools, "0.19.2", (*flags, *jobs.MOE, *OPTIMIZERS[optimizer]), world, tmp_path)
    biases = [value for name, value in state.items() if name.endswith("expert_bias")]
    assert biases
    assert any(bias.count_nonzero() for bias in biases)


def test_older_release(pools: Pools, tmp_path: Path) -> None:
    flags, world = LAYOUTS["tp2-pp2"]
    _compare(pools, "0.18.2", flags, world, tmp_path)


def test_a_step_that_is_not_skipped_does_leave_a_trace(pools: Pools, tmp_path: Path) -> None:
    """The comparison can fail: the same run without the skip differs in weights and moments."""
    flags, world = LAYOUTS["dp2-distributed-optimizer"]
    passed_over = (*flags, "--iterations-to-skip", str(SKIPPED))
    one = _run(pools, ("0.19.2", "stock"), passed_over, world, tmp_path / "one")
    two = _run(pools, ("0.19.2", "patched"), (*flags, "--stability-mode", "act"), world, tmp_path / "two")
    different = artifacts.differences(one, two, excluded=COUNTERS)
    assert any("exp_avg" in name for name in different)
    assert any(name.startswith("decoder") for name in different)
