"""Clip of word-embedding rows to a radius after the step.

A rare token's row has a small second moment and so a large effective step; its norm may run away unseen by a mean.
A row lies whole on one tensor-parallel rank. A flat shard of the distributed optimizer may begin and end inside a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def square_sums(flat: Tensor, start: int, rows: int, width: int) -> Tensor:
    """Σw² of each row, as far as a flat shard holds it.

    Args:
        flat: [n] elements start … start+n of a row-major [rows, width] weight.
        start: first element.
        rows: of the whole weight on this tensor-parallel rank.
        width: hidden size.

    Returns:
        [rows] fp32; 0 for rows that the shard does not touch. Summed over the shards' ranks it is ‖row‖².
    """
    sums = torch.zeros(rows, dtype=torch.float32, device=flat.device)
    if flat.numel():
        first, lead = divmod(start, width)
        touched = -(-(lead + flat.numel()) // width)
        padded = torch.zeros(touched * width, dtype=torch.float32, device=flat.device)
        padded[lead : lead + flat.numel()] = flat
        sums[first : first + touched] = padded.view(touched, width).square().sum(1)
    return sums


def factors(square_sums: Tensor, radius: float) -> Tensor:
    """min(1, radius/‖row‖) of each row, [rows] fp32; 1 for a row that is not finite, which is for others to judge."""
    scale = radius * torch.rsqrt(square_sums)
    return torch.where(torch.isfinite(square_sums) & (scale < 1.0), scale, 1.0)


@torch.no_grad()
def scale_rows_(flat: Tensor, start: int, width: int, factor: Tensor) -> None:
    """Multiply a flat shard by its rows' factors, in place.

    Args:
        flat: [n] elements start … start+n of a row-major weight.
        start: first element.
        width: hidden size.
        factor: [rows] of the whole weight; rows with factor 1 keep their bits.
    """
    if flat.numel():
        first, last = start // width, (start + flat.numel() - 1) // width
        spread = factor[first : last + 1].repeat_interleave(width)
        lead = start - first * width
        flat.mul_(spread[lead : lead + flat.numel()].to(flat.dtype))
