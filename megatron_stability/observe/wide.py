"""Signals of more than one column in a rank's row: what must be equal on replicas, and one value a layer.

A rank that has nothing to say fills its columns with NaN; a step on which no rank has anything adds no signal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch


class Wide(Protocol):
    """How the columns of one name are combined over ranks."""

    @property
    def columns(self) -> int:
        """Their number, the same on every rank and step."""

    def signals(self, name: str) -> tuple[str, ...]:
        """Names of the signals that it makes."""

    def combine(self, name: str, rows: torch.Tensor) -> tuple[Mapping[str, float], frozenset[int]]:
        """Signals, and ranks that disagree, from [world, columns] float64 on the host; the same on every rank."""


def fold(bits: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash ([] int64) as a [1] float64 that is exact: its upper 12 bits are folded into the lower 52."""
    return (bits ^ (bits >> 12)).bitwise_and((1 << 52) - 1).double().reshape(1)


@dataclass(frozen=True)
class Replicas:
    """A digest (see `fold`) that the ranks of a group must have in common.

    Attributes:
        groups: global ranks of each group of replicas; a rank may be in none.
    """

    groups: tuple[tuple[int, ...], ...]
    columns: ClassVar[int] = 1

    def signals(self, name: str) -> tuple[str, ...]:
        """`ranks/<name>`."""
        return (f"ranks/{name}",)

    def combine(self, name: str, rows: torch.Tensor) -> tuple[Mapping[str, float], frozenset[int]]:
        """`ranks/<name>`: the number of outvoted ranks, on steps that compared; of a tie both sides are outvoted."""
        values = rows[:, 0].tolist()
        if all(map(math.isnan, values)):
            return {}, frozenset()
        outvoted: set[int] = set()
        for group in self.groups:
            votes = Counter(values[rank] for rank in group if not math.isnan(values[rank]))
            if len(votes) > 1:
                (most, first), (_, second), *_ = votes.most_common(2)
                outvoted.update(rank for rank in group if first == second or values[rank] != most)
        return {self.signals(name)[0]: float(len(outvoted))}, frozenset(outvoted)


@dataclass(frozen=True)
class Layers:
    """A sum of squares a layer, whose roots are summed up by their largest and their (lower) median.

    Attributes:
        columns: number of layers of the whole model.
    """

    columns: int

    def signals(self, name: str) -> tuple[str, ...]:
        """`<name>_max`, `<name>_median`, `<name>_max/at`."""
        return f"{name}_max", f"{name}_median", f"{name}_max/at"

    def combine(self, name: str, rows: torch.Tensor) -> tuple[Mapping[str, float], frozenset[int]]:
        """`<name>_max`, `<name>_median` and `<name>_max/at`, the 1-based layer; NaN where one layer is not finite."""
        known = ~rows.isnan()
        if not bool(known.any()):
            return {}, frozenset()
        total_l = torch.zeros(self.columns, dtype=rows.dtype)
        for row_l in rows.nan_to_num(nan=0.0, posinf=math.inf):  # rank by rank: the same order, so the same bits
            total_l += row_l
        norms = total_l.sqrt().tolist()
        largest = max(range(self.columns), key=norms.__getitem__)
        values = norms[largest], sorted(norms)[(self.columns - 1) // 2], largest + 1.0
        return dict(zip(self.signals(name), values, strict=True)), frozenset()
