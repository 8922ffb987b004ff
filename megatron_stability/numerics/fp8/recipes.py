"""Scale rules of Transformer Engine's FP8 recipes, in pure torch. A scale multiplies: code = cast(x * scale).

Sources, in TE 2.20 (paths under `transformer_engine/`), each rule beside its file:

    delayed      common/recipe/delayed_scaling.cu `kernel_bulk`; pytorch/quantization.py `_amax_and_scale_update`
    current      common/recipe/recipe_common.cuh `compute_scale_from_amax`, common/recipe/current_scaling.cu
    block        the same rule a tile: common/transpose/quantize_transpose_{vector,square}_blockwise.cu
    MXFP8        common/cast/mxfp8/quantize_mxfp8.cuh, `float_to_e8m0` and `exp2f_rcp` in common/util/

Where TE's kernels and its own Python references differ, the kernels are followed, since they are what trains:

    amax = inf   current and block: kernel scale 1, and infinities saturate; reference scale 0, so codes 0 and NaN
    NaN in x     kernels leave it out of the amax; the references get amax NaN, and NaN for every code of the block
    delayed, amax = 0    the kernel neither rolls the history nor recomputes the scale; the Python update does both
    delayed, rounding    the kernel divides max by amax, Python multiplies by 1 / amax: the scale's last bit may differ
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_stability.numerics.fp8.formats import E4M3, E5M2, Fp8Format, Quantized, amax, saturating_round
from megatron_stability.numerics.fp8.stats import tensor_stats

FLOAT32_MAX = torch.finfo(torch.float32).max
TILE, MX_BLOCK = 128, 32  # elements a scale covers: Float8BlockScaling, MXFP8
_E8M0_BIAS = 127


# --- one scale a tensor -----------------------------------------------------------------------------------------------


def current_scale(
    amax_: torch.Tensor,
    fmt: Fp8Format,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> torch.Tensor:
    """Scale from the amax of the tensor, or tile, that is being quantized.

    Args:
        amax_: float32, any shape.
        fmt: target format.
        power_of_two: clear the mantissa (rounds the scale down).
        epsilon: a smaller amax counts as this.
        value_for_inf: scale where format.max / amax overflows; TE takes the largest value of the *input's* type.

    Returns:
        float32 scales; 1 where amax is 0, infinite or NaN.
    """
    floored = torch.where(amax_ < epsilon, epsilon, amax_)  # a NaN stays
    scale = torch.full_like(floored, fmt.max) / floored  # `number / tensor` is number * (1 / tensor): rounded twice
    scale = torch.where(scale.isinf(), value_for_inf, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)  # keeps sign and exponent
    return torch.where((floored == 0) | ~floored.isfinite(), 1.0, scale)


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> Quantized:
    """Quantize with a given per-tensor scale (delayed scaling, or `current_scale`).

    Args:
        x: any shape, float.
        scale: float32, one element.
        fmt: target format.

    Returns:
        Values and 1 / scale.
    """
    return Quantized(saturating_round(x.float() * scale, fmt), scale.reciprocal(), fmt.dtype)


def quantize_current(x: torch.Tensor, fmt: Fp8Format, *, power_of_two: bool = False) -> Quantized:
    """Float8CurrentScaling: the scale comes from x itself.

    Args:
        x: any shape, float.
        fmt: target format.
        power_of_two: TE's `use_power_2_scales`, off by default there.

    Returns:
        Values, and one `scale_inv`.
    """
    limit = torch.finfo(x.dtype).max
    return quantize(x, current_scale(amax(x), fmt, power_of_two=power_of_two, value_for_inf=limit), fmt)


# --- delayed scaling ----------------------------------------------------------------------------------------------


def delayed_update(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    fmt_max: torch.Tensor | float,
    *,
    algorithm: Literal["max", "most_recent"],
    margin: int = 0,
    rule: Literal["kernel", "python"] = "kernel",
) -> None:
    """Finish one round of delayed scaling in place: roll the history, then set the scales.

    Row 0 of the history is where the round's amax was staged; it goes to the last row, row 0 becomes 0. An amax that is
    0, infinite or NaN keeps the old scale; one so small that the scale overflows gives the largest float32.

    Args:
        amax_history: [L, n] float32, L >= 1.
        scale: [n] float32.
        fmt_max: largest value of each slot's format, [n] or a number.
        algorithm: amax over the whole history, or the newest alone.
        margin: the scale is divided by 2^margin.
        rule: TE's fused kernel (its default), or its Python fallback; they differ for amax 0 and NaN, see the module.
    """
    newest = amax_history[0].clone()
    rolled = torch.roll(amax_history, -1, 0)  # the newest is last, also for L = 1
    if algorithm == "most_recent":
        chosen = newest
    elif rule == "kernel":
        chosen = torch.where(rolled.isnan(), 0.0, rolled).amax(0)  # fmaxf drops NaN
    else:
        chosen = rolled.amax(0)
    rolled[0] = 0.0
    usable = chosen.isfinite() & (chosen > 0)
    if rule == "kernel":
        seen = newest != 0  # a NaN counts as seen
        usable &= seen
        rolled = torch.where(seen, rolled, amax_history)
    limit = torch.as_tensor(fmt_max, dtype=torch.float32, device=scale.device)
    quotient = limit / chosen if rule == "kernel" else limit * chosen.reciprocal()
    new = (quotient / 2**margin).clamp(max=FLOAT32_MAX)
    scale.copy_(torch.where(usable, new, scale))
    amax_history.copy_(rolled)


# --- one scale a block --------------------------------------------------------------------------------------------


def quantize_tiles(
    x: torch.Tensor, fmt: Fp8Format, *, tile: tuple[int, int] = (1, TILE), power_of_two: bool = True
) -> Quantized:
    """Float8BlockScaling: one scale for each tile; partial tiles at the edges have a scale of their own.

    Args:
        x: [R, C] float.
        fmt: target format.
        tile: (1, 128) for inputs and gradients, (128, 128) for weights, as TE's recipe has it.
        power_of_two: on in TE unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1.

    Returns:
        Values [R, C], and one `scale_inv` a tile.
    """
    rows, columns = x.shape
    r, c = tile
    padded = _padded(x, r, c)
    view = (padded.shape[0] // r, r, padded.shape[1] // c, c)
    tiles = padded.view(view)
    limit = torch.finfo(x.dtype).max
    scale = current_scale(amax(tiles, (1, 3)), fmt, power_of_two=power_of_two, value_for_inf=limit)[:, None, :, None]
    values = saturating_round(tiles.float() * scale, fmt)
    return _cut(Quantized(values, scale.reciprocal(), fmt.dtype, view), rows, columns)


def quantize_mxfp8(x: torch.Tensor, fmt: Fp8Format) -> Quantized:
    """MXFP8: 32 neighbours in a row share a power of two, rounded up from amax / format.max (E8M0).

    Args:
        x: [R, C] float.
        fmt: target format (E4M3 in TE's recipe, for gradients too).

    Returns:
        Values and scales, as `quantize_tiles`.
    """
    rows, columns = x.shape
    padded = _padded(x, 1, MX_BLOCK)
    view = (rows, 1, padded.shape[1] // MX_BLOCK, MX_BLOCK)
    blocks = padded.view(view)
    exponent = e8m0(amax(blocks, (1, 3)) * _reciprocal_max(fmt))[:, None, :, None]
    values = saturating_round(blocks.float() * _power(_E8M0_BIAS - exponent), fmt)
    return _cut(Quantized(values, _power(exponent - _E8M0_BIAS), fmt.dtype, view), rows, columns)


def e8m0(value: torch.Tensor) -> torch.Tensor:
    """The biased exponent (int32, 0 to 254) of the least power of two that is not below a value >= 0.

    Infinity gives 254, NaN 255 (which no amax is), and so on as `float_to_e8m0` before Blackwell; 0 stands for 2^-127.
    """
    bits = value.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    finite = torch.where(up, exponent + 1, exponent)
    return torch.where(value.isnan(), 255, torch.where(value.isinf(), 254, finite))


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, for int32 exponents from -127 (subnormal) to 127, exactly."""
    bits = torch.where(exponent == -_E8M0_BIAS, 0x00400000, (exponent + _E8M0_BIAS) << 23)
    return bits.to(torch.int32).view(torch.float32)


def _reciprocal_max(fmt: Fp8Format) -> torch.Tensor:
    return torch.tensor(1.0 / fmt.max, dtype=torch.float32)  # rounded to float32 first, as the kernel's constant is


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    missing = (-x.shape[0] % rows, -x.shape[1] % columns)
    return torch.nn.functional.pad(x, (0, missing[1], 0, missing[0])) if any(missing) else x.contiguous()


def _cut(padded: Quantized, rows: int, columns: int) -> Quantized:
    """Take the padding off; the scales of partial tiles are spread over elements, since no view fits them."""
    view = padded.values.shape
    whole = (view[0] * view[1], view[2] * view[3])
    if whole == (rows, columns):
        return Quantized(padded.values.view(whole), padded.scale_inv, padded.dtype, tuple(view))
    values = padded.values.view(whole)[:rows, :columns].contiguous()
    scale_inv = padded.scale_inv.expand(view).reshape(whole)[:rows, :columns].contiguous()
    return Quantized(values, scale_inv, padded.dtype)


# --- a recipe as a whole ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides how a linear layer's operands are quantized.

    Attributes:
        name: the scale rule.
        forward: format of inputs and weights.
        backward: format of gradients.
        margin: delayed: the scale is divided by 2^margin.
        history: delayed: rows of the amax history.
        algorithm: delayed: which amax of the history counts.
        power_of_two: block: scales are powers of two.
    """

    name: Literal["delayed", "current", "block", "mxfp8"]
    forward: Fp8Format = E4M3
    backward: Fp8Format = E5M2
    margin: int = 0
    history: int = 1
    algorithm: Literal["max", "most_recent"] = "most_recent"
    power_of_two: bool = True

    def quantize(
        self, x: torch.Tensor, fmt: Fp8Format, scale: torch.Tensor, *, weight: bool, transposed: bool
    ) -> torch.Tensor:
        """An operand as the GEMM sees it.

        Args:
            x: [R, C] float.
            fmt: its format.
            scale: one float32; read by delayed scaling only.
            weight: block: 128x128 tiles in place of 1x128.
            transposed: the GEMM sums over R, not C. TE then quantizes blocks along R, from the unquantized values.

        Returns:
            [R, C] float32, dequantized.
        """
        if self.name == "delayed":
            return quantize(x, scale, fmt).dequantize()
        if self.name == "current":
            return quantize_current(x, fmt).dequantize()
        if self.name == "block" and weight:
            return quantize_tiles(x, fmt, tile=(TILE, TILE), power_of_two=self.power_of_two).dequantize()
        lines = x.t() if transposed else x
        if self.name == "block":
            values = quantize_tiles(lines, fmt, power_of_two=self.power_of_two).dequantize()
        else:
            values = quantize_mxfp8(lines, fmt).dequantize()
        return values.t() if transposed else values

    def stats(self, x: torch.Tensor, fmt: Fp8Format, scale: torch.Tensor, *, weight: bool) -> torch.Tensor:
        """Statistics of `quantize` (not transposed), one pass.

        Args:
            x: [R, C] float.
            fmt: its format.
            scale: one float32; read by delayed scaling only.
            weight: as for `quantize`.

        Returns:
            [len(fp8_stats.COLUMNS)] float64.
        """
        limit = torch.finfo(x.dtype).max
        if self.name == "delayed":
            return tensor_stats(x, scale, fmt)
        if self.name == "current":
            return tensor_stats(x, current_scale(amax(x), fmt, value_for_inf=limit), fmt)
        tile = (1, MX_BLOCK) if self.name == "mxfp8" else (TILE, TILE) if weight else (1, TILE)
        padded = _padded(x, *tile)
        shape = (padded.shape[0] // tile[0], tile[0], padded.shape[1] // tile[1], tile[1])
        rows = padded.view(shape).transpose(1, 2).reshape(-1, tile[0] * tile[1])
        largest = amax(rows, 1)
        if self.name == "mxfp8":
            scales = _power(_E8M0_BIAS - e8m0(largest * _reciprocal_max(fmt)))
        else:
            scales = current_scale(largest, fmt, power_of_two=self.power_of_two, value_for_inf=limit)
        vector = tensor_stats(rows, scales, fmt)
        vector[0] = x.numel()  # padding is zeros: it enters no other column
        return vector
