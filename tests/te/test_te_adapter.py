"""The adapter on TE's own recipe state and global buffers, in every pinned version."""

from types import SimpleNamespace

import pytest
import torch
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.quantization import DelayedScalingRecipeState, FP8GlobalStateManager

from megatron_stability.errors import UsageError
from megatron_stability.transformer_engine import adapter


class FakeLinear(torch.nn.Module):
    """A module's FP8 attributes, with TE's own recipe states."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.recipe = DelayedScaling(amax_history_len=length, fp8_format=Format.HYBRID, amax_compute_algo="max")
        states = {
            "scaling_fwd": DelayedScalingRecipeState(self.recipe, mode="forward", num_quantizers=3, device="cpu"),
            "scaling_bwd": DelayedScalingRecipeState(self.recipe, mode="backward", num_quantizers=2, device="cpu"),
        }
        self.fp8 = True
        self.fp8_meta = {"recipe": self.recipe, "fp8_group": None, **states}


@pytest.mark.parametrize("length", [1, 4])
def test_delayed_state_is_read_after_tes_own_update(length: int) -> None:
    module = FakeLinear(length)
    module.fp8_meta["scaling_fwd"].amax_history[0] = torch.tensor([2.0, 0.5, 0.0])
    module.fp8_meta["scaling_bwd"].amax_history[0] = torch.tensor([8.0, 0.0])
    assert [float(s.staged) for s in adapter.delayed(module)] == [2.0, 0.5, 8.0]
    for key, largest in (("scaling_fwd", 448.0), ("scaling_bwd", 57344.0)):
        state = module.fp8_meta[key]
        quantization._amax_and_scale_update(state.amax_history, state.scale, largest, module.recipe)
    states = adapter.delayed(module)
    assert [s.tensor for s in states] == ["input", "weight", "grad_output"]
    assert [float(s.amax) for s in states] == [2.0, 0.5, 8.0]
    assert [float(s.scale) for s in states] == [224.0, 896.0, 7168.0]
    assert [float(s.staged) for s in states] == [0.0, 0.0, 0.0]


def test_global_buffers_are_where_this_version_has_them() -> None:
    module = FakeLinear(2)
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


def test_only_modules_in_fp8_count_as_fp8() -> None:
    model = torch.nn.Sequential(FakeLinear(1), FakeLinear(1), torch.nn.Linear(2, 2))
    model[1].fp8 = False
    assert [name for name, _ in adapter.fp8_modules(model)] == ["0"]
    assert adapter.gemm_modules(model) == ["0", "1"]


def test_the_hook_counts_gemms_and_reports_a_rise() -> None:
    from megatron_stability.sites import Site
    from megatron_stability.transformer_engine.hook import TransformerEngineHook

    layer = torch.nn.Module()
    layer.layer_number, layer.linear_fc1, layer.linear_fc2 = 5, FakeLinear(4), FakeLinear(4)
    layer.linear_fc2.fp8 = False
    chunk = torch.nn.Module()
    chunk.layer = layer
    hook = TransformerEngineHook([chunk], torch.device("cpu"))
    forward = layer.linear_fc1.fp8_meta["scaling_fwd"]
    for amax in [2.0] * 8 + [200.0]:
        forward.amax_history[0] = torch.tensor([amax, 1.0, 0.0])
        quantization._amax_and_scale_update(forward.amax_history, forward.scale, 448.0, layer.linear_fc1.recipe)
        signals = {name: float(value) for name, value in hook.observe().items()}
        hook.update_done(None, amax == 2.0)
    assert (signals["fp8/gemms"], signals["fp8/fallbacks"]) == (2.0, 1.0)
    assert signals["fp8/amax_rise"] == pytest.approx(100.0)
    assert Site.at(signals["fp8/amax_rise/at"]) == Site(5, "linear_fc1", "input")
