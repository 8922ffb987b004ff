"""Settings of FP8: emulation, telemetry, scaling state."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_stability.section import Section


class Fp8(Section):
    """FP8. Margin, history and BF16 layers are Megatron's own flags (--fp8-margin, --fp8-amax-history-len, ...)."""

    emulate: Literal["none", "delayed", "current", "block", "mxfp8"] = Field(
        "none", description="a dry run of a recipe's numerics on CPUs and GPUs without FP8: linears of the local spec"
    )
    format: Literal["recipe", "hybrid", "e4m3"] = Field(
        "recipe", description="recipe: as Transformer Engine's recipe has it (hybrid; e4m3 for block and mxfp8)"
    )
    fp32_scales: bool = Field(False, description="block: scales that are no powers of two")
    sample_every: int = Field(100, ge=1, description="steps between two exact counts of saturation and underflow")
    inspect: bool = Field(
        False, description="Transformer Engine: sampled counts too, through nvdlfw-inspect and TE's debug path"
    )
    keep_amax_after_skips: int = Field(
        3, ge=1, description="skips in a row with a stale scale after which the new amax is kept"
    )
    recalibrate: int = Field(
        0, ge=0, description="steps without quantization that set the scales when a checkpoint lacks them; 0: refuse"
    )
