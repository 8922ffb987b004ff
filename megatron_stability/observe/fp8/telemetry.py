"""FP8 telemetry, one vocabulary for emulation and Transformer Engine: sites, what is known of each, and the signals.

A site is one tensor of one linear layer. Tier 1 (every step, no synchronisation) has its amax and scale; tier 2
(sampled) counts what quantization did (`numerics/fp8/stats.py`). Ranks of one pipeline stage have the same sites in the
same order, so their tables are combined column by column; other stages have other layers and are never mixed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from megatron_stability.records import encode_float
from megatron_stability.signals import PLACED, notable, ways
from megatron_stability.sites import Site

_WARM = 8  # accepted steps before an amax has a history to be compared with

#: `<signal>/at` is where it began, see `Site.order`.
SIGNALS = ways(("fp8/gemms", "fp8/fallbacks", *PLACED, *(f"{name}/at" for name in PLACED)))
_SHARES = ("fp8/saturation", "fp8/underflow")  # of these every tensor has some: a place has at least half the largest


def worst(name: str, values: torch.Tensor, orders: torch.Tensor) -> dict[str, torch.Tensor]:
    """The largest value of a signal and where it began, without a synchronisation; NaN where nothing is known.

    An outlier grows downstream, so the largest value is rarely where it came from: the place is the first site, in the
    order in which a step computes, whose value is `notable`; NaN where none is.

    Args:
        name: of the signal.
        values: [n], NaN where unknown.
        orders: [n] float64, `Site.order` of each.
    """
    nothing = torch.tensor(math.nan, dtype=torch.float64, device=orders.device)
    if values.numel() == 0:
        return {name: nothing, f"{name}/at": nothing}
    largest = torch.where(values.isnan(), -math.inf, values.double()).amax()
    level = (largest / 2).clamp(min=notable(name)) if name in _SHARES else notable(name)
    first = torch.where(values >= level, orders, math.inf).amin()
    return {
        name: torch.where(largest.isneginf(), nothing, largest),
        f"{name}/at": torch.where(first.isinf(), nothing, first),
    }


def binades(
    amax: torch.Tensor, scale: torch.Tensor, least_normal: torch.Tensor, orders: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Fewest binades from the least normal value to a tensor's amax, and the first site with fewer than are enough.

    Args:
        amax: [n] of the step; 0 where a tensor had no element.
        scale: [n] with which it was quantized; exactly 1 before delayed scaling has set one.
        least_normal: [n] of each tensor's format.
        orders: [n] float64, `Site.order` of each.
    """
    left = (amax.double() * scale.double() / least_normal.double()).log2()
    left = torch.where((amax > 0) & amax.isfinite() & (scale != 1), left, math.inf)
    least, first = left.amin(), torch.where(left < notable("fp8/binades"), orders, math.inf).amin()
    return {
        name: torch.where(value.isinf(), math.nan, value)
        for name, value in (("fp8/binades", least), ("fp8/binades/at", first))
    }


class AmaxHistory:
    """How each amax compares with its own past, and how long each scale has stood still. [n] tensors, on the device.

    The past is a moving average of log2(amax) over accepted steps, of the last 20 or so.
    """

    def __init__(self, sites: int, device: torch.device) -> None:
        """Nothing is known of any site."""
        self._mean = torch.zeros(sites, dtype=torch.float64, device=device)
        self._steps = torch.zeros(sites, dtype=torch.float64, device=device)
        self._age = torch.zeros(sites, dtype=torch.float64, device=device)
        self._last = torch.full((2, sites), math.nan, dtype=torch.float64, device=device)

    def rise(self, amax: torch.Tensor) -> torch.Tensor:
        """[n] amax over its past; NaN while there is no past, or no amax (a silent expert)."""
        ratio = torch.exp2(amax.double().log2() - self._mean)
        return torch.where((self._steps >= _WARM) & (amax > 0), ratio, math.nan)

    def age(self, amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[n] steps for which the scale has stood still while its amax moved, this one included."""
        still = (scale == self._last[1]) & (amax != self._last[0])
        moved = scale != self._last[1]
        return torch.where(still, self._age + 1, torch.where(moved, 0.0, self._age))

    def learn(self, amax: torch.Tensor, scale: torch.Tensor) -> None:
        """Take an accepted step into the past."""
        self._age = self.age(amax, scale)
        self._last = torch.stack([amax.double(), scale.double()])
        usable = (amax > 0) & amax.isfinite()
        weight = torch.where(self._steps > 0, 0.1, 1.0)
        mean = self._mean + weight * (amax.double().log2() - self._mean)
        self._mean = torch.where(usable, mean, self._mean)
        self._steps += usable


def table(
    sites: Sequence[Site], amax: Sequence[float], scale: Sequence[float], stats: Sequence[Mapping[str, float]]
) -> list[dict[str, object]]:
    """Rows for the log, in full precision; NaN and infinities as strings, as everywhere in the records.

    Args:
        sites: of one pipeline stage.
        amax: of each, largest over the stage's ranks.
        scale: of each; NaN where a tensor has many.
        stats: of each, saturation, underflow (shares) and snr_db.
    """
    return [
        {"layer": site.layer, "module": site.module, "tensor": site.tensor, "expert": site.expert}
        | {name: encode_float(value) for name, value in {"amax": a, "scale": s, **more}.items()}
        for site, a, s, more in zip(sites, amax, scale, stats, strict=True)
    ]
