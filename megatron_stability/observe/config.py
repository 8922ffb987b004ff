"""Settings of what is measured, and of QK-clip, which needs one of the measurements."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_stability.section import Section


class Attention(Section):
    """Attention logits and entropy, with or without QK-clip."""

    enabled: bool = Field(False, description="measure attention logits and entropy also where qk_clip is off")
    every: int = Field(100, ge=1, description="steps between two entropies and two tables of all layers and heads")
    head_curves: bool = Field(False, description="TensorBoard: five curves of each head too, not of layers alone")


class Observe(Section):
    """Optional measurements."""

    attention: Attention = Attention()


class QKClip(Section):
    """MuonClip's clip of the query and key projections (`numerics/qk_clip.py`)."""

    enabled: bool = Field(False, description="scale q and k of heads whose largest logit is above tau, after a step")
    tau: float = Field(100.0, gt=0, description="largest attention logit; 100 is a backstop, 30 an early warning")
    headroom: float = Field(0.0, ge=0, lt=1, description="h: the clip's limit is (1-h) tau; h is what a step may add")
    alpha: float = Field(0.5, ge=0, le=1, description="the query's share of the factor's exponent")
    measure: Literal["forward", "probe"] = Field(
        "forward",
        description="forward: what the step's attention computes anyway; probe: a pass of our own with the updated "
        "weights over one sequence, for kernels that return nothing",
    )
    every: int = Field(1, ge=1, description="steps between two measurements, and so between two clips")
