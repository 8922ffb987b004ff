"""Tier 2 under Transformer Engine: exact counts in sampled steps, by a feature of NVIDIA's nvdlfw-inspect.

TE hands each tensor to the feature as it quantizes it, with the quantizer. TE's own `LogFp8TensorStats` counts no
saturation under current scaling, prints four decimals and reduces over the world, which mixes pipeline stages; ours
(`features/`) counts with `numerics.fp8_stats`, as emulation does, and `hook` reduces over the stage. It only looks: no
feature that modifies tensors or chooses GEMMs is enabled. In a sampled step TE takes its debug path, which quantizes
after the norm instead of within its kernel; the other steps run as ever.

Sources: `debug/features/api.py`, `debug/pytorch/debug_quantization.py`. The calls are the same in 2.9 to 2.20, but
for `tp_size`, which 2.14 added.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_stability.errors import UsageError
from megatron_stability.numerics.fp8.formats import E4M3, E5M2, Fp8Format
from megatron_stability.numerics.fp8.recipes import Recipe
from megatron_stability.numerics.fp8.stats import COLUMNS, combine, tensor_stats
from megatron_stability.transformer_engine import adapter

NAMESPACE, FEATURE = "transformer_engine", "StabilityFp8Stats"
TENSORS = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
_BLOCK_QUANTIZERS = {"Float8BlockQuantizer": "block", "MXFP8Quantizer": "mxfp8"}


class Samples:
    """This rank's counts in a sampled step, a row for each (layer name, tensor).

    Attributes:
        rows: [len(COLUMNS)] float64 on the device, by (name, of `sites.TENSORS`).
        scales: of the newest quantization, [1] on the device; tensors with many scales have none here.
    """

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self.rows: dict[tuple[str, str], torch.Tensor] = {}
        self.scales: dict[tuple[str, str], torch.Tensor] = {}

    def begin(self) -> None:
        """Forget the step before."""
        self.rows.clear()
        self.scales.clear()

    @torch.no_grad()
    def take(self, name: str, tensor: str, x: Any, quantized: Any, quantizer: Any) -> None:
        """Count one quantization.

        Args:
            name: the layer's.
            tensor: of `sites.TENSORS`; a weight counts once a step, though every micro-batch quantizes it.
            x: what was quantized; anything but a plain tensor (FP8 primary weights) can't be counted.
            quantized: TE's tensor.
            quantizer: TE's; None where the GEMM is not in FP8.

        Raises:
            UsageError: a quantizer, or an attribute of one, that is not known here; names it.
        """
        key = name, tensor
        if quantizer is None or type(x) not in (torch.Tensor, torch.nn.Parameter) or x.numel() == 0:
            return
        if tensor == "weight" and key in self.rows:
            return
        rows, fmt = x.detach().reshape(-1, x.shape[-1]), format_of(quantizer)
        if (block := _block_recipe(quantizer)) is not None:
            tiles = getattr(quantizer, "block_scaling_dim", 1) == 2
            vector = block.stats(rows, fmt, x.new_ones(1, dtype=torch.float32), weight=tiles)
        else:
            scale = scale_of(quantizer, quantized)
            self.scales[key] = scale
            vector = tensor_stats(rows, scale, fmt)
        before = self.rows.get(key)
        self.rows[key] = vector if before is None else combine(torch.stack([before, vector]))

    def table(self, sites: Sequence[tuple[str, str]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """([n, len(COLUMNS)] float64 counts, [n] scales) for n sites: zeros and NaN where nothing was seen."""
        nothing = torch.zeros(len(COLUMNS), dtype=torch.float64, device=device)
        unknown = torch.full((1,), torch.nan, device=device)
        counts = torch.stack([self.rows.get(site, nothing) for site in sites])
        return counts, torch.cat([self.scales.get(site, unknown).reshape(1).float() for site in sites])


def wanted(step: int, every: int) -> tuple[bool, int]:
    """Whether `step` is sampled, and the next one that is."""
    return step % every == 0, (step // every + 1) * every


def format_of(quantizer: Any) -> Fp8Format:
    """The quantizer's format, from TE's `DType`.

    Raises:
        UsageError: it is no FP8 format.
    """
    name = adapter.attribute(quantizer, "dtype").name
    formats = {"kFloat8E4M3": E4M3, "kFloat8E5M2": E5M2}
    if name not in formats:
        raise UsageError(f"FP8 telemetry met {type(quantizer).__name__} of {name}; turn --stability-fp8-inspect off")
    return formats[name]


def scale_of(quantizer: Any, quantized: Any) -> torch.Tensor:
    """[1] the multiplier of a tensor that has one scale: delayed scaling's own, current scaling's from its inverse.

    Raises:
        UsageError: something moved; names it.
    """
    kind = type(quantizer).__name__
    if kind == "Float8Quantizer":
        scale: torch.Tensor = adapter.attribute(quantizer, "scale")
        return scale.detach().clone()
    if kind == "Float8CurrentScalingQuantizer":
        inverse: torch.Tensor = adapter.attribute(quantized, "_scale_inv")
        return inverse.detach().reciprocal()
    raise UsageError(f"FP8 telemetry does not know TE's {kind}; turn --stability-fp8-inspect off")


def _block_recipe(quantizer: Any) -> Recipe | None:
    name = _BLOCK_QUANTIZERS.get(type(quantizer).__name__)
    if name == "block":
        return Recipe(name="block", power_of_two=bool(adapter.attribute(quantizer, "force_pow_2_scales")))
    return Recipe(name="mxfp8") if name == "mxfp8" else None


def begin(every: int, folder: Path) -> None:
    """Start nvdlfw-inspect with the one feature, before the first TE module is built.

    Args:
        every: steps between two samples.
        folder: for nvdlfw-inspect's own log.

    Raises:
        UsageError: nvdlfw-inspect is not installed or is in use already, or TE's internals were not checked.
    """
    adapter.version()
    try:
        api = importlib.import_module("nvdlfw_inspect.api")
    except ModuleNotFoundError:
        raise UsageError(
            "--stability-fp8-inspect needs nvdlfw-inspect: pip install nvdlfw-inspect, or turn the flag off"
        ) from None
    if api.DEBUG_MANAGER is not None:
        raise UsageError(
            "--stability-fp8-inspect: nvdlfw-inspect runs already with another configuration, and takes one only; turn "
            "one of the two off"
        )
    theirs = importlib.import_module("transformer_engine.debug.features").__path__[0]
    ours = importlib.import_module("megatron_stability.transformer_engine.features").__path__[0]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "megatron_stability": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": ".*"},
            NAMESPACE: {FEATURE: {"enabled": True, "tensors": list(TENSORS), "every": every}},
        }
    }
    api.initialize(config_file=config, feature_dirs=[theirs, ours], log_dir=str(folder))


def running() -> Samples | None:
    """What the feature collects into; None where `begin` was not called, or nvdlfw-inspect was ended."""
    try:
        registry = importlib.import_module("nvdlfw_inspect.registry").Registry
    except ModuleNotFoundError:
        return None
    features = registry.data[NAMESPACE].features if NAMESPACE in registry.data else {}
    return features[FEATURE].collected if FEATURE in features else None


def at_step(step: int) -> None:
    """Tell nvdlfw-inspect which step begins: nobody else does, since Megatron does not know it."""
    importlib.import_module("nvdlfw_inspect.api").initialize_training_step(step)
