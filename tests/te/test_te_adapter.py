"""The adapter on TE's own modules, recipe states and global buffers, in every pinned version."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.pytorch import DotProductAttention, quantization
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron_stability.errors import UsageError
from megatron_stability.sites import Site
from megatron_stability.transformer_engine import adapter
from megatron_stability.transformer_engine.hook import TransformerEngineHook
from tests.te import modules
from tests.te.runs import a_run


@pytest.mark.parametrize("length", [1, 4])
def test_delayed_state_is_read_after_tes_own_update(length: int) -> None:
    module = modules.linear(modules.delayed_recipe(length))
    module.fp8_meta["scaling_fwd"].amax_history[0] = torch.tensor([2.0, 0.5, 0.0])
    module.fp8_meta["scaling_bwd"].amax_history[0] = torch.tensor([8.0, 0.0])
    assert [float(s.staged) for s in adapter.delayed(module)] == [2.0, 0.5, 8.0]
    for key, largest in (("scaling_fwd", 448.0), ("scaling_bwd", 57344.0)):
        state = module.fp8_meta[key]
        quantization._amax_and_scale_update(state.amax_history, state.scale, largest, module.fp8_meta["recipe"])
    states = adapter.delayed(module)
    assert [s.tensor for s in states] == ["input", "weight", "grad_output"]
    assert [float(s.amax) for s in states] == [2.0, 0.5, 8.0]
    assert [float(s.scale) for s in states] == [224.0, 896.0, 7168.0]
    assert [float(s.staged) for s in states] == [0.0, 0.0, 0.0]


def test_every_gemm_of_a_module_is_read_from_the_slot_of_its_own_quantizer() -> None:
    """Experts of GroupedLinear, fc1 and fc2 of LayerNormMLP: the scales that TE gave to its quantizers."""
    for module in (modules.grouped(modules.delayed_recipe()), modules.mlp(modules.delayed_recipe())):
        for key in ("scaling_fwd", "scaling_bwd"):
            scale = module.fp8_meta[key].scale
            scale.copy_(torch.arange(1.0, scale.numel() + 1) * (1 if key == "scaling_fwd" else 100))
        states = adapter.delayed(module)
        assert [(s.gemm, s.tensor) for s in states] == [
            (g, t) for g in (0, 1) for t in ("input", "weight", "grad_output")
        ]
        for state in states:
            backward = state.tensor == "grad_output"
            slot = state.gemm * (2 if backward else 3) + (state.tensor == "weight")
            quantizer = module.quantizers["scaling_bwd" if backward else "scaling_fwd"][slot]
            assert float(state.scale) == float(quantizer.scale)


def test_sites_say_which_expert_and_which_of_an_mlps_linears() -> None:
    numbers = {"decoder.layers.0": 5}
    experts, mlp = modules.grouped(modules.delayed_recipe()), modules.mlp(modules.delayed_recipe())
    name = "decoder.layers.0.mlp.experts.linear_fc2"
    assert adapter.site(name, experts, 1, "input", numbers) == Site(5, "linear_fc2", "input", 1)
    assert adapter.site("decoder.layers.0.mlp", mlp, 1, "weight", numbers) == Site(5, "linear_fc2", "weight")
    assert adapter.gemm_suffixes(experts) == (".gemm_0", ".gemm_1")
    assert adapter.gemm_suffixes(mlp) == (".fc1", ".fc2")


def test_global_buffers_are_where_this_version_has_them() -> None:
    module = modules.linear(modules.delayed_recipe(2))
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
    buffers = adapter.global_state().global_scale_buffer
    held = [scale for scales in buffers.values() for scale in scales]
    assert any(scale is module.fp8_meta["scaling_fwd"].scale for scale in held)


def test_a_moved_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = adapter.global_state()
    target = holder if isinstance(holder, type) else type(holder)
    fake = SimpleNamespace(**{n: getattr(holder, n) for n in ("global_amax_buffer", "global_amax_history_buffer")})
    if isinstance(holder, type):
        monkeypatch.delattr(target, "global_scale_buffer")
    else:
        monkeypatch.setattr(FP8GlobalStateManager, "quantization_state", fake)
    with pytest.raises(UsageError, match="global_scale_buffer"):
        adapter.global_state()


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in ("2.8.0", "2.21.0", "3.0"):
        monkeypatch.setattr(adapter.metadata, "version", lambda name, number=number: number)
        with pytest.raises(UsageError, match=number):
            adapter.version()


def test_attention_has_fp8_state_and_is_no_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = DotProductAttention.__new__(DotProductAttention)
    torch.nn.Module.__init__(attention)
    attention.fp8_meta, attention.fp8 = {}, False
    chunk = modules.chunk(linear_fc1=modules.linear(), norm=modules.with_norm(modules.delayed_recipe()), core=attention)
    found = dict(adapter.gemm_modules(chunk))
    assert [name.rpartition(".")[2] for name in found] == ["linear_fc1", "norm"]
    assert [adapter.runs_in_fp8(module) for module in found.values()] == [False, True]


def test_the_hook_counts_gemms_reports_a_rise_and_names_modules_as_checkpoints_do() -> None:
    hot, cold = modules.linear(modules.delayed_recipe()), modules.linear()
    hook = TransformerEngineHook([modules.chunk(linear_fc1=hot, linear_fc2=cold)], modules.CPU, a_run())
    assert (hot.name, cold.name) == ("decoder.layers.4.mlp.linear_fc1", "decoder.layers.4.mlp.linear_fc2")
    forward = hot.fp8_meta["scaling_fwd"]
    for amax in [2.0] * 8 + [200.0]:
        hook.step_begins(1)
        forward.amax_history[0] = torch.tensor([amax, 1.0, 0.0])
        quantization._amax_and_scale_update(forward.amax_history, forward.scale, 448.0, hot.fp8_meta["recipe"])
        signals = {name: float(value) for name, value in hook.observe().items()}
        hook.update_done(SimpleNamespace(step=1), amax == 2.0)
    assert (signals["fp8/gemms"], signals["fp8/fallbacks"]) == (2.0, 1.0)
    assert signals["fp8/amax_rise"] == pytest.approx(100.0)
    assert Site.at(signals["fp8/amax_rise/at"]) == Site(5, "linear_fc1", "input")


class Kernels(TorchDispatchMode):
    """Operations that compute; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_step_s_operations_do_not_grow_with_the_modules() -> None:
    counts = []
    for number in (1, 8):
        linears = {f"linear_fc{n}": modules.linear(modules.delayed_recipe()) for n in range(number)}
        hook = TransformerEngineHook([modules.chunk(**linears)], modules.CPU, a_run())
        for step in (1, 2):
            hook.step_begins(step)
            with Kernels() as mode:
                hook.observe()
            hook.update_done(SimpleNamespace(step=step), True)
        counts.append(mode.count)
    assert counts[0] == counts[1]


def test_state_that_tes_load_replaced_is_found_anew() -> None:
    module = modules.linear(modules.delayed_recipe())
    hook = TransformerEngineHook([modules.chunk(linear_fc1=module)], modules.CPU, a_run())
    hook.step_begins(1)
    hook.observe()
    state = module.fp8_meta["scaling_fwd"]
    state.scale, state.amax_history = torch.full_like(state.scale, 7.0), torch.full_like(state.amax_history, 3.0)
    hook.step_begins(2)
    hook.observe()
    amax, scale = hook._seen
    assert amax.tolist() == [3.0, 3.0, 0.0]
    assert scale.tolist() == [7.0, 7.0, 1.0]


@pytest.mark.parametrize(("margin", "left"), [(0, 14.8), (8, 6.8)])
def test_binades_are_those_that_the_steps_own_scale_left(margin: int, left: float) -> None:
    """Of the scale that the forward used, not of the one that TE made of this step's amax after it."""
    module = modules.linear(modules.delayed_recipe(margin=margin))
    hook = TransformerEngineHook([modules.chunk(linear_fc1=module)], modules.CPU, a_run(margin=margin))
    seen = []
    for amax in (2.0, 2.0, 2.0, 1.0):
        hook.step_begins(1)
        for key, row, largest in (("scaling_fwd", [amax, 2.0, 0.0], 448.0), ("scaling_bwd", [8.0, 0.0], 57344.0)):
            state = module.fp8_meta[key]
            state.amax_history[0] = torch.tensor(row)
            quantization._amax_and_scale_update(state.amax_history, state.scale, largest, module.fp8_meta["recipe"])
        seen.append(hook.observe())
        hook.update_done(SimpleNamespace(step=1), True)
    values = [float(signals["fp8/binades"]) for signals in seen]
    assert math.isnan(values[0]), "the first forward has the scale of 1 that TE begins with"
    assert values[1:] == pytest.approx([left, left, left - 1], abs=0.01)
    place = float(seen[-1]["fp8/binades/at"])
    assert math.isnan(place) if margin == 0 else Site.at(place) == Site(5, "linear_fc1", "input")
