"""A short random projection of long vectors, by which two runs are compared without keeping either's weights.

Element i is added, with a random sign, to bucket i modulo K: the "tug-of-war" and count sketches of Alon, Matias and
Szegedy (1996) and Charikar, Chen and Farach-Colton (2002). The projection is linear, so sketches of the ranks' parts
add up to that of the whole, and the difference of two steps' sketches is the sketch of the update between them. Inner
products are kept without bias: 1 - cosine of two vectors that are close is known to a relative deviation of
sqrt(2/K), 13 %, whatever their length.
"""

from __future__ import annotations

import zlib

import torch

K = 127  # prime, so that columns of a weight, whose number has small factors, spread over all buckets
_CHUNK = K << 13  # elements whose signs are drawn at once


@torch.no_grad()
def sketch(flat: torch.Tensor, seed: int) -> torch.Tensor:
    """The sketch of one vector.

    Args:
        flat: [n] float, any n.
        seed: of the signs; the same for vectors that are to be compared, another for every other part of a whole.

    Returns:
        [K] float64 on its device.
    """
    draw = torch.Generator(device=flat.device).manual_seed(seed)
    total = torch.zeros(K, dtype=torch.float64, device=flat.device)
    for part in flat.detach().split(_CHUNK):
        x = torch.nn.functional.pad(part.float(), (0, -part.numel() % K))
        signed = torch.where(_signs(x.numel(), draw), x, -x).view(-1, K).double()
        total += signed.new_ones(signed.shape[0]) @ signed  # several times faster than a sum over rows
    return total


def _signs(n: int, draw: torch.Generator) -> torch.Tensor:
    """[n] bool, from random words: drawing each by itself takes eight times as long."""
    words = torch.empty(-(-n // 32), dtype=torch.int32, device=draw.device).random_(-(2**31), 2**31, generator=draw)
    bits = torch.ones((), dtype=torch.uint8, device=draw.device) << torch.arange(8, device=draw.device)
    return words.view(torch.uint8)[:, None].bitwise_and(bits.to(torch.uint8)).ne(0).view(-1)[:n]


def seed_of(name: str, start: int, length: int, rank: int) -> int:
    """32 bits that stand for one part of one parameter on one rank.

    Args:
        name: of the parameter.
        start: its first element that the rank counts.
        length: how many.
        rank: global.
    """
    return zlib.crc32(f"{rank} {name} {start} {length}".encode())
