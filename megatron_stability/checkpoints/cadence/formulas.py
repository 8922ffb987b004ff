"""How often to save: Young's and Daly's optimum, and a simulation that also counts how late a fault is seen.

Symbols: T the interval of useful work between saves, C the time a save takes from training, R the time from a failure
until training goes on, M the mean time between failures of the whole job. All in seconds.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974); J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FAILURES = 100_000  # simulated for each interval: the lost share is known to about 1 % of itself
POINTS = 61


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What was measured.

    A save blocks training for `save_s` and slows it by `interference_s` in all (asynchronous saves). Of the failures,
    the share `silent` is seen `delay_s` late on average (a loss that went wrong before anyone saw it): what was saved
    in between is not used.
    """

    save_s: float
    mtbf_s: float
    restart_s: float = 0.0
    interference_s: float = 0.0
    silent: float = 0.0
    delay_s: float = 0.0

    @property
    def per_save_s(self) -> float:
        """C: what one save takes from training."""
        return self.save_s + self.interference_s


def young(C: float, M: float) -> float:
    """Young's T = √(2CM), seconds."""
    return math.sqrt(2 * C * M)


def daly(C: float, M: float) -> float:
    """Daly's T = √(2CM)·[1 + ⅓√(C/2M) + (1/9)(C/2M)] − C for C < 2M, else M; seconds."""
    if C >= 2 * M:
        return M
    x = C / (2 * M)
    return math.sqrt(2 * C * M) * (1 + math.sqrt(x) / 3 + x / 9) - C


def expected_lost_share(T: float, C: float, R: float, M: float) -> float:
    """Daly's exact model without detection delay: the share of the wall time that is not useful work.

    A segment of T useful seconds takes M·e^(R/M)·(e^((T+C)/M) − 1) wall seconds (Daly).
    """
    wall = M * math.exp(R / M) * math.expm1((T + C) / M)
    return 1 - T / wall


def intervals(costs: Costs) -> list[float]:
    """Intervals to look at, in seconds: from a thirtieth of Daly's to thirty times it, evenly in the logarithm."""
    middle = daly(costs.per_save_s, costs.mtbf_s)
    return [middle * 30 ** (place / (POINTS // 2) - 1) for place in range(POINTS)]


def simulated_lost_shares(costs: Costs, T: Sequence[float], seed: int = 0) -> list[float]:
    """The share of the wall time that is lost, for each interval.

    Times between failures are exponential, also during a restart; a silent failure goes on unseen for an exponential
    time of mean `delay_s`, in which no further one is drawn. The same draws serve every interval, so that the curve is
    smooth and its minimum means something.

    Args:
        costs: what was measured.
        T: intervals, seconds.
        seed: of the draws.

    Returns:
        Shares from 0 to 1, in the order of `T`.
    """
    generator = np.random.default_rng(seed)
    lived = generator.exponential(costs.mtbf_s, FAILURES)
    silent = generator.random(FAILURES) < costs.silent
    unseen = np.where(silent, generator.exponential(max(costs.delay_s, 1e-12), FAILURES), 0.0)
    working = np.maximum(lived - costs.restart_s, 0.0)
    wall = float((lived + unseen).sum())
    return [1 - float((np.floor(working / (t + costs.per_save_s)) * t).sum()) / wall for t in T]
