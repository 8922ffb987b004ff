"""A tensor's bits as one integer, and its largest magnitude: what must be equal after a load, or on two replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

CHUNK = 1 << 20  # 8-byte words mixed at once: the temporary memory is a few times 8 MiB
BLOCK = 1 << 22  # bytes of a host tensor that are hashed and searched before the next: they stay in the cache
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as int64
_LOW = 0xFFFFFFFF
_NO_SIGN_ON_NAN = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # whose NaN is the code of -0


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
    return torch.tensor(_signed(xxhash.xxh3_64_intdigest(_bytes(tensor))), dtype=torch.int64)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


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


@torch.no_grad()
def mixed_and_amax(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`mixed` and `amax` in one reading, by a kernel: the same values.

    Args:
        tensor: any shape and dtype, on a GPU, or anywhere under Triton's interpreter.

    Returns:
        [] int64 and [] fp64.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() < 8 or tensor.dtype in _NO_SIGN_ON_NAN:
        return mixed(tensor), amax(tensor)
    from megatron_stability.observe import fingerprint_triton

    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole, width = raw.numel() // 8 * 8, tensor.dtype.itemsize if tensor.dtype.is_floating_point else 0
    found = fingerprint_triton.launch(raw[:whole].view(torch.int64), width, _signed(2 * _GOLDEN))
    total = found[0] + _signed(raw.numel() * _GOLDEN)
    largest = _magnitude(found[1], tensor.dtype) if width else found.new_zeros((), dtype=torch.float64)
    if whole < raw.numel():
        tail = raw.new_zeros(8)
        tail[: raw.numel() - whole] = raw[whole:]
        total += _mixed(tail.view(torch.int64), total.new_zeros(1), whole // 8)
        if width:
            rest = amax(tail.view(tensor.dtype))
            largest = torch.where(rest.isnan() | (rest > largest), rest, largest)
    return total, largest


def _magnitude(code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[] fp64 of a float's code without its sign."""
    return code.reshape(1).view(dtype)[0].double()  # little-endian: the code is the first element


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
    """The fingerprint of each tensor.

    Args:
        named: (name, tensor), all on one device or on several.

    Returns:
        By name, in order.
    """
    return begin(named)()


def begin(named: Iterable[tuple[str, torch.Tensor]]) -> Callable[[], dict[str, Fingerprint]]:
    """Begin `fingerprints` beside what the caller does next: on a device behind its queue, on the host in a thread.

    Args:
        named: as there; no tensor may change before the result is asked for.

    Returns:
        Waits for the fingerprints; with two copies to the host in all.
    """
    found = dict(named)
    # fp32 weights are their own masters, and need be looked at once only; the same by identity, for an address of 0
    # is that of every wrapper subclass and of every empty tensor
    places = {name: id(tensor) for name, tensor in found.items()}
    tensors = {id(tensor): tensor for tensor in found.values()}
    on_the_host = all(tensor.device.type == "cpu" for tensor in tensors.values())
    wait = _on_the_host(tensors.values()) if on_the_host else _on_devices(tensors.values())

    def result() -> dict[str, Fingerprint]:
        of_place = dict(zip(tensors, wait(), strict=True))
        return {name: of_place[place] for name, place in places.items()}

    return result


def _on_devices(tensors: Collection[torch.Tensor]) -> Callable[[], list[Fingerprint]]:
    device = next(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    pairs = [(bits(each), amax(each)) if each.device.type != "cuda" else mixed_and_amax(each) for each in tensors]
    all_bits, all_amax = (torch.stack([one.to(device) for one in column]) for column in zip(*pairs, strict=True))
    return lambda: [Fingerprint(b, a) for b, a in zip(all_bits.tolist(), all_amax.tolist(), strict=True)]


def _on_the_host(tensors: Collection[torch.Tensor]) -> Callable[[], list[Fingerprint]]:
    raw = [(_bytes(tensor), tensor.dtype) for tensor in tensors]
    pool = ThreadPoolExecutor(1, thread_name_prefix="fingerprints")
    work = pool.submit(lambda: [_of_bytes(data, dtype) for data, dtype in raw])
    pool.shutdown(wait=False)
    return work.result


def _of_bytes(data: memoryview, dtype: torch.dtype) -> Fingerprint:
    """Hash and amax in one reading, mostly without Python's lock.

    A float's code without its sign grows with the magnitude, up to Inf and on to NaN: so the largest code as a signed
    and as an unsigned integer are those of the positive and of the negative elements. The NaN of fp8 without a negative
    zero (fnuz) is the smallest signed one.
    """
    if not data.nbytes:
        return Fingerprint(0, 0.0)
    width = dtype.itemsize if dtype.is_floating_point else 1
    signed = np.frombuffer(data, f"i{width}")
    unsigned = signed.view(f"u{width}")
    digest, extremes = xxhash.xxh3_64(), []
    for start in range(0, signed.size, BLOCK // width):
        block = slice(start, start + BLOCK // width)
        digest.update(signed[block])
        if dtype.is_floating_point:
            extremes += [signed[block].max(), unsigned[block].max().view(signed.dtype)]
        if width == 1:
            extremes.append(signed[block].min())
    if not dtype.is_floating_point:
        return Fingerprint(_signed(digest.intdigest()), 0.0)
    return Fingerprint(_signed(digest.intdigest()), float(amax(torch.from_numpy(np.array(extremes)).view(dtype))))


def combined(prints: Iterable[Fingerprint]) -> int:
    """One int64 over fingerprints in their order."""
    total = 0
    for number, each in enumerate(prints, start=1):
        total = _signed(total * _GOLDEN + each.bits + number)
    return total
