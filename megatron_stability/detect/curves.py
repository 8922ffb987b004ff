"""Labelled synthetic training curves, to measure detectors by.

Noise as real runs have it: heavy-tailed (Student t), autocorrelated (AR(1)), larger early; a loss that falls by a power
law; gradient norms that scatter by factors. Everything follows from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stability.records import StepRecord


@dataclass(frozen=True, slots=True)
class Fault:
    """One labelled fault: `start` is its first step, `end` the last on which it still shows."""

    kind: str  # "blip", "spike", "slow burn" or "gradient"
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Records of one run and the faults in it."""

    records: Sequence[StepRecord]
    faults: Sequence[Fault]


KINDS = ("blip", "spike", "slow burn", "gradient")
FIRST_FAULT, SPACING = 600, 700  # steps: between faults a run recovers and baselines settle


def synthesize(seed: int, steps: int, faults: bool, sigma: float = 0.02) -> Curve:
    """One run.

    Args:
        seed: of everything random.
        steps: number of steps.
        faults: with one fault about every `SPACING` steps, kinds in turn; else healthy.
        sigma: standard deviation of the loss noise late in the run, in nats.

    Returns:
        Records without optional signals, and the labels.
    """
    rng = random.Random(seed)
    loss_noise, norm_noise = _noise(rng, steps, rho=0.3), _noise(rng, steps, rho=0.5)
    rise, factor = [0.0] * (steps + 1), [1.0] * (steps + 1)
    labels = []
    if faults:
        for i, at in enumerate(range(FIRST_FAULT, steps - SPACING, SPACING)):
            labels.append(_fault(rng, KINDS[i % len(KINDS)], at + rng.randrange(100), rise, factor))
    records = []
    for step in range(1, steps + 1):
        scale = sigma * (1.0 + 4.0 * math.exp(-step / 200))
        records.append(
            StepRecord(
                step=step,
                first_sample=(step - 1) * 256,
                samples=256,
                tokens=256 * 4096.0,
                loss=1.9 + 9.0 * (step + 2) ** -0.4 + scale * loss_noise[step - 1] + rise[step],
                grad_norm=(0.25 + 6.0 * (step + 2) ** -0.6) * math.exp(0.15 * norm_noise[step - 1]) * factor[step],
                learning_rate=3e-4 * min(step / 500, 1.0),
            )
        )
    return Curve(records, labels)


def _noise(rng: random.Random, steps: int, rho: float) -> list[float]:
    """AR(1) noise of unit variance with Student t innovations of 10 degrees of freedom."""
    degrees, value, out = 10, 0.0, []
    scale = math.sqrt((1 - rho * rho) * (degrees - 2) / degrees)
    for _ in range(steps):
        chi = rng.gammavariate(degrees / 2, 2.0)
        value = rho * value + scale * rng.gauss(0, 1) / math.sqrt(chi / degrees)
        out.append(value)
    return out


def _spread(rng: random.Random, low: float, high: float) -> float:
    """Log-uniform: as many small as large."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _fault(rng: random.Random, kind: str, at: int, rise: list[float], factor: list[float]) -> Fault:
    """Write a fault into the loss rise (nats) and the gradient-norm factor, by step."""
    if kind == "blip":  # one bad batch
        rise[at] += _spread(rng, 0.1, 2.0)
        factor[at] *= _spread(rng, 1.5, 20.0)
        return Fault(kind, at, at)
    if kind == "gradient":  # one step, seen in the gradient only
        factor[at] *= _spread(rng, 3.0, 60.0)
        return Fault(kind, at, at)
    if kind == "spike":  # the gradient leads by one step, the loss climbs and recovers
        height, climb, tail = _spread(rng, 0.1, 3.0), rng.randint(1, 6), rng.uniform(20, 80)
        end = at + climb + int(3 * tail)
        for step in range(at, end + 1):
            since = step - at
            share = since / climb if since <= climb else math.exp(-(since - climb) / tail)
            rise[step] += height * share
            factor[step] *= 1.0 + rng.uniform(1.0, 10.0) * (math.exp(-since / 5))
        return Fault(kind, at, end)
    height, climb = _spread(rng, 0.1, 1.0), rng.randint(150, 350)  # slow burn: normal gradients throughout
    end = at + climb + 150
    for step in range(at, end + 1):
        since = step - at
        rise[step] += height * (since / climb if since <= climb else 1.0 - (since - climb) / 150)
    return Fault(kind, at, end)
