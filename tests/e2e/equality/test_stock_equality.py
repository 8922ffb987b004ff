"""Off is stock: 30 steps of a patched Megatron end in the same bits as 30 steps of the unpatched one.

Dropout is Megatron's default 0.1, so that every draw of random numbers counts. Off, and observing: neither may be seen
in a loss, a gradient norm, or any entry of the checkpoint (weights, moments, scheduler, generators, sample counts).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stability.megatron import seams
from megatron_stability.megatron.patching import patch_set
from megatron_stability.records import Decision, StepRecord
from tests.dist.pool import Context, Pool
from tests.e2e import artifacts, jobs
from tests.e2e.conftest import RELEASES

pytestmark = pytest.mark.megatron

STEPS = 30
LAYOUTS = {
    "tp2-pp2": ((*jobs.TP2, *jobs.PP2), 4),
    "dp2-distributed-optimizer": (jobs.SHARDED, 2),
    "vpp2": (jobs.VPP2, 2),
}
EVERYDAY = {("0.19.2", "vpp2"), ("0.19.2", "dp2-distributed-optimizer"), ("0.18.2", "tp2-pp2")}


class ReplicatedWeights:
    """Probe: this rank's weights that every tensor rank should hold alike, by name, after the last step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime

    def write(self, record: StepRecord, decision: Decision) -> None:
        if record.step == STEPS:
            weights = [
                (name, weight.detach().clone())
                for chunk in self._runtime.model
                for name, weight in chunk.named_parameters()
                if not getattr(weight, "tensor_model_parallel", False)
            ]
            self.seen = [artifacts.pack(weights)]


def _run(pool: Pool, layout: str, out: Path, mode: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    flags, world = LAYOUTS[layout]
    out_flags = ("--save", str(out), "--tensorboard-dir", str(out / "tensorboard"))
    flags = (*flags, *out_flags, "--train-iters", str(STEPS), "--stability-mode", mode)
    probe = ReplicatedWeights() if mode == "observe" else None
    results = pool.run(jobs.train, flags, probe, world=world, timeout=240)
    assert [code for code, _ in results] == [0] * world
    return jobs.read_checkpoint(pool, out, STEPS), artifacts.scalars(out / "tensorboard"), [seen for _, seen in results]


@pytest.mark.parametrize(
    ("release", "layout"),
    [
        pytest.param(release, layout, marks=[] if (release, layout) in EVERYDAY else pytest.mark.rare)
        for release in RELEASES
        for layout in LAYOUTS
    ],
)
def test_patched_is_stock_to_the_bit(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, release: str, layout: str
) -> None:
    stock, stock_scalars, _ = _run(pools[release, "stock"], layout, tmp_path / "stock", "off")
    tensors = {name: value for name, value in stock.items() if isinstance(value, torch.Tensor)}
    moments = [value for name, value in tensors.items() if name.startswith("optimizer") and "exp_avg" in name]
    assert sum(value.numel() for value in moments) > 180_000  # two for each of some 90 000 weights
    assert any("rng" in name for name in tensors)
    assert any("opt_param_scheduler" in name for name in stock)
    assert len(stock_scalars["lm loss"]) == len(stock_scalars["grad-norm"]) == STEPS
    for mode in ("off", "observe") if release == RELEASES[0] else ("off",):
        state, scalars, seen = _run(pools[release, "patched"], layout, tmp_path / mode, mode)
        assert artifacts.differences(stock, state) == []
        assert {tag: scalars[tag] for tag in stock_scalars} == stock_scalars
        assert any(tag.startswith("stability/") for tag in scalars) == (mode == "observe")
    if layout == "tp2-pp2" and mode == "observe":
        _assert_tensor_ranks_agree(seen)


def _assert_tensor_ranks_agree(weights_by_rank: list[Any]) -> None:
    unpacked = [artifacts.unpack(packed) for (packed,) in weights_by_rank]
    for first, second in zip(unpacked[::2], unpacked[1::2], strict=True):
        assert len(first) == len(second) >= 2  # a stage of one layer has two norms
        for (name, one), (_, other) in zip(first, second, strict=True):
            assert artifacts.same(one, other), name


def train_without_plugin(context: Context, flags: tuple[str, ...]) -> tuple[int, int]:
    """As `jobs.train` where the seam module found no plugin; the exit code, and how many modules have seams."""
    from megatron.core import stability

    opened = [module for name, module in sys.modules.items() if name.startswith("megatron.") and _has_seams(module)]
    assert stability in opened
    for module in opened:
        module.seams = None
    return jobs.train(context, flags)[0], len(opened)


def _has_seams(module: Any) -> bool:
    return vars(module).get("seams") is seams


def test_patched_without_the_plugin_is_stock(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    """What the patches do where `seams` is None: nothing, although the flags ask for action."""
    flags = (*jobs.PP2, "--train-iters", "4", "--save")
    assert pools["0.19.2", "stock"].run(jobs.train, (*flags, str(tmp_path / "stock")), world=2, timeout=120)
    fault = ("--stability-mode", "act", "--stability-record-dir", str(tmp_path / "record"))
    ours = (*flags, str(tmp_path / "patched"), *fault)
    results = pools["0.19.2", "patched"].run(train_without_plugin, ours, world=2, timeout=120)
    opened = len(patch_set.load_patch_set("0.19.2").paths)
    assert results == [(0, opened)] * 2  # the seam module and every file that asks it
    states = [jobs.read_checkpoint(pools["0.19.2", "stock"], tmp_path / name, 4) for name in ("stock", "patched")]
    assert artifacts.differences(*states) == []
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize("release", RELEASES)
def test_the_seam_module_finds_the_plugin_or_none(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = patch_set.load_patch_set(release).apply("megatron/core/stability.py", None)
    module: dict[str, Any] = {}
    exec(text, module)
    assert module["seams"] is seams
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(text, module)
    assert module["seams"] is None
