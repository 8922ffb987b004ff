"""Sums and maxima over ranks that are the same bits whatever the order in which a collective adds.

A sum travels as an integer: x is cut into `LIMBS` limbs of `BITS` bits, signed int64 each, at fixed weights, which an
all-reduce adds without rounding; the sum is then rounded once. A limb holds the sum of 2^23 ranks. What is beyond the
weights is counted as not finite, what is below them is dropped: the range is 2^-400 to 2^240.

A maximum travels as an int64 key in the order of the floats; NaN, "this rank has none", is below every number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

BITS: Final = 40
LIMBS: Final = 16
LOWEST: Final = -400  # binary exponent of the lowest limb
WIDTH: Final = LIMBS + 1  # int64 of one sum: its limbs, and how many ranks' values were not finite
NONE: Final = torch.iinfo(torch.int64).min  # the key of NaN
_REST: Final = torch.iinfo(torch.int64).max
_TOP: Final = 2.0 ** (LOWEST + BITS * LIMBS)


def to_limbs(values_n: torch.Tensor) -> torch.Tensor:
    """Numbers as limbs; NaN counts as nothing, an infinity as not finite. No device-to-host copy.

    Args:
        values_n: [n] float64.

    Returns:
        [n, WIDTH] int64: the limbs, lowest first, and the count.
    """
    beyond_n = values_n.abs() >= _TOP
    kept_n = torch.where(beyond_n | values_n.isnan(), 0.0, values_n)
    # All bits at or above a limb's weight: exact, for a float has 53 bits and the scale is a power of two.
    above_nl = torch.trunc(kept_n[:, None] * _inverse_weights(values_n.device))
    higher_nl = torch.nn.functional.pad(above_nl[:, 1:], (0, 1))
    limbs_nl = (above_nl - higher_nl * 2.0**BITS).to(torch.int64)
    return torch.cat([limbs_nl, beyond_n.to(torch.int64)[:, None]], dim=1)


@lru_cache(maxsize=4)
def _inverse_weights(device: torch.device) -> torch.Tensor:
    """[LIMBS] float64, powers of two to the bit, which a device's exp2 need not give."""
    return torch.tensor([2.0 ** -(LOWEST + BITS * limb) for limb in range(LIMBS)], dtype=torch.float64, device=device)


def from_limbs(limbs: Sequence[int]) -> float:
    """The sum, rounded once; infinite where a value was not finite."""
    if limbs[LIMBS]:
        return math.inf
    total = 0
    for limb in reversed(limbs[:LIMBS]):
        total = (total << BITS) + limb
    return total / (1 << -LOWEST)


def to_keys(values_n: torch.Tensor) -> torch.Tensor:
    """Keys of numbers, [n] int64 of [n] float64, in their order; `NONE` for NaN."""
    bits_n = values_n.view(torch.int64)
    keys_n = torch.where(bits_n >= 0, bits_n, bits_n ^ _REST)
    return torch.where(values_n.isnan(), NONE, keys_n)


def from_keys(keys_n: torch.Tensor) -> torch.Tensor:
    """The inverse, [n] float64; NaN for `NONE`."""
    values_n = torch.where(keys_n >= 0, keys_n, keys_n ^ _REST).view(torch.float64)
    return torch.where(keys_n == NONE, math.nan, values_n)
