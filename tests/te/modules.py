"""TE's own modules on a CPU, with its recipe states and quantizers; only their GEMMs and casts are missing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

CPU = torch.device("cpu")


def delayed_recipe(length: int = 4, margin: int = 0) -> Any:
    return DelayedScaling(margin=margin, amax_history_len=length, fp8_format=Format.HYBRID, amax_compute_algo="max")


def built(kind: Any, *sizes: int) -> Any:
    with mock.patch.object(torch.cuda, "is_available", return_value=True):  # TE asks, and needs nothing of it here
        return kind(*sizes, bias=False, params_dtype=torch.float32, device="cpu")


def set_up(module: Any, recipe: Any, gemms: int = 1) -> Any:
    """What a module's first forward in FP8 does, on the CPU."""
    module.fp8 = True
    module.fp8_initialized = True
    module.fp8_meta |= {"recipe": recipe, "num_gemms": gemms, "fp8_checkpoint": True, "fp8_group": None}
    for key, mode, tensors in (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2)):
        state = RecipeState.create(recipe, mode=mode, num_quantizers=tensors * gemms, device=CPU)
        module.fp8_meta[key] = state
        module.quantizers[key] = state.make_quantizers()
    module.fp8_meta_tensors_initialized = True
    return module


def linear(recipe: Any = None) -> Any:
    module = built(Linear, 64, 32)
    return module if recipe is None else set_up(module, recipe)


def grouped(recipe: Any, experts: int = 2) -> Any:
    return set_up(built(GroupedLinear, experts, 64, 32), recipe, experts)


def with_norm(recipe: Any) -> Any:
    return set_up(built(LayerNormLinear, 64, 32), recipe)


def mlp(recipe: Any) -> Any:
    return set_up(built(LayerNormMLP, 64, 128), recipe, 2)


def chunk(layer_number: int = 5, **modules: Any) -> torch.nn.Module:
    """A pipeline stage's chunk with one transformer layer: `module.decoder.layers.0`, as DDP wraps it."""
    layer = torch.nn.Module()
    layer.layer_number = layer_number
    layer.mlp = torch.nn.Module()
    for name, module in modules.items():
        setattr(layer.mlp, name, module)
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList([layer])
    inner, outer = torch.nn.Module(), torch.nn.Module()
    inner.decoder, outer.module = decoder, inner
    return outer


def state_of(module: Any) -> torch.Tensor:
    """TE's `_extra_state` of a module."""
    with mock.patch.object(torch.cuda, "synchronize"):
        state: torch.Tensor = module.get_extra_state()
        return state


def as_in_autocast(module: Any) -> Any:
    """A context in which TE takes the module's recipe for the autocast's, and does not ask the device for one."""
    return mock.patch.object(FP8GlobalStateManager, "get_fp8_recipe", return_value=module.fp8_meta.get("recipe"))


def load(module: Any, state: torch.Tensor | None) -> None:
    """TE's own load of it."""
    with as_in_autocast(module), mock.patch.object(torch.cuda, "synchronize"):
        module.set_extra_state(state)
