"""A run as the comparison sees it, what may not be compared, and relative loss errors. Pure.

The relative loss error of a step is (FP8 loss - BF16 loss) / BF16 loss, on losses smoothed by an exponential moving
average of coefficient 0.9, as DeepSeek-V3 reports it (arXiv:2412.19437, figure 10: "consistently remains below 0.25%").
A withheld step's loss was made by the same weights as its neighbours' and counts like theirs, if it is finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import LedgerView, StepEntry
from megatron_stability.ledger.sketches import Sketch, distance

SMOOTHING = 0.9
SAME_WEIGHTS = 1e-6  # relative; sums over ranks may differ in their last bits
NO_CONTROL = "is no BF16 run: it ran linears in FP8"


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run.

    Attributes:
        name: shown in sentences.
        steps: of the surviving trajectory.
        held_out: last held-out loss (nats), None where none was measured.
        step_seconds: median wall time of a step, None where it was not measured.
        data: what identifies data, seed and layout; equal for runs that may be compared.
        sketches: of weights and gradients, by step; empty where the run wrote none.
        settings: what its ledger says of the flags that decide what is learnt, those at their defaults left out.
    """

    name: str
    steps: Sequence[StepEntry]
    held_out: float | None = None
    step_seconds: float | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    sketches: Mapping[int, Sketch] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_ledger(
        cls,
        name: str,
        view: LedgerView,
        held_out: float | None = None,
        step_seconds: float | None = None,
        sketches: Mapping[int, Sketch] | None = None,
    ) -> RunFigures:
        """From a ledger's lines; identity comes from its last generation, and the ledger fills what is None."""
        layout = view.runs[-1].layout if view.runs else {}
        data = {key: str(value) for key, value in layout.items()} | (view.runs[-1].data if view.runs else {})
        steps = view.surviving
        held = [step.signals["held_out/validation"] for step in steps if "held_out/validation" in step.signals]
        seconds = [step.signals["step_seconds"] for step in steps if "step_seconds" in step.signals]
        return cls(
            name=name,
            steps=steps,
            held_out=held[-1] if held_out is None and held else held_out,
            step_seconds=median(seconds) if step_seconds is None and seconds else step_seconds,
            data=data,
            sketches=sketches or {},
            settings=view.runs[-1].settings if view.runs else {},
        )

    @property
    def scaling(self) -> str | None:
        """How scales are found: delayed, current, block, mxfp8, or Transformer Engine's name; None: not known."""
        emulated = self.settings.get("fp8.emulate")
        if emulated is not None:
            return str(emulated)
        return str(self.settings.get("fp8_recipe", "delayed")) if self.settings.get("fp8") else None

    @property
    def delayed_seen(self) -> bool:
        """Whether some step had a scale of an earlier one in use, which only delayed scaling has."""
        return any("fp8/binades" in step.signals for step in self.steps)

    @property
    def history(self) -> tuple[int, str]:
        """Steps of delayed scaling's amax history, and what it takes of them."""
        length = int(self.settings.get("fp8_amax_history_len", 1))
        return length, str(self.settings.get("fp8_amax_compute_algo", "most_recent"))

    @property
    def fp8_share(self) -> float:
        """Share of linear layers that ran in FP8, least over the steps; 0 where nothing says so."""
        shares = [
            1 - step.signals.get("fp8/fallbacks", 0.0) / gemms if (gemms := step.signals.get("fp8/gemms", 0.0)) else 0.0
            for step in self.steps
        ]
        return min(shares, default=0.0)

    @property
    def any_fp8(self) -> bool:
        """Some linear ran in FP8 in some step."""
        gemms = (step.signals.get("fp8/gemms", 0.0) - step.signals.get("fp8/fallbacks", 0.0) for step in self.steps)
        return any(number > 0 for number in gemms)

    @property
    def withheld(self) -> int:
        """Steps that changed no weight."""
        return sum(step.fate != "trained" for step in self.steps)

    @property
    def halted(self) -> bool:
        """The policy ended it."""
        return bool(self.steps) and self.steps[-1].fate == "halted"


def refuse(fp8: RunFigures, control: RunFigures, warmup: int) -> None:
    """Raise for a comparison that would compare something else.

    Args:
        fp8: the run under test.
        control: BF16.
        warmup: steps that are left out.

    Raises:
        UsageError: names the run and what is wrong with it.
    """
    for run in (fp8, control):
        if not run.steps:
            raise UsageError(f"{run.name}: its ledger has no step; give the folder of a run that trained")
    if fp8.fp8_share == 0.0:
        raise UsageError(
            f"{fp8.name}: its ledger has steps without any linear in FP8, so FP8 was not active; start it with "
            "--stability-fp8-emulate, or with --fp8-format and Transformer Engine"
        )
    if control.any_fp8:
        raise UsageError(f"{control.name} {NO_CONTROL}; give the BF16 run second")
    refuse_different(fp8, control)
    refuse_unhealthy(control)
    common = min(len(fp8.steps), len(control.steps))
    if common <= warmup:
        raise UsageError(f"{fp8.name} and {control.name} share {common} steps, not more than the {warmup} of --warmup")
    for step in fp8.sketches.keys() & control.sketches.keys():
        if fp8.sketches[step].cut != control.sketches[step].cut:
            raise UsageError(
                f"{fp8.name} and {control.name} cut their weights over ranks differently, so their sketches say "
                "nothing; compare runs of one layout and optimizer"
            )
    first = min(fp8.sketches.keys() & control.sketches.keys(), default=0)
    if first == 1:
        mine, theirs = ([x for row in run.sketches[first].weights for x in row] for run in (fp8, control))
        if not distance(mine, theirs) <= SAME_WEIGHTS:
            raise UsageError(
                f"{fp8.name} and {control.name} did not begin with the same weights; give both the same --seed, "
                "initialization and --load"
            )


def refuse_noise(noise: RunFigures, control: RunFigures, warmup: int) -> None:
    """Raise for a run that says nothing of the noise between BF16 runs.

    Args:
        noise: said to be BF16 with another seed.
        control: BF16.
        warmup: steps that are left out.

    Raises:
        UsageError: names the run and what is wrong with it.
    """
    if noise.any_fp8:
        raise UsageError(f"{noise.name} {NO_CONTROL}; give --noise a BF16 run with another seed")
    if noise.data.get("seed") == control.data.get("seed"):
        raise UsageError(
            f"{noise.name} has the seed of {control.name}, {control.data.get('seed')}, so it says nothing of noise; "
            "give --noise a BF16 run with another seed"
        )
    refuse_different(noise, control, but=("seed",))
    refuse_unhealthy(noise)
    if min(len(noise.steps), len(control.steps)) <= warmup:
        raise UsageError(f"{noise.name} has not more steps than the {warmup} of --warmup; let it run longer")


def refuse_different(run: RunFigures, control: RunFigures, but: Sequence[str] = ()) -> None:
    """Raise where data, layout, or a step's samples or tokens differ.

    Args:
        run: one of them.
        control: the other.
        but: keys of `RunFigures.data` that may differ; with "seed", tokens too.

    Raises:
        UsageError: names the first difference.
    """
    for key in sorted({*run.data, *control.data} - {*but}):
        if run.data.get(key) != control.data.get(key):
            raise UsageError(
                f"{run.name} and {control.name} differ in {key} ({run.data.get(key)}, {control.data.get(key)}); "
                "compare runs of one data set and layout"
            )
    for a, b in zip(run.steps, control.steps, strict=False):
        mine, theirs = ((s.step, s.first_sample, s.samples) for s in (a, b))
        same_tokens = a.tokens == b.tokens or "seed" in but
        if mine != theirs or not same_tokens:
            raise UsageError(
                f"{run.name} and {control.name} did not train on the same samples in step {a.step}; compare runs "
                "of one data set, batch size and skip list"
            )


def refuse_unhealthy(control: RunFigures) -> None:
    """Raise for a BF16 run that nothing can be measured against.

    Raises:
        UsageError: names a trained step whose loss is no positive number, or says that the run was halted.
    """
    if control.halted:
        raise UsageError(f"{control.name} was halted at step {control.steps[-1].step}; a control must be healthy")
    for step in control.steps:
        if step.fate == "trained" and not (math.isfinite(step.loss) and step.loss > 0):
            raise UsageError(f"{control.name} has a loss of {step.loss} in step {step.step}; a control must be healthy")


def relative_errors(run: RunFigures, control: RunFigures) -> list[tuple[int, float]]:
    """(step, relative error of the smoothed losses) of the steps that both runs have; NaN at a loss that is NaN.

    Steps at which the control's loss is not finite (withheld ones) are left out.
    """
    errors = []
    smooth_run = smooth_control = math.nan
    for a, b in zip(run.steps, control.steps, strict=False):
        if not math.isfinite(b.loss):
            continue
        smooth_control = b.loss if math.isnan(smooth_control) else SMOOTHING * smooth_control + (1 - SMOOTHING) * b.loss
        if not math.isfinite(a.loss):
            errors.append((a.step, math.nan))
            continue
        smooth_run = a.loss if math.isnan(smooth_run) else SMOOTHING * smooth_run + (1 - SMOOTHING) * a.loss
        errors.append((a.step, (smooth_run - smooth_control) / smooth_control))
    return errors
