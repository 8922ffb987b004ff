"""A tensor's bits as one integer, and its largest magnitude: what must be equal after a load, or on two replicas."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

CHUNK = 1 << 20  # 8-byte words mixed at once: the temporary memory is a few times 8 MiB
THREADS = 4  # host tensors looked at at once; the work leaves Python's lock
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as int64
_LOW = 0xFFFFFFFF


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
    """The hash of a tensor's bytes, on its device: xxh3-64 on the host, `mixed` elsewhere; the two are not compared.

    Args:
        tensor: any shape and dtype.

    Returns:
        [] int64; 0 for an empty tensor.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return mixed(tensor)
    return torch.tensor(_hash(_bytes(tensor)), dtype=torch.int64)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _hash(data: memoryview) -> int:
    return _signed(xxhash.xxh3_64_intdigest(data))


@torch.no_grad()
def mixed(tensor: torch.Tensor) -> torch.Tensor:
    """A hash by integer arithmetic in torch, which an accelerator does at the speed of its memory, in any order.

    Sum over the 8-byte words w at places i of (w ^ w >> 32) · m_i, modulo 2^64, with odd and different m_i: one changed
    word always shows, and so do words that changed places, but for a chance of about 2^-31.

    Args:
        tensor: any shape and dtype.

    Returns:
        [] int64; 0 for an empty tensor.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    if raw.storage_offset() % 8:
        raw = raw.clone()  # a word must begin at a multiple of 8 bytes
    total = torch.full((), _signed(raw.numel() * _GOLDEN), dtype=torch.int64, device=raw.device)
    if whole:
        words = raw[:whole].view(torch.int64)
        places = torch.arange(min(CHUNK, words.numel()), dtype=torch.int64, device=raw.device).mul_(
            _signed(2 * _GOLDEN)
        )
        for start in range(0, words.numel(), CHUNK):
            total += _mixed(words[start : start + CHUNK], places, start)
    if whole < raw.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        tail[: raw.numel() - whole] = raw[whole:]
        total += _mixed(tail.view(torch.int64), torch.zeros(1, dtype=torch.int64, device=raw.device), whole // 8)
    return total


def _mixed(words: torch.Tensor, places: torch.Tensor, start: int) -> torch.Tensor:
    """[] int64 of one chunk that begins at word `start`; `places`: 2·golden·(0, 1, ...), so that m_i is odd."""
    first = _signed(start * 2 * _GOLDEN + 1)
    folded = (words >> 32).bitwise_and_(_LOW).bitwise_xor_(words)
    return folded.mul_(places[: words.numel()] + first).sum()


def _signed(value: int) -> int:
    """A Python integer modulo 2^64, as int64 holds it."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """[] int64 over the bits of tensors in their order, on their device, without a copy to the host.

    Args:
        tensors: at least one, all on one device.
    """
    total: torch.Tensor | None = None
    for number, tensor in enumerate(tensors, start=1):
        mine = bits(tensor)
        total = mine + number if total is None else total * _GOLDEN + mine + number
    assert total is not None, "nothing to digest"
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
    found = dict(named)
    # fp32 weights are their own masters, and need be looked at once only
    places = {name: (t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in found.items()}
    tensors = {places[name]: tensor for name, tensor in found.items()}
    if not tensors:
        return {}
    on_the_host = all(tensor.device.type == "cpu" and tensor.numel() for tensor in tensors.values())
    prints = _on_the_host(tensors.values()) if on_the_host else _on_devices(tensors.values())
    of_place = dict(zip(tensors, prints, strict=True))
    return {name: of_place[place] for name, place in places.items()}


def _on_devices(tensors: Collection[torch.Tensor]) -> list[Fingerprint]:
    hashes, ranges = [bits(tensor) for tensor in tensors], [amax(tensor) for tensor in tensors]
    device = hashes[0].device
    all_bits = torch.stack([value.to(device) for value in hashes]).tolist()
    all_amax = torch.stack([value.to(device) for value in ranges]).tolist()
    return [Fingerprint(b, a) for b, a in zip(all_bits, all_amax, strict=True)]


def _on_the_host(tensors: Collection[torch.Tensor]) -> list[Fingerprint]:
    """Threads hash while this one looks for the largest: torch's own operators stay in the thread that it knows."""
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = [pool.submit(_hash, _bytes(tensor)) for tensor in tensors]
        ranges = [float(amax(tensor)) for tensor in tensors]
        return [Fingerprint(h.result(), a) for h, a in zip(hashes, ranges, strict=True)]


def combined(prints: Iterable[Fingerprint]) -> int:
    """One int64 over fingerprints in their order."""
    total = 0
    for number, each in enumerate(prints, start=1):
        total = _signed(total * _GOLDEN + each.bits + number)
    return total
