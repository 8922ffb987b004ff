"""Initial standard deviations: the rules, and a table of measured against expected.

word embedding               d_model^-½     so that a token's vector has norm 1
residual output projections  σ/sqrt(2L)     so that the residual stream's variance does not grow with depth
query and key rows           d_model^-½     for unit-RMS input: logit variance about 1 after the 1/sqrt(d_k) scale
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def d_model_std(d_model: int) -> float:
    """d_model^-½."""
    return d_model**-0.5


def residual_std(sigma: float, layers: int) -> float:
    """σ/sqrt(2L): two residual branches a layer."""
    return sigma / math.sqrt(2 * layers)


@dataclass(frozen=True)
class QKVLayout:
    """Rows of a fused projection, group after group: queries, their output gate if any, key, value.

    Attributes:
        queries_per_group: query heads that share a key head.
        head_dim: d_k.
        gate: an output gate as tall as the queries follows them.
    """

    queries_per_group: int
    head_dim: int
    gate: bool = False

    def slices(self) -> dict[str, slice]:
        """Rows of q, gate, k and v within a group."""
        q = self.queries_per_group * self.head_dim
        gate = q if self.gate else 0
        ends = {"q": q, "gate": gate, "k": self.head_dim, "v": self.head_dim}
        slices, start = {}, 0
        for name, size in ends.items():
            if size:
                slices[name] = slice(start, start + size)
            start += size
        return slices

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        """Views [groups, rows, columns] of q, gate, k and v in a weight of whole groups."""
        slices = self.slices()
        height = slices["v"].stop
        grouped = weight.view(weight.shape[0] // height, height, -1)
        return {name: grouped[:, rows] for name, rows in slices.items()}


def with_qk_std(init: Callable[[Tensor], object], layout: QKVLayout, std: float) -> Callable[[Tensor], Tensor]:
    """`init`, after which the q and k rows have standard deviation `std`.

    The rows that `init` drew are rescaled, so that the generator's state afterwards is what `init` leaves.

    Args:
        init: fills a weight in place with draws of one distribution of mean 0.
        layout: of the weight's rows; the weight holds whole groups.
        std: wanted for q and k.
    """

    @torch.no_grad()
    def filled(weight: Tensor) -> Tensor:
        init(weight)
        parts = layout.parts(weight)
        drawn = weight.float().square().mean().sqrt()
        for name in ("q", "k"):
            parts[name].mul_(std / drawn.to(weight.dtype))
        return weight

    return filled


@dataclass(frozen=True)
class StdRow:
    """One line of the table.

    Attributes:
        name: of the parameter, and of its part.
        measured: root mean square of this rank's shard (the mean is 0 by construction).
        expected: by the rules.
        count: elements measured.
    """

    name: str
    measured: float
    expected: float
    count: int

    @property
    def tolerance(self) -> float:
        """Six standard errors of a normal sample's standard deviation, relative."""
        return 6.0 / math.sqrt(2 * self.count)

    @property
    def agrees(self) -> bool:
        """Whether measured and expected differ by no more than chance."""
        return abs(self.measured / self.expected - 1.0) <= self.tolerance


def measure(parts: Iterable[tuple[str, Tensor, float]]) -> list[StdRow]:
    """One row for each (name, weight or part of it, expected std)."""
    return [
        StdRow(name, float(weight.detach().float().square().mean().sqrt()), expected, weight.numel())
        for name, weight, expected in parts
    ]


def table(rows: Iterable[StdRow]) -> str:
    """The printed table; a row outside its tolerance ends in `differs`."""
    lines = [f"{'measured':>12}{'expected':>12}{'ratio':>8}  parameter"]
    for row in rows:
        note = "" if row.agrees else f"  differs by more than {row.tolerance:.1%}"
        lines.append(f"{row.measured:12.4e}{row.expected:12.4e}{row.measured / row.expected:8.3f}  {row.name}{note}")
    return "\n".join(lines)
