"""How well a linear layer takes to FP8, from its weight and a sample of its inputs: expected SNRs, and an order.

The SNR of a tensor says what its own rounding costs; that of the layer's output, with input and weight rounded as the
GEMM would see them, says what the layer costs the model, and orders the layers by what is to be kept in BF16 first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_stability.numerics.fp8.formats import E4M3
from megatron_stability.numerics.fp8.recipes import Recipe
from megatron_stability.numerics.fp8.stats import TensorStats, read, tensor_stats


@dataclass(frozen=True)
class Expected:
    """What E4M3 with one scale a tensor would do, for one choice of amax.

    Attributes:
        amax: the value that maps to the format's largest.
        snr_db: of the tensor.
        saturation: share that is cut off.
        underflow: share of the non-zero values that becomes 0.
    """

    amax: float
    snr_db: float
    saturation: float
    underflow: float


@dataclass(frozen=True)
class LayerReadiness:
    """One linear layer.

    Attributes:
        name: in the whole model.
        input: by calibrator: "telemetry", "max", "percentile", "mse".
        weight: likewise.
        output_snr_db: of the layer's output.
    """

    name: str
    input: Mapping[str, Expected]
    weight: Mapping[str, Expected]
    output_snr_db: float


def expected(x: torch.Tensor, amax: float) -> Expected:
    """What quantizing `x` with the scale 448 / amax does.

    Args:
        x: any shape, float.
        amax: > 0 and finite; of 0 or NaN the scale is 1, as TE's.
    """
    usable = math.isfinite(amax) and amax > 0
    stats: TensorStats = read(tensor_stats(x, torch.tensor(E4M3.max / amax if usable else 1.0), E4M3))
    return Expected(amax, stats.snr_db, stats.saturation, stats.underflow)


def output_snr_db(rows: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> float:
    """10 log10(|Y|² / |Y' - Y|²) of Y = X W^T and Y' with both operands rounded.

    Args:
        rows: [R, in] inputs, float.
        weight: [out, in] float.
        recipe: current, block or mxfp8.

    Returns:
        Decibels; infinite without an error, NaN where Y is 0 or nothing was seen.
    """
    one = torch.ones(1)
    x = recipe.quantize(rows.float(), recipe.forward, one, weight=False, transposed=False)
    w = recipe.quantize(weight.float(), recipe.forward, one, weight=True, transposed=False)
    exact = rows.float() @ weight.float().t()
    signal = float((exact.double() ** 2).sum())
    noise = float(((x @ w.t() - exact).double() ** 2).sum())
    if signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def most_sensitive_first(layers: Sequence[LayerReadiness]) -> list[LayerReadiness]:
    """By the SNR of the output, least first; layers that saw nothing come last."""
    return sorted(layers, key=lambda each: math.inf if math.isnan(each.output_snr_db) else each.output_snr_db)
