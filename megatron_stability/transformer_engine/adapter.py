"""Transformer Engine's FP8 state, read and never written; gated on the versions whose names were checked.

2.9 - 2.14   global buffers are class attributes of `FP8GlobalStateManager`
2.15 - 2.20  they stand in `FP8GlobalStateManager.quantization_state`
all          a module's delayed scaling: `fp8_meta["scaling_fwd" | "scaling_bwd"]` with `amax_history` [L, n] and
             `scale` [n]; slots input, weight, output (forward), grad_output, grad_input (backward)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version

from megatron_stability.errors import UsageError

OLDEST, NEWEST = Version("2.9"), Version("2.20")
STATE_MOVED = Version("2.15")
_SLOTS = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "grad_output": ("scaling_bwd", 0)}


@dataclass(frozen=True)
class TensorState:
    """Delayed scaling's state of one tensor: tensors of one element on the device, and the history's length.

    Attributes:
        tensor: input, weight or grad_output.
        staged: amax since the last reduction (row 0).
        amax: newest reduced amax; with a history of 1 TE keeps none, and it is what the scale says.
        scale: the multiplier.
    """

    tensor: str
    staged: torch.Tensor
    amax: torch.Tensor
    scale: torch.Tensor


def version() -> Version:
    """The installed version.

    Returns:
        The base wheel's version.

    Raises:
        UsageError: there is none, or its internals were not checked.
    """
    try:
        found = Version(metadata.version("transformer_engine"))
    except metadata.PackageNotFoundError:
        raise UsageError("Transformer Engine is not installed; `megatron-stability doctor` says more") from None
    if not OLDEST <= Version(f"{found.major}.{found.minor}") <= NEWEST:
        raise UsageError(
            f"Transformer Engine {found} is outside of {OLDEST} to {NEWEST}, for which its FP8 state was checked; "
            "install one of these, or turn FP8 telemetry off"
        )
    return found


def global_state() -> Any:
    """The object that holds TE's global buffers.

    Returns:
        The class itself up to 2.14, its `quantization_state` from 2.15 on.

    Raises:
        UsageError: something moved; names it.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    holder = FP8GlobalStateManager
    if version() >= STATE_MOVED:
        holder = _attribute(holder, "quantization_state")
    for name in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        _attribute(holder, name)
    return holder


def fp8_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of TE's modules that run GEMMs in FP8 now: built, and quantizing rather than calibrating."""
    for name, module in model.named_modules():
        if hasattr(module, "fp8_meta") and getattr(module, "fp8", False):
            yield name, module


def gemm_modules(model: torch.nn.Module) -> list[str]:
    """Names of TE's modules that could run GEMMs in FP8."""
    return [name for name, module in model.named_modules() if hasattr(module, "fp8_meta")]


def delayed(module: Any, margin: int = 0) -> list[TensorState]:
    """Delayed scaling's state of a module's first GEMM; empty for recipes without state.

    Args:
        module: a TE module.
        margin: the recipe's.

    Returns:
        One entry a tensor, in the order input, weight, grad_output.

    Raises:
        UsageError: something moved; names it.
    """
    found = []
    for tensor, (key, slot) in _SLOTS.items():
        state = module.fp8_meta.get(key)
        if state is None or not hasattr(state, "amax_history"):
            continue
        history, scale = _attribute(state, "amax_history"), _attribute(state, "scale")
        fmt_max = 448.0 if key == "scaling_fwd" or _is_e4m3(module) else 57344.0
        newest = history[-1, slot] if history.shape[0] > 1 else fmt_max / (scale[slot] * 2**margin)
        found.append(TensorState(tensor, history[0, slot], newest, scale[slot]))
    return found


def current(quantized: Any, fmt_max: float) -> torch.Tensor:
    """[1] amax of a tensor quantized by current scaling, from its inverse scale.

    Args:
        quantized: TE's tensor.
        fmt_max: largest value of its format.

    Returns:
        The amax, on the tensor's device.

    Raises:
        UsageError: TE's tensor has no `_scale_inv` any more.
    """
    inverse: torch.Tensor = _attribute(quantized, "_scale_inv")
    return inverse * fmt_max


def extra_state_is_empty(state: torch.Tensor | None) -> bool:
    """Whether a module's `_extra_state` in a checkpoint holds nothing: right for recipes without state only."""
    return state is None or math.prod(state.shape) == 0


def _is_e4m3(module: Any) -> bool:
    recipe = module.fp8_meta.get("recipe")
    return recipe is not None and str(recipe.fp8_format).endswith("E4M3")


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        kind = getattr(holder, "__name__", type(holder).__name__)
        raise UsageError(
            f"Transformer Engine {metadata.version('transformer_engine')} has no {kind}.{name}, which FP8 telemetry "
            f"reads; install a version from {OLDEST} to {NEWEST}"
        ) from None
