"""Tier 2 of FP8 telemetry: the counts of one pipeline stage's ranks together, and their line in the stage's file.

The group is the stage's (tensor x data x context parallel), so that other stages, which have other layers, are never
mixed in. Counts and sums are added before any share is taken: shards of unequal size count by their elements, and no
share can leave [0, 1].
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stability import files
from megatron_stability.numerics.fp8 import stats as fp8_stats
from megatron_stability.numerics.fp8.stats import COLUMNS, TensorStats
from megatron_stability.observe.fp8.telemetry import table, worst
from megatron_stability.sites import Site

AMAX = COLUMNS.index("amax")


@dataclass(frozen=True)
class StageSamples:
    """What is known of each of a stage's n tensors, on the host and equal on all ranks of the stage.

    Attributes:
        stats: counts over all ranks.
        amax: largest over the ranks.
        scale: smallest over the ranks; NaN where a tensor has many.
    """

    stats: tuple[TensorStats, ...]
    amax: tuple[float, ...]
    scale: tuple[float, ...]

    def signals(self, orders: torch.Tensor) -> dict[str, torch.Tensor]:
        """The worst shares and where they are; `orders` [n] float64 on the host, `Site.order` of each tensor."""
        known = [bool(each.elements) for each in self.stats]
        found: dict[str, torch.Tensor] = {}
        for name in ("saturation", "underflow"):
            shares = [getattr(s, name) if k else math.nan for s, k in zip(self.stats, known, strict=True)]
            found |= worst(f"fp8/{name}", torch.tensor(shares, dtype=torch.float64), orders)
        return found

    def write(self, folder: Path, step: int, stage: int, sites: Sequence[Site], facts: dict[str, Any]) -> None:
        """Append the line of a step to `fp8.stage<N>.jsonl`; for one rank of the stage. Floats keep every bit.

        Args:
            folder: made where it is missing.
            step: 1-based.
            stage: pipeline-parallel rank.
            sites: of the n tensors.
            facts: what else the line says of the run: recipe, dtypes of the sums, kernel, fallbacks.
        """
        shares = [
            {"saturation": each.saturation, "underflow": each.underflow, "snr_db": each.snr_db}
            if each.elements
            else dict.fromkeys(("saturation", "underflow", "snr_db"), math.nan)
            for each in self.stats
        ]
        counted = [{**share, "elements": each.elements} for share, each in zip(shares, self.stats, strict=True)]
        line = {"step": step, "stage": stage, **facts, "tensors": table(sites, self.amax, self.scale, counted)}
        files.append_line(folder / f"fp8.stage{stage}.jsonl", json.dumps(line, allow_nan=False))


def combined(rows: torch.Tensor) -> StageSamples:
    """The ranks' rows as one; copies to the host once.

    Args:
        rows: [ranks, n, len(COLUMNS) + 2] float64: a statistics vector, amax, scale.
    """
    columns = len(COLUMNS)
    vectors = fp8_stats.combine(rows[..., :columns].transpose(0, 1))
    amax, scale = rows[..., columns].amax(0), rows[..., columns + 1].amin(0)
    host = torch.cat([vectors, amax[:, None], scale[:, None]], 1).cpu()
    return StageSamples(
        tuple(fp8_stats.read(vector) for vector in host[:, :columns]),
        tuple(host[:, columns].tolist()),
        tuple(host[:, columns + 1].tolist()),
    )


def gather(samples: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, group: Any) -> StageSamples:
    """Collective over a pipeline stage: one gather.

    Args:
        samples: [n, len(COLUMNS)] float64 of this rank.
        amax: [n].
        scale: [n].
        group: the stage's ranks.
    """
    row = torch.cat([samples, amax.double()[:, None], scale.double()[:, None]], 1).contiguous()
    world = dist.get_world_size(group)
    flat = torch.empty(world * row.shape[0], row.shape[1], dtype=row.dtype, device=row.device)
    dist.all_gather_into_tensor(flat, row, group=group)
    return combined(flat.view(world, *row.shape))
