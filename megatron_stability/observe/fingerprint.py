"""A tensor's bits as one integer, and its largest magnitude: what must be equal after a load, or on two replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

CHUNK = 1 << 22  # elements mixed at once: the temporary memory is 8 bytes each
# Odd constants of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as int64.
_GOLDEN, _MIX_A, _MIX_B = -7046029254386353131, -4658895280553007687, -7723592293110705685
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`bits`: a 64-bit hash of the bytes and their places. `amax`: the largest |x|, NaN or Inf if one element is."""

    bits: int
    amax: float

    @property
    def finite(self) -> bool:
        """No NaN, no Inf."""
        return math.isfinite(self.amax)


@torch.no_grad()
def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The hash of a tensor's bytes on its device: integer arithmetic, so the same on any device and in any order.

    Args:
        tensor: any shape and dtype.

    Returns:
        [] int64; 0 for an empty tensor.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=flat.device)
        mixed = part * _MIX_A + places * _GOLDEN
        mixed = (mixed ^ (mixed >> 27)) * _MIX_B
        total += (mixed ^ (mixed >> 31)).sum()
    return total


@torch.no_grad()
def amax(tensor: torch.Tensor) -> torch.Tensor:
    """[] fp64: the largest |x|; NaN if one element is NaN, 0 for an empty or integer tensor."""
    if not tensor.numel() or not tensor.dtype.is_floating_point:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    values = tensor.detach()
    if values.element_size() == 1:  # fp8 has no reductions
        values = values.float()
    low, high = torch.aminmax(values)
    return torch.maximum(low.double().abs(), high.double().abs())


def fingerprints(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Fingerprint]:
    """The fingerprint of each tensor, with two copies to the host in all.

    Args:
        named: (name, tensor), all on one device or on several.

    Returns:
        By name, in order.
    """
    names, hashes, ranges = [], [], []
    for name, tensor in named:
        names.append(name)
        hashes.append(bits(tensor))
        ranges.append(amax(tensor))
    if not names:
        return {}
    device = hashes[0].device
    all_bits = torch.stack([value.to(device) for value in hashes]).tolist()
    all_amax = torch.stack([value.to(device) for value in ranges]).tolist()
    return {name: Fingerprint(b, a) for name, b, a in zip(names, all_bits, all_amax, strict=True)}


def combined(prints: Iterable[Fingerprint]) -> int:
    """One int64 over fingerprints in their order."""
    total = 0
    for number, each in enumerate(prints, start=1):
        total = (total * 0x9E3779B97F4A7C15 + each.bits + number) & 0xFFFFFFFFFFFFFFFF
    return total - (1 << 64) if total >> 63 else total
