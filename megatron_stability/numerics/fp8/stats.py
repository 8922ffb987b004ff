"""What quantization did to a tensor, counted exactly in one pass over it, with memory for one chunk.

A chunk is read once from memory and everything is computed while it is in cache; five separate passes read the tensor
five times and write as many temporaries. The result is one small vector on the tensor's device, without a host
synchronisation: vectors of many tensors are copied together. On GPUs the pass is a Triton kernel (`fp8_triton`).

Definitions (they decide what a percentage means):

    saturated     |x| * scale > largest value of the format; the largest code itself is no saturation
    underflowed   x is not 0, its code is; -0.0 is 0
    signal, noise sums of x² and (x - dequantized)² over elements that are finite
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_stability.numerics.fp8.formats import Fp8Format, round_clamped

#: Columns of a statistics vector, float64 (counts are exact up to 2^53).
COLUMNS = ("elements", "nonzero", "saturated", "underflowed", "nonfinite", "amax", "signal", "noise")
_LEAST_SQUARES = 1e-30  # sums of squares below it have lost terms to float32's smallest numbers
CHUNK = 1 << 15  # elements: the temporaries stay in L2, and torch starts no thread for a tensor of this size


@dataclass(frozen=True)
class TensorStats:
    """A statistics vector, read.

    Attributes:
        elements: how many were looked at.
        nonzero: of them, not 0 (NaN and infinities count).
        saturated: cut off at the format's largest value.
        underflowed: non-zero ones that became 0.
        nonfinite: NaN and infinities.
        amax: largest finite or infinite |x|; NaN never wins.
        signal: sum of x² of the finite elements.
        noise: sum of (x - dequantized)² of the finite elements.
    """

    elements: int
    nonzero: int
    saturated: int
    underflowed: int
    nonfinite: int
    amax: float
    signal: float
    noise: float

    @property
    def saturation(self) -> float:
        """Share of all elements that were cut off, in [0, 1]; 0 of nothing."""
        return self.saturated / self.elements if self.elements else 0.0

    @property
    def underflow(self) -> float:
        """Share of the non-zero elements that became 0, in [0, 1]; 0 of nothing."""
        return self.underflowed / self.nonzero if self.nonzero else 0.0

    @property
    def snr_db(self) -> float:
        """10 log10(signal / noise), decibels; infinite without noise, NaN without signal."""
        if self.signal == 0:
            return math.nan
        return math.inf if self.noise == 0 else 10 * math.log10(self.signal / self.noise)


def read(vector: torch.Tensor) -> TensorStats:
    """A vector as `TensorStats`; copies it to the host."""
    values = vector.tolist()
    return TensorStats(*map(int, values[:5]), *values[5:])


def combine(vectors: torch.Tensor) -> torch.Tensor:
    """Statistics of the union of disjoint parts (shards of TP, micro-batches, replicas of DP).

    Counts and sums add, amax is the largest, so shares can't leave [0, 1], whatever the parts' sizes.

    Args:
        vectors: [..., parts, len(COLUMNS)].

    Returns:
        [..., len(COLUMNS)].
    """
    if vectors.shape[-2] == 0:
        return vectors.new_zeros(*vectors.shape[:-2], len(COLUMNS))
    total = vectors.sum(-2)
    total[..., COLUMNS.index("amax")] = vectors[..., COLUMNS.index("amax")].amax(-1)
    return total


def tensor_stats(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, *, chunk: int = CHUNK) -> torch.Tensor:
    """Statistics of quantizing `x`.

    Args:
        x: any shape, float.
        scale: float32; one element for the whole tensor, or one a row: [R] for x [R, C] (blocks laid out as rows).
        fmt: target format.
        chunk: elements worked on at a time (whole rows where the scale is one a row).

    Returns:
        [len(COLUMNS)] float64 on x's device.
    """
    if x.is_cuda:
        from megatron_stability.numerics.fp8 import triton

        return triton.tensor_stats(x, scale, fmt)
    if scale.numel() == 1:
        parts = x.reshape(-1).split(chunk)
        scales = (scale.reshape(()),) * len(parts)
    else:
        rows = max(1, chunk // max(1, x.shape[-1]))
        parts, scales = x.split(rows), scale.view(-1, 1).split(rows)
    vectors = [_chunk_stats(part.float(), part_scale, fmt) for part, part_scale in zip(parts, scales, strict=True)]
    # Plain numbers until here: small tensors kept between the chunks' temporaries would fragment the heap.
    return combine(torch.tensor(vectors, dtype=torch.float64).view(-1, len(COLUMNS)))


def _chunk_stats(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> list[float]:
    """One chunk, on the CPU: every line works on what the line before left in cache."""
    scaled = x * scale
    largest = float(torch.linalg.vector_norm(x, math.inf)) if x.numel() else 0.0
    values = round_clamped(scaled.clamp(-fmt.max, fmt.max), fmt)
    nonzero = int(torch.count_nonzero(x))
    underflowed = nonzero - int(torch.count_nonzero(values))  # a zero never gets a value other than 0
    saturated = int(torch.count_nonzero(scaled.abs_() > fmt.max))
    error = values.mul_(scale.reciprocal()).sub_(x)
    signal, noise = (float(torch.dot(part.reshape(-1), part.reshape(-1))) for part in (x, error))
    nonfinite = 0
    squares_are_off = not (math.isfinite(signal) and math.isfinite(noise)) or min(signal, noise) < _LEAST_SQUARES
    if largest and squares_are_off:
        nonfinite, largest, signal, noise = _in_double(x, error)
    counts = x.numel(), nonzero, saturated, underflowed, nonfinite
    return [*counts, largest, signal, noise]


def _in_double(x: torch.Tensor, error: torch.Tensor) -> tuple[int, float, float, float]:
    """The slow path of a chunk that holds NaN or Inf, or whose squares leave float32's range."""
    finite = x.isfinite()
    kept, off = torch.where(finite, x, 0.0).double(), torch.where(finite, error, 0.0).double()
    largest = float(x.abs().nan_to_num_(nan=0.0, posinf=math.inf).amax())
    return int((~finite).sum()), largest, float((kept * kept).sum()), float((off * off).sum())
