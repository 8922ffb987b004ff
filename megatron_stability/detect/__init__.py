"""Detectors: a StepRecord in, a Verdict out; state that can be saved. `build` makes them from the configuration."""

from __future__ import annotations

from typing import Any

from megatron_stability.detect import data, expected, grad_norm, growth, level, limits, loss, trend
from megatron_stability.detect.base import Detector
from megatron_stability.detect.config import Detect
from megatron_stability.detect.non_finite import NonFinite
from megatron_stability.detect.odd import OddInput
from megatron_stability.detect.rank_agreement import RankAgreement

# In the order in which they inspect: finiteness and agreement before any comparison.
DETECTORS: tuple[Any, ...] = (
    NonFinite,
    RankAgreement,
    expected.ExpectedChange,
    grad_norm.GradNormSpike,
    grad_norm.GradNormZ,
    grad_norm.GradNormCalibrated,
    loss.GradNormSpikeScore,
    trend.GradNormDrift,
    limits.Vanishing,
    grad_norm.ClipFraction,
    loss.LossSpike,
    loss.LossMad,
    loss.LossDelta,
    level.LossDivergence,
    loss.LossRatio,
    loss.LossSpikeScore,
    trend.LossDrift,
    trend.Plateau,
    growth.LrPeak,
    growth.HeldOut,
    limits.LayerOutlier,
    growth.ParamGrowth,
    growth.EmbeddingGrowth,
    limits.AttentionLogits,
    trend.AttentionLogitGrowth,
    trend.QkGainDrift,
    limits.AttentionDeadHeads,
    limits.AttentionEntropy,
    limits.Fp8AmaxRise,
    limits.Fp8AmaxFall,
    limits.Fp8Fallbacks,
    limits.Fp8Saturation,
    limits.Fp8Underflow,
    limits.Fp8Binades,
    limits.Fp8ScaleStuck,
    limits.MoeLoad,
    limits.MoeDrops,
    growth.MoeRouterZ,
    data.BadBatch,
    data.TokenDrop,
    OddInput,
    growth.Throughput,
)


def build(config: Detect) -> list[Detector]:
    """The enabled detectors in their fixed order, non-finite first.

    Args:
        config: the `detect` section; a detector's section carries the detector's name.

    Returns:
        Detectors without history.
    """
    sections = ((kind, getattr(config, kind.name)) for kind in DETECTORS)
    return [kind(section, config.early) for kind, section in sections if section.enabled]
