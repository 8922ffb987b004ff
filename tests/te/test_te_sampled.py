"""Sampled counts through the real nvdlfw-inspect and TE's own debug quantizers; only the FP8 cast is a stand-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvdlfw_inspect.api as api
import pytest
import torch
import torch.distributed as dist
from transformer_engine.common import recipe
from transformer_engine.debug.pytorch.debug_state import TEDebugState

from megatron_stability.errors import UsageError
from megatron_stability.numerics.fp8 import recipes
from megatron_stability.numerics.fp8.formats import E4M3, E5M2, amax
from megatron_stability.numerics.fp8.recipes import Recipe
from megatron_stability.numerics.fp8.stats import read, tensor_stats
from megatron_stability.sites import Site
from megatron_stability.transformer_engine import sampled
from megatron_stability.transformer_engine.hook import TransformerEngineHook
from tests.te import modules
from tests.te.runs import a_run

RECIPES = {
    "delayed": modules.delayed_recipe,
    "tensorwise": recipe.Float8CurrentScaling,
    "blockwise": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
}


@pytest.fixture
def stage() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled cast: what the feature reads of its result is the inverse scale of current scaling."""

    def quantize(tensor: torch.Tensor, quantizer: Any, *rest: Any) -> Any:
        scale = recipes.current_scale(amax(tensor), sampled.format_of(quantizer))
        return SimpleNamespace(_scale_inv=scale.reciprocal().reshape(1))

    monkeypatch.setattr(sys.modules["transformer_engine_torch"], "quantize", quantize, raising=False)


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "activation": torch.randn(128, 64, generator=g) * torch.logspace(-6, 2, 64),
        "weight": torch.randn(32, 64, generator=g) * 0.02,
        "gradient": torch.randn(128, 32, generator=g) * 1e-6,
    }


def one_step(hook: TransformerEngineHook, module: Any, step: int, micro_batches: int = 2) -> bool:
    """What TE's Linear does of a step in debug mode, but for the GEMMs; whether any feature looked."""
    hook.step_begins(step)
    seen = False
    for _ in range(micro_batches):
        if not module.is_debug_iter():
            continue
        with modules.as_in_autocast(module):
            quantizers = module._get_debug_quantizers(False, False, True)
        if module.no_debug_features_active(quantizers):
            continue
        seen = True
        by_name = {quantizer.tensor_name: quantizer for quantizer in quantizers}
        for name, tensor in tensors().items():
            by_name[name].quantize(tensor)
    return seen


@pytest.mark.parametrize("name", RECIPES)
def test_counts_are_those_of_the_recipe_and_go_to_the_stages_file(name: str, stage: Any, tmp_path: Path) -> None:
    sampled.begin(4, tmp_path / "inspect")
    module = modules.linear(RECIPES[name]())
    if name == "delayed":
        module.fp8_meta["scaling_fwd"].scale.copy_(torch.tensor([7.0, 0.05, 1.0]))
        module.fp8_meta["scaling_bwd"].scale.fill_(100.0)
    run = a_run(recipe=name, sample_every=4, stage_group=stage, folder=tmp_path)
    hook = TransformerEngineHook([modules.chunk(linear_fc1=module)], modules.CPU, run)
    assert [one_step(hook, module, step) for step in range(1, 4)] == [False] * 3
    assert not set(hook.observe()) & {"fp8/saturation", "fp8/underflow"}
    assert one_step(hook, module, 4)
    signals = hook.observe()
    (line,) = map(json.loads, (tmp_path / "fp8.stage1.jsonl").read_text().splitlines())
    assert (line["step"], line["stage"], line["recipe"], line["emulated"]) == (4, 1, name, False)
    assert line["kernel"].startswith("transformer_engine 2.")
    for row, (te_name, x) in zip(line["tensors"], tensors().items(), strict=True):
        assert (row["layer"], row["module"], row["tensor"]) == (5, "linear_fc1", sampled.TENSORS[te_name])
        fmt = E5M2 if te_name == "gradient" and name in ("delayed", "tensorwise") else E4M3
        if name == "delayed":
            scale = {"activation": 7.0, "weight": 0.05, "gradient": 100.0}[te_name]
            want = read(tensor_stats(x, torch.tensor(scale), fmt))
            assert row["scale"] == pytest.approx(scale)
        else:
            own = Recipe(name={"tensorwise": "current", "blockwise": "block"}.get(name, name))  # type: ignore[arg-type]
            want = read(own.stats(x, fmt, torch.ones(1), weight=te_name == "weight"))
        assert row["elements"] == want.elements * (1 if te_name == "weight" else 2), "a weight counts once"
        assert (row["saturation"], row["underflow"]) == (want.saturation, want.underflow)
        assert row["amax"] == want.amax
        assert row["snr_db"] == pytest.approx(want.snr_db)
    if name == "delayed":
        assert signals["fp8/saturation"] > 0
        assert Site.at(float(signals["fp8/saturation/at"])) == Site(5, "linear_fc1", "input")
        assert signals["fp8/underflow"] > 0.5
    assert [one_step(hook, module, step) for step in (5, 6, 7, 8)] == [False, False, False, True]


def test_a_module_that_did_not_run_is_unknown_and_not_zero(stage: Any, tmp_path: Path) -> None:
    sampled.begin(1, tmp_path / "inspect")
    idle = modules.linear(modules.delayed_recipe())
    hook = TransformerEngineHook(
        [modules.chunk(linear_fc1=idle)], modules.CPU, a_run(sample_every=1, stage_group=stage, folder=tmp_path)
    )
    hook.step_begins(1)
    assert hook.observe()["fp8/saturation"].isnan()
    row = json.loads((tmp_path / "fp8.stage1.jsonl").read_text())["tensors"][0]
    assert (row["elements"], row["saturation"], row["scale"]) == (0, "nan", "nan")


def test_without_it_te_stays_on_its_fast_path() -> None:
    module = modules.linear(modules.delayed_recipe())
    hook = TransformerEngineHook([modules.chunk(linear_fc1=module)], modules.CPU, a_run())
    assert sampled.running() is None
    assert not one_step(hook, module, 1)
    assert not TEDebugState.debug_enabled


def test_a_second_user_of_nvdlfw_inspect_is_refused(tmp_path: Path) -> None:
    sampled.begin(1, tmp_path)
    with pytest.raises(UsageError, match="runs already"):
        sampled.begin(1, tmp_path)
    assert sampled.running() is not None
    api.end_debug()
    assert sampled.running() is None


def test_what_moved_is_named(stage: Any) -> None:
    take = sampled.Samples().take
    x = torch.ones(2, 2)
    (quantizer, *_) = modules.linear(recipe.Float8CurrentScaling()).quantizers["scaling_fwd"]
    with pytest.raises(UsageError, match=r"no SimpleNamespace._scale_inv"):
        take("a", "input", x, SimpleNamespace(), quantizer)
    other = type("Float8NextQuantizer", (), {"dtype": quantizer.dtype})()
    with pytest.raises(UsageError, match="does not know TE's Float8NextQuantizer"):
        take("a", "input", x, x, other)
