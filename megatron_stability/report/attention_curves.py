"""An attention table as named scalars, for TensorBoard and the like."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megatron_stability.records import AttentionTable

#: A curve's name: the table's field, and what stands for a layer among its heads.
CURVES: Mapping[str, tuple[str, Callable[[Sequence[float]], float]]] = MappingProxyType(
    {
        "attention/max-logit": ("max_logit_lh", max),
        "attention/min-entropy": ("entropy_lh", min),
        "attention/logit-growth": ("growth_lh", max),
        "qk-clip/min-factor": ("factor_lh", min),
        "qk-clip/clips": ("clips_lh", sum),
    }
)


def curves(table: AttentionTable, heads: bool) -> dict[str, float]:
    """A scalar for each curve and layer, e.g. "attention/max-logit/decoder.layers.7"; NaN is left out.

    Args:
        table: of one step.
        heads: a scalar for each head too, e.g. "attention/max-logit/decoder.layers.7/head-3".
    """
    found: dict[str, float] = {}
    for at, layer in enumerate(table.layers):
        for name, (field, over_heads) in CURVES.items():
            known = {f"head-{head}": v for head, v in enumerate(getattr(table, field)[at]) if not math.isnan(v)}
            if known:
                found[f"{name}/{layer}"] = over_heads(list(known.values()))
            found |= {f"{name}/{layer}/{head}": value for head, value in known.items() if heads}
        if not math.isnan(table.max_gain_l[at]):
            found[f"qk-norm/max-gain/{layer}"] = table.max_gain_l[at]
    return found
