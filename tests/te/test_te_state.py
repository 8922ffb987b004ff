"""Delayed scaling's state in checkpoints, in TE's own `_extra_state`: recognised, restored, verified."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformer_engine.common import recipe
from transformer_engine.pytorch import quantization

from megatron_stability.errors import UsageError
from megatron_stability.transformer_engine import extra_state
from megatron_stability.transformer_engine.hook import TransformerEngineHook
from tests.te import modules
from tests.te.runs import a_run

PLACE = "model.decoder.layers.0.mlp.linear_fc1._extra_state"


def trained(module: Any, steps: int = 3) -> Any:
    """TE's own updates over some steps, of other values in each."""
    for step in range(1, steps + 1):
        for key, largest in (("scaling_fwd", 448.0), ("scaling_bwd", 57344.0)):
            state = module.fp8_meta[key]
            state.amax_history[0] = torch.arange(1.0, state.scale.numel() + 1) * step
            quantization._amax_and_scale_update(state.amax_history, state.scale, largest, module.fp8_meta["recipe"])
    return module


def hook_of(module: Any, **changes: Any) -> TransformerEngineHook:
    return TransformerEngineHook([modules.chunk(linear_fc1=module)], modules.CPU, a_run(**changes))


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extra_state.ALLOW, "1")


def test_extra_states_are_recognised_without_unpickling() -> None:
    delayed = modules.state_of(trained(modules.linear(modules.delayed_recipe())))
    current = modules.state_of(modules.linear(recipe.Float8CurrentScaling()))
    assert delayed.dtype == torch.uint8
    assert extra_state.kind(delayed) == "delayed"
    assert extra_state.kind(io.BytesIO(bytes(delayed.tolist()))) == "delayed"
    assert extra_state.kind(current) in ("empty", "stateless")
    assert extra_state.kind(modules.state_of(modules.linear())) == "empty"
    assert extra_state.kind(None) == "missing"
    assert extra_state.kind(delayed[:-20]) == "damaged"
    assert extra_state.kind(torch.zeros(3)) == "damaged"
    bomb = b"cos\nsystem\n(S'exit 3'\ntR."
    assert extra_state.kind(torch.frombuffer(bytearray(bomb), dtype=torch.uint8)) == "stateless", "and nothing ran"
    read = {"model": {PLACE.removeprefix("model."): delayed, "x.weight": torch.ones(1)}, "args": {"_extra_state": None}}
    assert extra_state.survey(read) == {PLACE: "delayed"}
    experts = {"model0": {"a._extra_state": None, "a._extra_state1": delayed}, "model1": {}}
    assert extra_state.survey(experts) == {"model0.a._extra_state": "missing", "model0.a._extra_state1": "delayed"}


@pytest.mark.parametrize("length", [1, 4])
def test_a_state_that_te_restored_is_accepted_and_another_is_not(length: int) -> None:
    saver = trained(modules.linear(modules.delayed_recipe(length)))
    saved = hook_of(saver).state_dict()
    assert list(saved["linears"]) == ["decoder.layers.4.mlp.linear_fc1"]
    loader = modules.linear(modules.delayed_recipe(length))
    modules.load(loader, modules.state_of(saver))
    assert torch.equal(loader.fp8_meta["scaling_bwd"].scale, saver.fp8_meta["scaling_bwd"].scale)
    loader.fp8_meta["scaling_fwd"].amax_history[0] += 1.0  # of this rank alone, until it is reduced
    hook_of(loader).load_state_dict(saved)
    loader.fp8_meta["scaling_bwd"].scale[0] *= 2
    with pytest.raises(UsageError, match=r"iteration 20 gave decoder.layers.4.mlp.linear_fc1 another FP8"):
        hook_of(loader).load_state_dict(saved)


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_a_state_that_was_dropped_is_refused_or_recalibrated(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron drops `_extra_state` in silence, and TE begins at scale 1."""
    saved = hook_of(trained(modules.linear(modules.delayed_recipe()))).state_dict()
    loaded = {PLACE: "empty"} if kind == "empty" else {}
    for fresh in (modules.linear(), modules.linear(modules.delayed_recipe())):  # before and after its first forward
        modules.load(fresh, torch.empty(0, dtype=torch.uint8) if kind == "empty" else None)
        hook = hook_of(fresh, loaded=lambda: loaded)
        with pytest.raises(UsageError, match=rf"gave decoder.*linear_fc1 no FP8 scaling state .*checkpoint: {kind}\)"):
            hook.load_state_dict(saved)
        with pytest.raises(UsageError, match="has no FP8 scaling state for delayed scaling") as error:
            hook.load_state_dict(None)  # saved without the plugin
        assert "--stability-fp8-recalibrate" in str(error.value)
        hook_of(fresh, recalibrate=7).load_state_dict(saved)
        assert "steps up to 27" in capsys.readouterr().out


def test_recipes_without_state_load_from_nothing() -> None:
    for stateless, name in ((recipe.Float8CurrentScaling(), "tensorwise"), (recipe.Float8BlockScaling(), "blockwise")):
        hook = hook_of(modules.linear(stateless), recipe=name)
        hook.load_state_dict(None)
        assert hook.state_dict() == {"recipe": name, "linears": {}}


def test_te_itself_refuses_its_pickle_where_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = trained(modules.linear(modules.delayed_recipe()))
    monkeypatch.delenv(extra_state.ALLOW)
    hook_of(saver).train_begins()
    told = extra_state.ALLOW in capsys.readouterr().out
    assert told == extra_state.needs_permission()
    if told:
        with pytest.raises(RuntimeError, match=extra_state.ALLOW):
            modules.load(modules.linear(modules.delayed_recipe()), modules.state_of(saver))
    else:
        modules.load(modules.linear(modules.delayed_recipe()), modules.state_of(saver))
    assert extra_state.ALLOW not in os.environ


def test_a_withheld_step_puts_the_state_back_until_stale_scales_are_why() -> None:
    module = trained(modules.linear(modules.delayed_recipe(1)))
    hook = hook_of(module)
    before = [each.clone() for each in (module.fp8_meta["scaling_fwd"].scale, module.fp8_meta["scaling_bwd"].scale)]
    for skip in (1, 2, 3):
        hook.step_begins(skip)
        hot = module.fp8_meta["scaling_fwd"]
        hot.amax_history[0] = torch.tensor([900.0, 2.0, 3.0])
        quantization._amax_and_scale_update(hot.amax_history, hot.scale, 448.0, module.fp8_meta["recipe"])
        hook.update_done(SimpleNamespace(step=skip), updated=False)  # type: ignore[arg-type]
        kept = torch.equal(hot.scale, before[0]) and torch.equal(module.fp8_meta["scaling_bwd"].scale, before[1])
        assert kept == (skip < 3)
    assert float(hot.scale[0]) == pytest.approx(448.0 / 900.0)
