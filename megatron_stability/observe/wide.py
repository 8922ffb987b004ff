"""Signals that take more than one number: what must be equal on replicas, and one value a layer.

A rank that has nothing to say gives NaN; a step on which no rank has anything adds no signal. How much travels depends
on the layout of the model and not on the number of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch


class Wide(Protocol):
    """What a rank gives for one name, and what the sums and maxima over ranks say."""

    @property
    def columns(self) -> int:
        """Of what an observer hands over, the same on every rank and step."""

    @property
    def sums(self) -> int:
        """How many sums travel."""

    @property
    def keys(self) -> int:
        """How many maxima travel."""

    def signals(self, name: str) -> tuple[str, ...]:
        """Names of the signals that it makes."""

    def give(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[sums] and [keys] float64 of a rank's [columns] float64; NaN: none. No device-to-host copy."""

    def take(self, name: str, sums: Sequence[float], keys_k: torch.Tensor) -> tuple[Mapping[str, float], bool]:
        """Signals, and whether ranks disagree and are to be named, from the sums and the maxima (NaN: none)."""

    def outvoted(self, values: Sequence[float]) -> frozenset[int]:
        """The ranks that disagree, from every rank's own value (`values[rank]`, the first column; NaN: none)."""


def fold(bits: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash ([] int64) as a [1] float64 that is exact: its upper 12 bits are folded into the lower 52."""
    return (bits ^ (bits >> 12)).bitwise_and((1 << 52) - 1).double().reshape(1)


@dataclass(frozen=True)
class Replicas:
    """A digest (see `fold`) that the ranks of a group must have in common.

    The largest and the smallest digest of each group travel: they are equal where all are. Who is wrong is asked for
    only where they are not.

    Attributes:
        groups: global ranks of each group of replicas; a rank may be in none.
        rank: this one.
    """

    groups: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def columns(self) -> int:
        """The digest."""
        return 1

    @property
    def sums(self) -> int:
        """None."""
        return 0

    @property
    def keys(self) -> int:
        """Two a group."""
        return 2 * len(self.groups)

    def signals(self, name: str) -> tuple[str, ...]:
        """`ranks/<name>`."""
        return (f"ranks/{name}",)

    @cached_property
    def _mine(self) -> int | None:
        return next((at for at, group in enumerate(self.groups) if self.rank in group), None)

    def give(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The digest and its negative in the places of this rank's group."""
        keys_k = value.new_full((self.keys,), math.nan)
        if self._mine is not None:
            keys_k[2 * self._mine : 2 * self._mine + 2] = torch.cat([value, -value])
        return value.new_empty(0), keys_k

    def take(self, name: str, sums: Sequence[float], keys_k: torch.Tensor) -> tuple[Mapping[str, float], bool]:
        """`ranks/<name>`: 0 on steps that compared and found all equal; else the count follows from `outvoted`."""
        largest_g, smallest_g = keys_k.view(-1, 2).unbind(1)
        if bool(largest_g.isnan().all()):
            return {}, False
        return {self.signals(name)[0]: 0.0}, bool((largest_g != -smallest_g).logical_and(~largest_g.isnan()).any())

    def outvoted(self, values: Sequence[float]) -> frozenset[int]:
        """Those in the minority of their group; of a tie both sides."""
        found: set[int] = set()
        for group in self.groups:
            votes = Counter(values[rank] for rank in group if not math.isnan(values[rank]))
            if len(votes) > 1:
                (most, first), (_, second), *_ = votes.most_common(2)
                found.update(rank for rank in group if first == second or values[rank] != most)
        return frozenset(found)


@dataclass(frozen=True)
class Layers:
    """A sum of squares a layer, whose roots are summed up by their largest and their (lower) median.

    Attributes:
        columns: number of layers of the whole model.
    """

    columns: int

    @property
    def sums(self) -> int:
        """One a layer."""
        return self.columns

    @property
    def keys(self) -> int:
        """Whether any rank measured."""
        return 1

    def signals(self, name: str) -> tuple[str, ...]:
        """`<name>_max`, `<name>_median`, `<name>_max/at`."""
        return f"{name}_max", f"{name}_median", f"{name}_max/at"

    def give(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The squares as they are; a key that is a number where one of them is."""
        known = (~value.isnan()).any()
        return value, torch.where(known, 0.0, math.nan).to(value.dtype).reshape(1)

    def take(self, name: str, sums: Sequence[float], keys_k: torch.Tensor) -> tuple[Mapping[str, float], bool]:
        """`<name>_max`, `<name>_median` and `<name>_max/at`, the 1-based layer; inf where one layer is not finite."""
        if math.isnan(float(keys_k[0])):
            return {}, False
        norms = [math.sqrt(total) for total in sums]
        largest = max(range(self.columns), key=norms.__getitem__)
        values = norms[largest], sorted(norms)[(self.columns - 1) // 2], largest + 1.0
        return dict(zip(self.signals(name), values, strict=True)), False

    def outvoted(self, values: Sequence[float]) -> frozenset[int]:
        """None: layers are no matter of agreement."""
        return frozenset()
