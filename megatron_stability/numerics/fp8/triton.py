"""The one-pass statistics of `fp8_stats` as a Triton kernel, for GPUs.

Every element is read once from device memory; a program writes 7 partial results, which torch adds up. It runs on CPUs
under Triton's interpreter (TRITON_INTERPRET=1, set before the first import), which is how the tests check it.

The sizes are fixed and not tuned on the device: ranks that tuned to different ones would add up in different orders.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_stability.numerics.fp8.formats import Fp8Format

BLOCK, WARPS = 1024, 8  # elements a round: 4 a thread; for sm_90a at most 72 registers, where 4096 and 4 warps spill
ROUNDS = 64  # rounds a program: 2^16 elements


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    x_ptr,
    scale_ptr,
    out_ptr,
    elements,
    row: tl.constexpr,  # elements a scale covers; 0: one scale for all
    largest_value: tl.constexpr,
    least_normal: tl.constexpr,
    shift: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    program = tl.program_id(0)
    nonzero = tl.zeros((BLOCK,), dtype=tl.int32)
    saturated = tl.zeros((BLOCK,), dtype=tl.int32)
    underflowed = tl.zeros((BLOCK,), dtype=tl.int32)
    nonfinite = tl.zeros((BLOCK,), dtype=tl.int32)
    amax = tl.zeros((BLOCK,), dtype=tl.float32)
    signal = tl.zeros((BLOCK,), dtype=tl.float64)
    noise = tl.zeros((BLOCK,), dtype=tl.float64)
    for turn in range(ROUNDS):
        at = (program.to(tl.int64) * ROUNDS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr) if row == 0 else tl.load(scale_ptr + at // row, mask=inside, other=1.0)
        magnitude = tl.abs(x)
        scaled = magnitude * scale  # rounding is symmetric: the sign plays no part
        clamped = tl.where(scaled > largest_value, largest_value, scaled)
        binade = (clamped.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shifter = tl.where(binade < least_normal, least_normal, binade) * shift
        value = (clamped + shifter) - shifter
        finite = magnitude < float("inf")  # false for NaN as well
        error = tl.where(finite, value * (1.0 / scale) - magnitude, 0.0).to(tl.float64)
        kept = tl.where(finite, magnitude, 0.0).to(tl.float64)
        is_nonzero = x != 0.0
        nonzero += is_nonzero.to(tl.int32)
        saturated += (scaled > largest_value).to(tl.int32)
        underflowed += (is_nonzero & (value == 0.0)).to(tl.int32)
        nonfinite += tl.where(finite, 0, 1)
        amax = tl.where(magnitude > amax, magnitude, amax)  # NaN never wins
        signal += kept * kept
        noise += error * error
    out = out_ptr + program * 7
    tl.store(out + 0, tl.sum(nonzero, 0).to(tl.float64))
    tl.store(out + 1, tl.sum(saturated, 0).to(tl.float64))
    tl.store(out + 2, tl.sum(underflowed, 0).to(tl.float64))
    tl.store(out + 3, tl.sum(nonfinite, 0).to(tl.float64))
    tl.store(out + 4, tl.max(amax, 0).to(tl.float64))
    tl.store(out + 5, tl.sum(signal, 0))
    tl.store(out + 6, tl.sum(noise, 0))


def tensor_stats(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """As `fp8_stats.tensor_stats`.

    Args:
        x: any shape, float; contiguous, or it is copied.
        scale: float32; one element, or [R] for x [R, C].
        fmt: target format.

    Returns:
        [8] float64, in the order of `fp8_stats.COLUMNS`, on x's device.
    """
    x = x.contiguous()
    programs = triton.cdiv(x.numel(), BLOCK * ROUNDS)
    if programs == 0:
        return torch.zeros(8, dtype=torch.float64, device=x.device)
    parts = torch.empty(programs, 7, dtype=torch.float64, device=x.device)
    _kernel[(programs,)](
        x,
        scale.contiguous(),
        parts,
        x.numel(),
        0 if scale.numel() == 1 else x.shape[-1],
        fmt.max,
        fmt.least_normal,
        1.5 * 2.0 ** (23 - fmt.mantissa_bits),
        BLOCK=BLOCK,
        ROUNDS=ROUNDS,
        num_warps=WARPS,
    )
    total = parts.sum(0)
    total[4] = parts[:, 4].amax()
    return torch.cat([total.new_full((1,), x.numel()), total])
