"""FP8 number formats and saturating casts, in pure torch: byte-exact on CPUs and on GPUs without FP8 units.

Formats: E4M3 (largest value 448, no infinity) and E5M2 (57344, with infinities), after Micikevicius et al., "FP8
Formats for Deep Learning" (2022). Transformer Engine (TE) casts with `__NV_SATFINITE`: round to nearest even, and what
lies beyond the largest value, infinities too, becomes that value; NaN stays NaN. `Tensor.to(float8)` saturates neither
format (E4M3 above 464 becomes NaN, E5M2 from 61440 on infinite), so every cast here clamps first.
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
        tiny: smallest positive value (subnormal).
    """

    name: str
    dtype: torch.dtype
    max: float
    tiny: float


E4M3 = Fp8Format("E4M3", torch.float8_e4m3fn, 448.0, 2.0**-9)
E5M2 = Fp8Format("E5M2", torch.float8_e5m2, 57344.0, 2.0**-16)


def saturating_cast(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Cast as TE's kernels do: to nearest even, saturating.

    Args:
        x: scaled values, float32.
        fmt: the target format.

    Returns:
        Codes of the same shape, in `fmt.dtype`.
    """
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


@dataclass(frozen=True)
class Quantized:
    """Codes and the factor that undoes their scaling.

    Attributes:
        codes: FP8 codes, of the quantized tensor's shape.
        scale_inv: float32, broadcasts against `codes`: [1] for a tensor, [R, C / 32, 1]-like for blocks (see `blocks`).
        blocks: shape into which `codes` is viewed so that `scale_inv` broadcasts; None for one scale a tensor.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    blocks: tuple[int, ...] | None = None

    def dequantize(self) -> torch.Tensor:
        """The values that an FP8 GEMM multiplies, float32, of the codes' shape."""
        values = self.codes.to(torch.float32)
        if self.blocks is None:
            return values * self.scale_inv
        return (values.view(self.blocks) * self.scale_inv).view(self.codes.shape)


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
