"""A tensor's hash and largest magnitude in one reading, as a Triton kernel: `fingerprint.mixed` and `amax` on a GPU.

A float's code without its sign grows with the magnitude, up to Inf and on to NaN, so that the largest magnitude is an
integer maximum over the lanes of the very words that are hashed. All of it is integer arithmetic: any order of programs
gives the same bits, and those of the torch passes, which stay the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 8  # 8-byte words a round
ROUNDS = 16  # rounds a program: 128 KiB
_LOW = 0xFFFFFFFF


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    words_ptr,
    out_ptr,
    words,
    lane: tl.constexpr,  # bits of an element; 0: no float, no magnitude
    magnitude: tl.constexpr,  # an element's code without its sign
    double_golden: tl.constexpr,
    low: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    largest = tl.zeros((BLOCK,), dtype=tl.int64)
    for turn in range(ROUNDS):
        at = (program * ROUNDS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = at < words
        word = tl.load(words_ptr + at, mask=inside, other=0)
        total += (((word >> 32) & low) ^ word) * (at * double_golden + 1)  # a word of 0 adds nothing
        if lane > 0:
            for shift in tl.static_range(0, 64, lane):
                code = (word >> shift) & magnitude
                largest = tl.where(code > largest, code, largest)
    tl.store(out_ptr + program * 2, tl.sum(total, 0))
    tl.store(out_ptr + program * 2 + 1, tl.max(largest, 0))


def launch(words: torch.Tensor, element_bytes: int, double_golden: int) -> torch.Tensor:
    """Read whole words once.

    Args:
        words: [n] int64, n > 0, contiguous.
        element_bytes: size of the float that the words hold; 0: they hold none.
        double_golden: the step of the words' factors, as int64.

    Returns:
        [2] int64, on the words' device: their part of the hash modulo 2^64, and the largest code without its sign.
    """
    programs = triton.cdiv(words.numel(), BLOCK * ROUNDS)
    parts = torch.empty(programs, 2, dtype=torch.int64, device=words.device)
    lane = 8 * element_bytes
    magnitude = (1 << (lane - 1)) - 1 if lane else 0
    _kernel[(programs,)](
        words,
        parts,
        words.numel(),
        lane=lane,
        magnitude=magnitude,
        double_golden=double_golden,
        low=_LOW,
        BLOCK=BLOCK,
        ROUNDS=ROUNDS,
        num_warps=WARPS,
    )
    return torch.stack([parts[:, 0].sum(), parts[:, 1].amax()])
