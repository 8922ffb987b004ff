"""The `decide` section: the policy table, budgets, cool-down and probation."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatron_stability.decide import presets
from megatron_stability.detect.config import verdict_names
from megatron_stability.records import Action, Tier
from megatron_stability.section import Section

_SCALES = (Action.SCALE_LR, Action.SCALE_WEIGHT_DECAY)


class Rule(Section):
    """One row of the policy table: a verdict of this detector at this tier or above asks for this action.

    `detector: a+b` asks for verdicts of both, each at this tier or above, no more than `within` steps apart.
    """

    detector: str = Field(description="a detector's name, names joined by +, or * for any")
    tier: Tier
    action: Action
    within: int = Field(1, ge=1, description="for joined names: steps within which each raised its verdict")
    factor: float | None = Field(
        None,
        gt=0,
        le=10,
        description="scale_lr, scale_weight_decay, rewind: on the value; above 1 for weight decay only",
    )
    later_factors: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (), description="rewind: the factors of later attempts; none: half the one before"
    )
    steps: int | None = Field(None, ge=1, description="scale_lr, scale_weight_decay, rewind: for this many steps")
    generations: int | None = Field(None, ge=1, description="rewind: complete checkpoints to go back, first attempt")
    skip_steps: int | None = Field(None, ge=1, description="rewind: steps up to the onset whose data is skipped")
    level: bool = Field(False, description="rewind: what recurs at the same samples is taken as a level, and applied")

    @property
    def names(self) -> tuple[str, ...]:
        """The detectors that must agree."""
        return tuple(self.detector.split("+"))

    @field_validator("detector")
    @classmethod
    def _known(cls, detector: str) -> str:
        known = verdict_names()
        for name in detector.split("+"):
            if name not in known and detector != "*":
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"no such detector: {name}; {hint}")
        return detector

    @model_validator(mode="after")
    def _parameters(self) -> Self:
        scales = self.factor is not None, self.steps is not None
        if self.action in _SCALES and not all(scales):
            raise ValueError(f"{self.action} needs factor and steps")
        if self.action is not Action.SCALE_WEIGHT_DECAY and self.factor is not None and self.factor >= 1:
            raise ValueError(f"{self.action} lowers the learning rate: its factor must be below 1")
        unfinished = self.generations is None or self.skip_steps is None or any(scales) != all(scales)
        if self.action is Action.REWIND and unfinished:
            raise ValueError("rewind needs generations and skip_steps, and factor and steps together or not at all")
        if self.action not in (*_SCALES, Action.REWIND) and any(scales):
            raise ValueError(f"{self.action} takes no factor or steps")
        if self.action is not Action.REWIND and (self.generations or self.skip_steps):
            raise ValueError(f"{self.action} takes no generations or skip_steps")
        if (self.later_factors and (self.action is not Action.REWIND or self.factor is None)) or (
            self.level and self.action is not Action.REWIND
        ):
            raise ValueError(f"{self.action} takes no level, nor later_factors without a factor of a rewind")
        return self


class Gate(Section):
    """The repair gate: what the first steps after a rewind must be like, else the policy escalates."""

    steps: int = Field(50, ge=0, description="finite steps after a rewind that are compared; 0: no gate")
    loss: float = Field(0.1, gt=0, description="nats that loss and held-out loss may be above the healthy past")
    norm: float = Field(2.0, gt=1, description="x that the gradient norm may be above the healthy past")
    slow: float = Field(1.5, gt=1, description="x that seconds a token may be above the healthy past")


class Decide(Section):
    """The policy table and its budgets."""

    preset: Literal["watch", "safe", "field", "fp8", "muon"] = Field(
        "safe", description="the named policy that this section begins from: megatron-stability policy show NAME"
    )
    rules: tuple[Rule, ...] = Field((), description="the policy table, in place of the preset's")
    max_consecutive_skips: int = Field(5, ge=1, description="one more skip in a row than this ends skipping")
    max_skips_per_1000_steps: int = Field(50, ge=1, description="one more within the last 1000 steps ends skipping")
    when_exhausted: Literal["halt", "rewind"] = Field("halt", description="what follows when skipping has ended")
    max_rewinds: int = Field(2, ge=0, description="rewinds per run; one more halts it")
    rewind: Literal["in_process", "restart"] = Field(
        "in_process", description="in_process: the job goes on; restart: it ends with code 19 to be started again"
    )
    rewind_skip_steps: int = Field(8, ge=1, description="skip_steps of a rewind by when_exhausted")
    cooldown_steps: int = Field(500, ge=0, description="steps before scale_lr or scale_weight_decay is taken again")
    probation_steps: int = Field(500, ge=0, description="steps after any action in which tiers count one higher")
    snapshot_steps: int = Field(
        0, ge=0, description="copy the state into CPU memory every so many steps, for a first rewind; 0: never"
    )
    snapshot_max_gb: float = Field(32.0, gt=0, description="GB (1e9 bytes) that a rank's snapshot may have")
    skip_samples: tuple[tuple[int, int], ...] = Field(
        (), description="[[first, last], ...] sample indexes, last exclusive: steps that would read one are passed over"
    )
    quiet_steps: int = Field(50, ge=1, description="steps without a verdict of its detector that end an episode")
    gate: Gate = Gate()

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        """What is given goes before what the preset says; a name that is none is left to its own field's error."""
        if not isinstance(given, dict):
            return given
        name = given.get("preset", presets.DEFAULT)
        return presets.settings(name) | given if name in presets.NAMES else given

    @field_validator("skip_samples")
    @classmethod
    def _ordered(cls, windows: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        for first, last in windows:
            if not 0 <= first < last:
                raise ValueError(f"[{first}, {last}] is not a window of samples: it needs 0 <= first < last")
        return windows
