"""The `detect` section: one section a detector, under the detector's name. The figures are FIELD defaults."""

from __future__ import annotations

import re
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from megatron_stability.section import Section
from megatron_stability.signals import notable

RELEARN = Field(50, ge=2, description="consecutive finite flags after which the baseline starts anew")


class Switch(Section):
    """A detector without parameters."""

    enabled: bool = True


ChangeKind = Literal["batch_size", "sequence_length", "data", "learning_rate", "model"]


class Expect(Switch):
    """Changes that are meant, so that nobody undoes them."""

    announced: tuple[tuple[int, ChangeKind], ...] = Field(
        (), description="STEP:KIND,... or [[step, kind], ...]: the first step of each announced change"
    )
    grace_steps: int = Field(50, ge=1, description="steps after a change in which nothing is scaled or rewound")
    reset: tuple[str, ...] = Field((), description="detectors whose saved baselines are not taken over, by name")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        """`expect: ["6001:data"]` in the file."""
        return {"announced": given} if isinstance(given, str | list | tuple) else given

    @field_validator("announced", mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        """`STEP:KIND`, as a flag spells it, one or several."""
        parts = given.split(",") if isinstance(given, str) else given
        if not isinstance(parts, list | tuple):
            raise ValueError(f"is not STEP:KIND; KIND is one of {', '.join(get_args(ChangeKind))}")
        return [_change(part) if isinstance(part, str) else part for part in parts]

    @field_validator("reset", mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        names = given.split(",") if isinstance(given, str) else given
        for name in names if isinstance(names, list | tuple) else ():
            if name not in detector_names():
                raise ValueError(f"no such detector: {str(name)[:40]}; known: {', '.join(detector_names())}")
        return names


def _change(text: str) -> tuple[int, str]:
    found = re.fullmatch(r"\s*(\d{1,9}):(\w+)\s*", text)
    if found is None or found[2] not in get_args(ChangeKind):
        raise ValueError(f"`{text[:40]}` is not STEP:KIND; KIND is one of {', '.join(get_args(ChangeKind))}")
    return int(found[1]), found[2]


class Early(Section):
    """Early training is looser: thresholds of loss and norm detectors start at FACTOR and fall to 1 by STEPS."""

    steps: int = Field(500, ge=0, description="last step of early training; 0: none")
    factor: float = Field(1.5, ge=1, description="on thresholds at step 0")

    def looseness(self, step: int) -> float:
        """The factor on thresholds at a step, >= 1."""
        return 1.0 if step >= self.steps else 1.0 + (self.factor - 1.0) * (1.0 - step / self.steps)


class Windowed(Switch):
    """A baseline of the last WINDOW accepted values."""

    window: int = Field(100, ge=4, description="accepted values in the baseline")
    warmup_steps: int = Field(50, ge=2, description="accepted values before the first verdict")
    persistence: int = Field(1, ge=1, description="suspicious values in a row before a verdict")
    relearn_after: int = RELEARN

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.warmup_steps > self.window:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than window {self.window} can hold; raise it")
        if self.persistence >= self.relearn_after:
            raise ValueError(f"persistence {self.persistence} is not below relearn_after {self.relearn_after}")
        return self


class LossSpike(Windowed):
    """Loss above mu + k sigma on PERSISTENCE steps in a row, or above mu + K_AT_ONCE sigma on one."""

    k: float = Field(4.5, gt=0, description="standard deviations")
    k_at_once: float = Field(12.0, gt=0, description="standard deviations that need no persistence")
    persistence: int = Field(2, ge=1, description="suspicious steps in a row before a verdict")
    sigma_floor: float = Field(0.005, gt=0, description="nats; a deviation below this counts as this")


class LossMad(Windowed):
    """Loss above a robust local fit by k * 1.4826 * MAD of what the fit left over before."""

    warmup_steps: int = Field(8, ge=2, description="accepted values before the first verdict")
    prior: float = Field(0.1, ge=0, description="nats; a deviation below this counts as this until 50 are accepted")
    k: float = Field(6.0, gt=0, description="robust standard deviations")
    watch: float = Field(0.5, gt=0, description="nats from which K_WATCH sigma need no persistence")
    k_watch: float = Field(6.0, gt=0, description="robust standard deviations of a rise by WATCH nats")
    k_at_once: float = Field(14.0, gt=0, description="robust standard deviations that need no persistence")
    persistence: int = Field(2, ge=1, description="suspicious steps in a row before a verdict")
    sigma_floor: float = Field(0.005, gt=0, description="nats; a deviation below this counts as this")


class LossDelta(Windowed):
    """Median of the last SMOOTH losses, in nats above the mean of accepted ones."""

    window: int = Field(200, ge=4, description="accepted values in the baseline")
    lag: int = Field(100, ge=0, description="accepted steps before a loss enters the baseline")
    smooth: int = Field(9, ge=1, description="losses in the running median")
    k: float = Field(1.0, gt=0, description="standard deviations that each step of the cumulative sum leaves out")
    h: float = Field(12.0, gt=0, description="cumulative sum, in standard deviations, from which a rise is watched")
    watch: float = Field(0.15, gt=0, description="nats above the baseline worth watching")
    medium: float = Field(0.3, gt=0, description="nats from which it is no longer mild")
    severe: float = Field(0.5, gt=0, description="nats from which it is told at once")
    severe_steps: int = Field(20, ge=1, description="steps in a row after which it is severe")
    watch_steps: int = Field(50, ge=1, description="steps in a row above WATCH before a verdict")
    mild_steps: int = Field(200, ge=1, description="steps in a row after which it is no longer mild")
    relearn_after: int = Field(1000, ge=2, description="consecutive finite flags after which the baseline starts anew")


class LossDivergence(Switch):
    """Loss that has left its level and does not come back: what a rewind waits for."""

    warmup_steps: int = Field(20, ge=2, description="accepted values before the first verdict")
    nats: float = Field(0.5, gt=0, description="nats above the baseline")
    steps: int = Field(20, ge=2, description="steps in a row above NATS")
    amplified_nats: float = Field(1.0, gt=0, description="nats above the baseline, with a norm above AMPLIFIED")
    amplified: float = Field(5.0, gt=1, description="x the norm's usual value, within the row")
    amplified_steps: int = Field(10, ge=2, description="steps in a row, the last above AMPLIFIED_NATS")
    relearn_after: int = Field(150, ge=2, description="consecutive finite flags after which the baseline starts anew")


class LossRatio(Windowed):
    """Loss as a multiple of its running mean."""

    small: float = Field(2.0, gt=1, description="x the running mean")
    medium: float = Field(5.0, gt=1, description="x the running mean")
    large: float = Field(20.0, gt=1, description="x the running mean")
    small_steps: int = Field(10, ge=1, description="a small ratio for more steps than this is medium")


class SpikeScore(Windowed):
    """Share of values at least k sigma from the rolling mean of 1000 (OLMo 2)."""

    k: float = Field(7.0, gt=0, description="standard deviations")
    window: int = Field(1000, ge=4, description="accepted values in the rolling mean, and values in the share")
    warmup_steps: int = Field(200, ge=2, description="accepted values before the first verdict")
    alert: float = Field(0.005, ge=0, lt=1, description="share above which a further spike raises a verdict")


class GradNormSpike(Windowed):
    """Gradient norm against the mean of its last accepted values (FIELD: > 10x the running mean)."""

    ratio: float = Field(10.0, gt=1, description="flag a norm above RATIO x the running mean")
    warmup_steps: int = Field(20, ge=1, description="accepted values before the first verdict")
    floor: float = Field(1e-6, gt=0, description="a running mean below this counts as this")
    level_after: int = Field(4, ge=2, description="such norms in a row, alike, after which one more is a new level")
    level_spread: float = Field(10.0, gt=1, description="largest over least norm of a level")
    adam_beta2: float = Field(0.999, gt=0, lt=1, description="for the steps that Adam needs to forget the spike")


class GradNormZ(Switch):
    """z-score of the log of the gradient norm against exponential moving averages (after ZClip)."""

    k: float = Field(6.0, gt=0, description="standard deviations of the log norm")
    min_ratio: float = Field(3.0, ge=1, description="no verdict below this multiple of the mean")
    alpha: float = Field(0.97, gt=0, lt=1, description="weight of the past in the moving averages")
    warmup_steps: int = Field(50, ge=2, description="accepted values before the first verdict")
    sigma_floor: float = Field(0.05, gt=0, description="a deviation of the log norm below this counts as this")
    relearn_after: int = RELEARN


class GradNormCalibrated(Switch):
    """Thresholds from the run's own first norms, or given (see `detect.grad_norm.calibrate`)."""

    skip_steps: int = Field(200, ge=0, description="first accepted norms that are left out")
    calibration_steps: int = Field(1000, ge=100, description="accepted norms that set the thresholds")
    clip: float | None = Field(None, gt=0, description="recommended clip of a finished run; default: calibrate")
    spike: float | None = Field(None, gt=0, description="spike threshold of a finished run; default: calibrate")
    clip_ratio: float = Field(5.0, gt=1, description="a norm above this multiple of CLIP is a medium finding")
    persistence: int = Field(5, ge=1, description="norms in a row above SPIKE before a verdict")
    relearn_after: int = RELEARN

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.clip is None) != (self.spike is None):
            raise ValueError("clip and spike come from one calibration; give both or neither")
        return self


class ClipFraction(Switch):
    """Share of the last steps whose gradient was clipped."""

    window: int = Field(200, ge=10, description="finite steps in the share")
    after_step: int = Field(2000, ge=0, description="no verdict in early training, where clipping is usual")
    watch: float = Field(0.25, gt=0, le=1, description="share: the threshold is too tight")
    small: float = Field(0.5, gt=0, le=1, description="share: a deeper problem")


class Limits(Switch):
    """A value against fixed limits."""

    watch: float | None = Field(None, description="limit of the tier; none: the tier isn't used")
    small: float | None = Field(None, description="limit of the tier; none: the tier isn't used")
    medium: float | None = Field(None, description="limit of the tier; none: the tier isn't used")
    large: float | None = Field(None, description="limit of the tier; none: the tier isn't used")
    persistence: int = Field(1, ge=1, description="measurements in a row before a verdict")


class Growth(Windowed):
    """A value as a multiple of the mean of its last accepted values."""

    window: int = Field(20, ge=4, description="accepted values in the baseline")
    warmup_steps: int = Field(5, ge=2, description="accepted values before the first verdict")
    watch: float = Field(1.5, gt=1, description="x the running mean")
    small: float = Field(2.0, gt=1, description="x the running mean")
    after_step: int = Field(2000, ge=0, description="no verdict up to this step")


class Trend(Switch):
    """A slope through the medians of blocks of values."""

    block: int = Field(20, ge=1, description="values in a block")
    blocks: int = Field(50, ge=10, description="blocks in the fit")
    t: float = Field(4.0, gt=0, description="slope over its standard error, corrected for autocorrelation")
    rise: float = Field(0.1, gt=0, description="least rise over the window, in the value's unit")
    repeat_blocks: int = Field(50, ge=1, description="blocks after which a standing trend is reported again")


class Plateau(Switch):
    """No progress of the loss over a long window."""

    block: int = Field(50, ge=1, description="losses in a block")
    blocks: int = Field(100, ge=4, description="blocks in the window")
    progress: float = Field(0.001, ge=0, description="nats from the first half's mean to the second's")
    repeat_blocks: int = Field(100, ge=1, description="blocks after which a standing plateau is reported again")


class LrPeak(Windowed):
    """A loss spike while the learning rate is at its highest so far."""

    k: float = Field(5.0, gt=0, description="standard deviations")
    near_steps: int = Field(200, ge=1, description="steps since the learning rate last rose")
    sigma_floor: float = Field(0.005, gt=0, description="nats; a deviation below this counts as this")
    persistence: int = Field(2, ge=1, description="suspicious steps in a row before a verdict")


class HeldOut(Section):
    """A held-out loss above its own best."""

    enabled: bool = True
    small: float = Field(0.1, gt=0, description="nats above the best")
    large: float = Field(0.5, gt=0, description="nats above the best")
    relearn_after: int = Field(5, ge=2, description="consecutive finite flags after which the best starts anew")


class BadBatch(Switch):
    """A batch unlike the run's own first ones: repeated n-grams, or few different tokens."""

    calibration_steps: int = Field(200, ge=10, description="first batches, which set the thresholds")
    k: float = Field(8.0, gt=0, description="robust standard deviations of the calibration's scores")
    floor: float = Field(0.5, gt=0, lt=1, description="no verdict below this score; 1: a row of one token")
    relearn_after: int = RELEARN


class TokenDrop(Switch):
    """Valid target tokens a sample, as a share of the most that the run has had."""

    block: int = Field(10, ge=1, description="steps in a median, of which the largest is the most")
    watch: float = Field(0.5, gt=0, lt=1, description="share of the most")
    small: float = Field(0.1, gt=0, lt=1, description="share of the most")
    medium: float = Field(0.01, gt=0, lt=1, description="share of the most")
    persistence: int = Field(3, ge=1, description="such steps in a row before a verdict")
    relearn_after: int = Field(1000, ge=2, description="consecutive finite flags after which the most starts anew")


class OddInput(Switch):
    """Input that is plainly odd: told once each."""

    first_steps: int = Field(20, ge=2, description="first finite steps, by which loss and norm are judged")
    nats: float = Field(30.0, gt=0, description="a loss always above this is not in nats a token")
    in_period: int = Field(4, ge=3, description="withheld steps at one distance from each other that make a period")


class Detect(Section):
    """Detectors, one section each; a section's name is its detector's name. `early` is no detector."""

    early: Early = Early()
    non_finite: Switch = Switch()
    rank_agreement: Switch = Switch()
    expect: Expect = Expect()
    grad_norm_spike: GradNormSpike = GradNormSpike()
    grad_norm_z: GradNormZ = GradNormZ()
    grad_norm_calibrated: GradNormCalibrated = GradNormCalibrated()
    grad_norm_spike_score: SpikeScore = SpikeScore()
    grad_norm_drift: Trend = Trend(rise=0.7)
    vanishing: Limits = Limits(small=1e-6, persistence=3)
    clip_fraction: ClipFraction = ClipFraction()
    loss_spike: LossSpike = LossSpike()
    loss_mad: LossMad = LossMad()
    loss_delta: LossDelta = LossDelta()
    loss_divergence: LossDivergence = LossDivergence()
    loss_ratio: LossRatio = LossRatio()
    loss_spike_score: SpikeScore = SpikeScore()
    loss_drift: Trend = Trend(rise=0.05)
    plateau: Plateau = Plateau()
    lr_peak: LrPeak = LrPeak()
    held_out: HeldOut = HeldOut()
    layer_outlier: Limits = Limits(small=10, medium=100)
    param_growth: Growth = Growth()
    embedding_growth: Growth = Growth()
    attention_logits: Limits = Limits(watch=100, medium=1000)
    attention_logit_growth: Trend = Trend(rise=0.4, block=10)
    qk_gain_drift: Trend = Trend(rise=0.2, block=10)
    attention_dead_heads: Limits = Limits(watch=0)
    attention_entropy: Limits = Limits(small=0.05, persistence=3)
    fp8_amax_rise: Limits = Limits(watch=notable("fp8/amax_rise"), small=64)
    fp8_amax_fall: Limits = Limits(watch=notable("fp8/amax_fall"), small=2048)
    fp8_fallbacks: Limits = Limits(watch=0.5)
    fp8_saturation: Limits = Limits(small=notable("fp8/saturation"), medium=1e-2, persistence=2)
    fp8_underflow: Limits = Limits(watch=notable("fp8/underflow"), small=0.5, persistence=2)
    fp8_binades: Limits = Limits(watch=notable("fp8/binades"), persistence=3)
    fp8_scale_stuck: Limits = Limits(watch=notable("fp8/scale_age"))
    moe_load: Limits = Limits(watch=4, small=16, persistence=20)
    moe_drops: Limits = Limits(watch=0.1, small=0.3, persistence=20)
    moe_router_z: Growth = Growth(window=100, warmup_steps=50, persistence=3, after_step=500)
    bad_batch: BadBatch = BadBatch()
    token_drop: TokenDrop = TokenDrop()
    odd_input: OddInput = OddInput()
    throughput: Growth = Growth(window=100, warmup_steps=20, persistence=10, watch=1.5, small=3.0, after_step=20)


LEVEL_CHANGE = "level_change"  # what a norm detector calls a level that stays, instead of one spike after the other


def detector_names() -> tuple[str, ...]:
    """Every detector's name, in the order of the tree."""
    return tuple(name for name in Detect.model_fields if name != "early")


def verdict_names() -> tuple[str, ...]:
    """Every name that a verdict can have and a rule can ask for."""
    return *detector_names(), LEVEL_CHANGE
