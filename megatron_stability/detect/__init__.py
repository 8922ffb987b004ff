"""Detectors: a StepRecord in, a Verdict out; state that can be saved. `build` makes them from the configuration."""

from __future__ import annotations

from megatron_stability.config import Detect
from megatron_stability.detect.base import Detector
from megatron_stability.detect.grad_norm import GradNormSpike
from megatron_stability.detect.loss import LossSpike
from megatron_stability.detect.non_finite import NonFinite
from megatron_stability.detect.ranks import RankAgreement

# In the order in which they inspect: finiteness and agreement before any comparison.
DETECTORS = (NonFinite, RankAgreement, GradNormSpike, LossSpike)


def build(config: Detect) -> list[Detector]:
    """The enabled detectors in their fixed order, non-finite first.

    Args:
        config: the `detect` section; a detector's section carries the detector's name.

    Returns:
        Detectors without history.
    """
    made: list[Detector] = []
    for kind in DETECTORS:
        section = getattr(config, kind.name)
        if section.enabled:
            made.append(kind(section))
    return made
