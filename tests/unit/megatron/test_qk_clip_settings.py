"""The settings, the reduction of further signals, the detectors that read them, and the ledger's tables."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from megatron_stability import config, detect
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import read
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.records import AttentionTable, StepRecord, Tier
from megatron_stability.report.tags import table_scalars
from tests.unit.steps import reduced


@pytest.mark.parametrize(
    "flag",
    [
        "tau=0",
        "tau=.nan",
        "tau=.inf",
        "alpha=1.5",
        "headroom=1",
        "headroom=-0.1",
        "measure=guess",
        "every=0",
    ],
)
def test_impossible_settings_are_refused_by_name(flag: str) -> None:
    name, value = flag.split("=")
    with pytest.raises(UsageError, match=f"--stability-qk-clip-{name}"):
        config.load(None, {config.dest(("qk_clip", name)): value})


def test_signals_are_combined_over_the_ranks_that_have_one() -> None:
    ways = {"hottest": "max", "coolest": "min", "heads": "sum", "nobody": "max"}
    extras = [{"hottest": -3.0, "coolest": 2.0, "heads": 1.0}, {"hottest": math.nan}, {"hottest": -1.5, "heads": 2.0}]
    record = reduced(ways, *extras)
    assert dict(record.signals) == {"hottest": -1.5, "coolest": 2.0, "heads": 3.0}
    infinite = reduced({"hottest": "max"}, {"hottest": math.inf}, {"hottest": 5.0})
    assert infinite.signals["hottest"] == math.inf


def _record(signals: dict[str, float]) -> StepRecord:
    return StepRecord(step=1, first_sample=0, samples=1, tokens=1.0, loss=1.0, grad_norm=1.0, signals=signals)


def test_heads_that_are_not_finite_are_a_finding_of_the_highest_kind_and_dead_ones_are_watched() -> None:
    detectors = {d.name: d for d in detect.build(detect.Detect())}
    found = detectors["non_finite"].inspect(_record({"attention/nonfinite_heads": 2.0}))
    assert found.tier is Tier.NON_FINITE
    assert "2 heads" in found.reason
    assert detectors["non_finite"].inspect(_record({"attention/nonfinite_heads": 0.0})) is None
    assert detectors["attention_logits"].inspect(_record({"attention/max_logit": math.inf})).tier is Tier.LARGE
    assert detectors["attention_dead_heads"].inspect(_record({"attention/nonpositive_heads": 1.0})).tier is Tier.WATCH
    assert detectors["attention_dead_heads"].inspect(_record({"attention/nonpositive_heads": 0.0})) is None


TABLE = AttentionTable(
    step=7,
    layers=("decoder.layers.0", "mtp.layers.0"),
    max_logit_lh=((1.5, math.inf), (-2.0, math.nan)),
    entropy_lh=((0.5, math.nan), (0.25, math.nan)),
    factor_lh=((1.0, 0.5), (1.0, math.nan)),
    clips_lh=((2.0, 3.0), (0.0, math.nan)),
    growth_lh=((math.nan, 0.125), (math.nan, math.nan)),
    max_gain_l=(math.nan, 1.25),
)


def test_the_ledger_keeps_tables_with_nan_and_inf(tmp_path: Path) -> None:
    info = RunInfo(mode="act", versions={}, layout={})
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=info) as ledger:
        ledger.write_attention(TABLE)
    (entry,) = read(tmp_path).attention
    for field in dataclasses.fields(TABLE):
        assert repr(getattr(entry, field.name)) == repr(getattr(TABLE, field.name))


def test_a_table_is_curves_of_layers_and_of_heads() -> None:
    layers = table_scalars(TABLE, "layers")
    assert table_scalars(TABLE, "run") == {}
    assert layers == {
        "stability/attention/max_logit/decoder.layers.0": math.inf,
        "stability/attention/max_logit/mtp.layers.0": -2.0,
        "stability/attention/min_entropy/decoder.layers.0": 0.5,
        "stability/attention/min_entropy/mtp.layers.0": 0.25,
        "stability/attention/logit_growth/decoder.layers.0": 0.125,
        "stability/qk_clip/min_factor/decoder.layers.0": 0.5,
        "stability/qk_clip/min_factor/mtp.layers.0": 1.0,
        "stability/qk_clip/clips/decoder.layers.0": 5.0,
        "stability/qk_clip/clips/mtp.layers.0": 0.0,
        "stability/qk_norm/max_gain/mtp.layers.0": 1.25,
    }
    heads = table_scalars(TABLE, "heads")
    assert heads.items() > layers.items()
    assert heads["stability/attention/max_logit/decoder.layers.0/head_0"] == 1.5
    assert heads["stability/qk_clip/clips/decoder.layers.0/head_1"] == 3.0
    assert "stability/attention/min_entropy/decoder.layers.0/head_1" not in heads
