"""The CPU backend: what it replaces and puts back, two generators, and Megatron's own loop on gloo."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from megatron_stability.errors import UsageError
from megatron_stability.megatron import cpu
from tests.dist.pool import Context, Pool
from tests.dist.small_gpt import Run, train

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
LAYOUTS = {
    "dp2-distributed-optimizer": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "vpp2": (*PP2, "--num-layers-per-virtual-pipeline-stage", "1", "--num-layers", "4"),
    "ep2": (
        *("--expert-model-parallel-size", "2", "--num-experts", "4", "--moe-router-topk", "2"),
        *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "1e-2"),
        *("--moe-router-load-balancing-type", "aux_loss"),
    ),
    "muon-tp2": (*TP2, "--optimizer", "muon"),
}


def test_refuses_a_visible_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
        cpu.install()
    assert not cpu.installed()


def test_refuses_transformer_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="Transformer Engine"):
        cpu.install()
    assert not cpu.installed()


def _owners() -> dict[str, dict[str, int]]:
    import megatron.core.datasets.utils as utils

    owners = (
        *(torch, torch.random, torch.cuda, torch.cuda.random, torch.cuda.memory, torch.distributed, torch.Tensor),
        *(torch.utils.data.DataLoader, utils),
    )
    return {repr(owner): {name: id(value) for name, value in vars(owner).items()} for owner in owners}


def install_and_uninstall(context: Context) -> None:
    import megatron.core.datasets.utils  # noqa: F401 - so that its import isn't seen as a change

    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    owners, environment, threads = _owners(), dict(os.environ), torch.get_num_threads()
    torch.manual_seed(7)
    torch.rand(3)
    expected = torch.get_rng_state()

    cpu.install()
    cpu.install()
    assert cpu.installed()
    assert torch.cuda.is_available()
    assert _owners() != owners
    taken = ModuleType("taken_meanwhile")
    taken.zeros, taken.reduce = torch.zeros, dist.reduce_scatter_tensor
    sys.modules[taken.__name__] = taken
    torch.nn.functional.dropout(torch.ones(8, device="cuda"))
    cpu.uninstall()

    assert not cpu.installed()
    assert _owners() == owners
    assert dict(os.environ) == environment
    assert torch.get_num_threads() == threads
    assert not torch.cuda.is_available()
    assert torch.equal(torch.get_rng_state(), expected)
    assert (taken.zeros, taken.reduce) == (torch.zeros, dist.reduce_scatter_tensor)
    with torch.device("meta"):  # torch caches its list of factories: no stand-in may be left there
        assert torch.empty(2).device.type == "meta"
    cpu.uninstall()
    cpu.install()
    assert torch.cuda.current_device() == 0


@pytest.mark.megatron
def test_uninstall_puts_back_every_attribute(ranks: Pool) -> None:
    ranks.run(install_and_uninstall, world=1, timeout=120)


def device_and_host(context: Context) -> None:
    torch.manual_seed(3)
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    loader = torch.utils.data.DataLoader(list(range(8)), shuffle=True, pin_memory=True)
    assert sorted(int(item) for item in loader) == list(range(8))
    torch.rand(4), torch.randperm(4), torch.randint(9, (2,)), torch.randn(2, device="cpu")
    assert torch.equal(torch.cuda.get_rng_state(), device)
    assert not torch.equal(torch.get_rng_state(), host)

    host = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(8), 0.5), torch.rand(4, device="cuda"), torch.empty(3).normal_()
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(torch.cuda.get_rng_state(), device)
    torch.manual_seed(3)
    assert torch.rand(2).tolist() == torch.rand(2, device="cuda").tolist()  # one seed for both

    for place in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), torch.cuda.current_device()):
        weight = torch.zeros(2, device=place, dtype=torch.bfloat16, pin_memory=True)
        assert weight.to(place).cuda().type() == "torch.cuda.BFloat16Tensor"
        assert weight.new_zeros(1, device=place).device.type == "cpu"
    assert weight.to(place) is weight
    assert weight.type("torch.cuda.FloatTensor").dtype == torch.float32
    module = torch.nn.Linear(2, 2, device="cuda").cuda().to("cuda")
    snapshots = module.weight.detach().cpu(), module.weight.detach().to("cpu", non_blocking=True)
    before = module.weight.detach().clone()
    module.weight.data.add_(1)
    assert all(torch.equal(snapshot, before) for snapshot in snapshots)
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
    assert 0 <= start.elapsed_time(end) < math.inf


@pytest.mark.megatron
def test_host_and_device_have_a_generator_each_and_copies_copy(megatron_ranks: Pool) -> None:
    megatron_ranks.run(device_and_host, world=1)


def gloo_gaps(context: Context) -> None:
    rank = context.rank
    splits = torch.tensor([1, 2]) if rank == 0 else torch.tensor([3, 1])
    received = torch.tensor([1, 3]) if rank == 0 else torch.tensor([2, 1])
    output = torch.empty(int(received.sum()))
    dist.all_to_all_single(output, torch.arange(int(splits.sum())) + 10.0 * rank, received, splits, group=context.group)
    assert output.tolist() == ([0.0, 10.0, 11.0, 12.0] if rank == 0 else [1.0, 2.0, 13.0])
    mean = torch.tensor([1.0 + 2 * rank])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=context.group)
    assert mean.item() == 2.0
    shard, terms = torch.empty(1), torch.tensor([1.0, 5.0]) * (1 + 2 * rank)
    dist.reduce_scatter_tensor(shard, terms, op=dist.ReduceOp.AVG, group=context.group)
    assert shard.item() == (2.0 if rank == 0 else 10.0)
    assert terms[0].item() == 1 + 2 * rank


@pytest.mark.megatron
def test_collectives_that_gloo_lacks(megatron_ranks: Pool) -> None:
    megatron_ranks.run(gloo_gaps, world=2)


def _falls(losses: list[float]) -> bool:
    quarter = len(losses) // 4
    return sum(losses[-quarter:]) < sum(losses[:quarter]) and all(map(math.isfinite, losses))


@pytest.mark.megatron
@pytest.mark.parametrize("flags", [pytest.param(TP2, marks=pytest.mark.rare), (*TP2, *PP2)], ids=["tp2", "tp2-pp2"])
def test_dropout_leaves_replicated_weights_bit_identical(megatron_ranks: Pool, flags: tuple[str, ...]) -> None:
    world = 2 ** (len(flags) // 2)
    runs: list[Run] = megatron_ranks.run(train, *flags, world=world, timeout=180)
    assert _falls(runs[-1].losses)
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        assert first.losses == second.losses
        replicated = {name: weight for name, (sharded, weight) in first.weights.items() if not sharded}
        assert replicated
        assert all(torch.equal(weight, second.weights[name][1]) for name, weight in replicated.items())


@pytest.mark.megatron
def test_two_runs_of_a_seed_are_identical(megatron_ranks: Pool) -> None:
    flags = (*PP2, "--train-iters", "6")
    first, second = (megatron_ranks.run(train, *flags, world=2, timeout=180) for _ in range(2))
    other = megatron_ranks.run(train, *flags, "--seed", "99", world=2, timeout=180)
    assert first[1].losses == second[1].losses != other[1].losses
    for one, two in zip(first, second, strict=True):
        assert all(torch.equal(weight, two.weights[name][1]) for name, (_, weight) in one.weights.items())


@pytest.mark.megatron
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains(megatron_ranks: Pool, layout: str) -> None:
    runs = megatron_ranks.run(train, *LAYOUTS[layout], world=2, timeout=180)
    assert _falls(runs[-1].losses)


@pytest.mark.megatron
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_resume_continues_bit_identically(megatron_ranks: Pool, tmp_path: Path, asynchronous: bool) -> None:
    """With an asynchronous save, training goes on while step 4 is written: the file must hold step 4's weights."""
    flags = (*TP2, "--train-iters", "8", "--ckpt-format", "torch_dist")
    how = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore") if asynchronous else ()
    straight = megatron_ranks.run(
        train, *flags, "--save", str(tmp_path), "--save-interval", "4", *how, world=2, timeout=240
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = megatron_ranks.run(train, *flags, "--load", str(tmp_path), world=2, timeout=240)
    for one, two in zip(straight, resumed, strict=True):
        assert one.losses[len(one.losses) // 2 :] == two.losses
        assert all(torch.equal(weight, two.weights[name][1]) for name, (_, weight) in one.weights.items())
