"""Counts of a stage's ranks together, whatever their shares of a tensor; and the line that keeps every bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stability.numerics.fp8.formats import E4M3
from megatron_stability.numerics.fp8.stats import COLUMNS, TensorStats, read, tensor_stats
from megatron_stability.observe.fp8.samples import StageSamples, combined
from megatron_stability.sites import Site


def row(shards: list[list[float]], scale: float) -> torch.Tensor:
    """A rank's row a tensor: counts, amax, scale."""
    vectors = [tensor_stats(torch.tensor(shard, dtype=torch.float32), torch.tensor(scale), E4M3) for shard in shards]
    extra = torch.tensor([[float(v[COLUMNS.index("amax")]), scale] for v in vectors], dtype=torch.float64)
    return torch.cat([torch.stack(vectors), extra], 1)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=30), min_size=1, max_size=8),
    st.lists(st.lists(st.floats(width=32), max_size=30), min_size=1, max_size=8),
    st.floats(1e-20, 1e20),
)
def test_ranks_of_any_size_give_the_whole_tensors_counts(
    calm: list[list[float]], wild: list[list[float]], scale: float
) -> None:
    """TP shards, DP replicas' batches and silent experts (empty): the union, and shares within [0, 1]."""
    ranks = max(len(calm), len(wild))
    padded = [part + [[]] * (ranks - len(part)) for part in (calm, wild)]
    found = combined(torch.stack([row([padded[0][rank], padded[1][rank]], scale) for rank in range(ranks)]))
    for stats, parts, largest in zip(found.stats, padded, found.amax, strict=True):
        whole = torch.tensor([value for part in parts for value in part], dtype=torch.float32)
        want = read(tensor_stats(whole, torch.tensor(scale), E4M3))
        assert (stats.elements, stats.nonzero, stats.nonfinite) == (want.elements, want.nonzero, want.nonfinite)
        assert (stats.saturated, stats.underflowed, stats.amax) == (want.saturated, want.underflowed, want.amax)
        assert largest == want.amax
        assert 0.0 <= stats.saturation <= 1.0
        assert 0.0 <= stats.underflow <= 1.0
    assert found.scale == (pytest.approx(scale),) * 2


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2**52), st.integers(0, 2**52), st.floats(0, allow_infinity=False), st.floats(1e-300, 1e300))
def test_the_line_keeps_every_bit(
    tmp_path_factory: pytest.TempPathFactory, n: int, k: int, amax: float, s: float
) -> None:
    stats = TensorStats(n, n, min(k, n), min(k, n), 0, amax, 1.0, 3e-6)
    folder = tmp_path_factory.mktemp("line")
    StageSamples((stats,), (amax,), (s,)).write(folder, 5, 2, [Site(1, "linear_fc1", "input")], {"recipe": "delayed"})
    line = json.loads((folder / "fp8.stage2.jsonl").read_text())
    (got,) = line["tensors"]
    assert (got["amax"], got["scale"], got["elements"]) == (amax, s, n)
    assert (got["saturation"], got["underflow"]) == (stats.saturation, stats.underflow)
    assert (line["step"], line["stage"], line["recipe"]) == (5, 2, "delayed")


def test_what_no_rank_saw_is_unknown_and_not_zero(tmp_path: Path) -> None:
    found = combined(torch.stack([row([[], [900.0, 1.0]], 1.0), row([[], [2.0, 0.0]], 1.0)]))
    orders = torch.tensor([1.0, 2.0], dtype=torch.float64)
    signals = found.signals(orders)
    assert float(signals["fp8/saturation"]) == 0.25
    assert float(signals["fp8/saturation/at"]) == 2.0
    found.write(tmp_path, 1, 0, [Site(1, "linear_fc1", "input"), Site(1, "linear_fc1", "weight")], {})
    silent = json.loads((tmp_path / "fp8.stage0.jsonl").read_text())["tensors"][0]
    assert (silent["elements"], silent["saturation"]) == (0, "nan")
    nothing = combined(torch.stack([row([[]], 1.0)]))
    assert math.isnan(float(nothing.signals(orders[:1])["fp8/underflow"]))
