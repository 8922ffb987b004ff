"""Transformer Engine's FP8 state, read and never written; gated on the versions whose names were checked.

2.9 - 2.14   global buffers are class attributes of `FP8GlobalStateManager`
2.15 - 2.20  they stand in `FP8GlobalStateManager.quantization_state`
all          a module's delayed scaling: `fp8_meta["scaling_fwd" | "scaling_bwd"]` with `amax_history` [L, n] and
             `scale` [n]; slots input, weight, output (forward), grad_output, grad_input (backward), again for each of
             a module's GEMMs (the experts of GroupedLinear, fc1 and fc2 of LayerNormMLP)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version

from megatron_stability.errors import UsageError
from megatron_stability.numerics.fp8.formats import E4M3, E5M2, Fp8Format
from megatron_stability.sites import Site

OLDEST, NEWEST = Version("2.9"), Version("2.20")
STATE_MOVED = Version("2.15")
_SLOTS = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "grad_output": ("scaling_bwd", 0)}
_SLOTS_OF_A_GEMM = {"scaling_fwd": 3, "scaling_bwd": 2}


@dataclass(frozen=True)
class TensorState:
    """Where delayed scaling keeps its state of one tensor; nothing is read before it is asked for.

    Attributes:
        gemm: 0-based, of the module's.
        tensor: input, weight or grad_output.
        history: [L, n] TE's own tensor, of which this tensor's column is `slot`.
        scales: [n] the multipliers; TE's own tensor.
        slot: there.
        format: that the tensor is quantized to.
        margin: the recipe's.
    """

    gemm: int
    tensor: str
    history: torch.Tensor
    scales: torch.Tensor
    slot: int
    format: Fp8Format
    margin: int

    @property
    def staged(self) -> torch.Tensor:
        """[] amax since the last reduction (row 0)."""
        return self.history[0, self.slot]

    @property
    def amax(self) -> torch.Tensor:
        """[] newest reduced amax, as `Slots.amax`."""
        return Slots([self]).amax()[0]

    @property
    def scale(self) -> torch.Tensor:
        """[] the multiplier."""
        return self.scales[self.slot]


class Slots:
    """Delayed scaling's state of many tensors, each kind read by one `cat` and one selection.

    Attributes:
        least_normal: [n] fp32 of each tensor's format.
    """

    def __init__(self, states: Sequence[TensorState]) -> None:
        """`states`: at least one; the tensors that they name are held on to."""
        self._scales = {id(state.scales): state.scales for state in states}
        self._histories = {id(state.scales): state.history for state in states}
        starts, start = {}, 0
        for key, scales in self._scales.items():
            starts[key], start = start, start + scales.numel()
        device = states[0].scales.device
        self._at = torch.tensor([starts[id(state.scales)] + state.slot for state in states], device=device)
        most = [state.format.max / 2**state.margin for state in states]
        self._most = torch.tensor(most, device=device)
        self.least_normal = torch.tensor([state.format.least_normal for state in states], device=device)

    def scale(self, instead: Mapping[int, torch.Tensor] | None = None) -> torch.Tensor:
        """[n] the multipliers.

        Args:
            instead: for the identity of a tensor of scales another to read, or 1 where it has none; None: as they are.
        """
        parts = self._scales.items()
        if instead is not None:
            return torch.cat([instead[key] if key in instead else torch.ones_like(now) for key, now in parts])[self._at]
        return torch.cat([now for _, now in parts])[self._at]

    def amax(self) -> torch.Tensor:
        """[n] newest reduced amax; with a history of 1 TE keeps none, and it is what the scale says."""
        if next(iter(self._histories.values())).shape[0] > 1:
            return torch.cat([history[-1] for history in self._histories.values()])[self._at]
        return self._most / self.scale()


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
        holder = attribute(holder, "quantization_state")
    for name in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        attribute(holder, name)
    return holder


def gemm_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of TE's modules that could run GEMMs in FP8; attention has FP8 state too, and no weights."""
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear

    for name, module in model.named_modules():
        if isinstance(module, Linear | LayerNormLinear | LayerNormMLP | GroupedLinear):
            yield name, module


def runs_in_fp8(module: Any) -> bool:
    """Whether one of `gemm_modules` ran its last step in FP8: quantizing, rather than calibrating."""
    return bool(attribute(module, "fp8"))


def site(name: str, module: Any, gemm: int, tensor: str, layer_numbers: Mapping[str, int]) -> Site:
    """Where one of a module's GEMMs stands.

    Args:
        name: the module's qualified name in its chunk.
        module: it.
        gemm: 0-based: the local expert of a GroupedLinear, fc1 or fc2 of a LayerNormMLP.
        tensor: of `sites.TENSORS`.
        layer_numbers: as `Site.of` takes them.
    """
    at = Site.of(name, layer_numbers)
    if hasattr(module, "fc1_weight"):
        return Site(at.layer, f"linear_fc{gemm + 1}", tensor, at.expert)
    return Site(at.layer, at.module, tensor, gemm if hasattr(module, "weight0") else at.expert)


def gemm_suffixes(module: Any) -> tuple[str, ...]:
    """What TE's debug path appends to a module's name for each of its GEMMs (`_get_debug_quantizers`)."""
    if hasattr(module, "fc1_weight"):
        return ".fc1", ".fc2"
    if hasattr(module, "weight0"):
        return tuple(f".gemm_{gemm}" for gemm in range(attribute(module, "num_gemms")))
    return ("",)


def state_tensors(module: Any) -> list[torch.Tensor]:
    """A module's scales and amax histories, in one order; TE changes them in place. Empty without delayed scaling."""
    states = [module.fp8_meta.get(key) for key in _SLOTS_OF_A_GEMM]
    return [
        attribute(state, name)
        for state in states
        if hasattr(state, "amax_history")
        for name in ("scale", "amax_history")
    ]


def settled(module: Any) -> list[torch.Tensor]:
    """`state_tensors` without row 0 of the histories, which holds what this rank has not reduced yet."""
    return [tensor if tensor.dim() == 1 else tensor[1:] for tensor in state_tensors(module)]


def is_initial(settled_tensors: Sequence[torch.Tensor]) -> bool:
    """Whether scaling state is as TE makes it: scales of 1, empty histories. A step changes all that it uses."""
    return all(bool((each == (1.0 if each.dim() == 1 else 0.0)).all()) for each in settled_tensors)


def delayed(module: Any, margin: int = 0) -> list[TensorState]:
    """Delayed scaling's state of a module's GEMMs; empty for recipes without state.

    Args:
        module: a TE module.
        margin: the recipe's.

    Returns:
        One entry a tensor, GEMM by GEMM, in the order input, weight, grad_output.

    Raises:
        UsageError: something moved; names it.
    """
    states = {key: state for key in _SLOTS_OF_A_GEMM if hasattr(state := module.fp8_meta.get(key), "amax_history")}
    if not states:
        return []
    some = next(iter(states))
    found = []
    for gemm in range(attribute(states[some], "scale").numel() // _SLOTS_OF_A_GEMM[some]):
        for tensor, (key, first) in _SLOTS.items():
            if key not in states:
                continue
            slot = first + gemm * _SLOTS_OF_A_GEMM[key]
            fmt = E4M3 if key == "scaling_fwd" or _is_e4m3(module) else E5M2
            history, scales = states[key].amax_history, attribute(states[key], "scale")
            found.append(TensorState(gemm, tensor, history, scales, slot, fmt, margin))
    return found


def _is_e4m3(module: Any) -> bool:
    recipe = module.fp8_meta.get("recipe")
    return recipe is not None and str(recipe.fp8_format).endswith("E4M3")


def attribute(holder: Any, name: str) -> Any:
    """`holder.name`.

    Raises:
        UsageError: this TE has it no more; names it.
    """
    try:
        return getattr(holder, name)
    except AttributeError:
        kind = getattr(holder, "__name__", type(holder).__name__)
        raise UsageError(
            f"Transformer Engine {metadata.version('transformer_engine')} has no {kind}.{name}, which FP8 telemetry "
            f"reads; install a version from {OLDEST} to {NEWEST}"
        ) from None
