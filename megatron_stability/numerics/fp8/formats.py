"""FP8 number formats and saturating casts, in pure torch: byte-exact on CPUs and on GPUs without FP8 units.

Formats: E4M3 (largest value 448, no infinity) and E5M2 (57344, with infinities), after Micikevicius et al., "FP8
Formats for Deep Learning" (2022). Transformer Engine (TE) casts with `__NV_SATFINITE`: round to nearest even, and what
lies beyond the largest value, infinities too, becomes that value; NaN stays NaN. `Tensor.to(float8)` saturates neither
format (E4M3 above 464 becomes NaN, E5M2 from 61440 on infinite), so everything here clamps first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fp8Format:
    """One FP8 format.

    Attributes:
        name: "E4M3" or "E5M2".
        dtype: torch's type for its codes.
        max: largest finite value.
        mantissa_bits: stored ones.
        least_normal: smallest normal value.
    """

    name: str
    dtype: torch.dtype
    max: float
    mantissa_bits: int
    least_normal: float

    @property
    def tiny(self) -> float:
        """Smallest positive value (subnormal)."""
        return self.least_normal * 2.0**-self.mantissa_bits


E4M3 = Fp8Format("E4M3", torch.float8_e4m3fn, 448.0, 3, 2.0**-6)
E5M2 = Fp8Format("E5M2", torch.float8_e5m2, 57344.0, 2, 2.0**-14)


def saturating_round(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """The value that each element's FP8 code stands for, without leaving float32.

    As TE's kernels cast: to nearest even, saturating; the sign of zero is kept. Adding 1.5 * 2^k to a number and taking
    it off again rounds it to the spacing that the format has in the number's binade; on CPUs that is several times
    faster than casting to FP8 and back.

    Args:
        x: scaled values, float32.
        fmt: the format.

    Returns:
        float32 of the same shape; NaN for NaN.
    """
    clamped = x.clamp(-fmt.max, fmt.max)
    return torch.copysign(round_clamped(clamped, fmt), clamped)


def round_clamped(clamped: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """`saturating_round` of values that are within the format's range, but for the sign of zero."""
    binade = (clamped.view(torch.int32) & 0x7F800000).view(torch.float32)
    shifter = binade.clamp_(min=fmt.least_normal).mul_(1.5 * 2.0 ** (23 - fmt.mantissa_bits))
    return (clamped + shifter).sub_(shifter)


@dataclass(frozen=True)
class Quantized:
    """What an FP8 GEMM is handed: values of an FP8 format, and the factor that undoes their scaling.

    Attributes:
        values: float32, each exactly a value of the format, of the quantized tensor's shape.
        scale_inv: float32, broadcasts against `values` once that is viewed as `blocks`.
        dtype: torch's type for the codes.
        blocks: shape into which `values` is viewed; None: its own.
    """

    values: torch.Tensor
    scale_inv: torch.Tensor
    dtype: torch.dtype
    blocks: tuple[int, ...] | None = None

    @property
    def codes(self) -> torch.Tensor:
        """The FP8 codes."""
        return self.values.to(self.dtype)  # exact: nothing is left to round

    def dequantize(self) -> torch.Tensor:
        """The values that enter the GEMM's sums, float32."""
        if self.blocks is None:
            return self.values * self.scale_inv
        return (self.values.view(self.blocks) * self.scale_inv).view(self.values.shape)


def amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Largest |x| as TE's kernels find it: NaN never wins, infinity does, 0 of nothing or of NaN alone.

    Source: `fmaxf`/`__hmax` from 0 in TE `common/recipe/current_scaling.cu` and the blockwise and MXFP8 kernels;
    torch's own maximum would propagate NaN.

    Args:
        x: any float tensor.
        dim: dimensions to reduce; None: all.

    Returns:
        float32, the reduced dimensions dropped.
    """
    if x.numel() == 0 and dim is None:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    magnitude = x.abs().nan_to_num_(nan=0.0, posinf=math.inf)
    return (magnitude.amax() if dim is None else magnitude.amax(dim)).float()
