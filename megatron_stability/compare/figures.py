"""What two runs' ledgers say of each other: relative loss error, noise band, gate. Pure.

The relative loss error of a step is (FP8 loss - BF16 loss) / BF16 loss, on losses smoothed by an exponential moving
average of coefficient 0.9, as DeepSeek-V3 reports it (arXiv:2412.19437, figure 10: "consistently remains below 0.25%").
The gate takes its mean over the steps after warmup; the largest one is reported beside it, with the noise band: the
same figures between the control and a second BF16 seed, where one is given. A mean error that two BF16 seeds
have between them as well says nothing against FP8, so the limit is never below it: small, short runs need the band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any

from megatron_stability.errors import UsageError
from megatron_stability.record.entries import LedgerView, StepEntry
from megatron_stability.records import encode_float

SMOOTHING = 0.9
NO_CONTROL = "is no BF16 control: it ran linears in FP8"


@dataclass(frozen=True, kw_only=True)
class Gates:
    """Largest values that pass; None: not gated.

    Attributes:
        loss_error: |mean relative loss error| after warmup.
        held_out_error: relative error of the last held-out loss, upwards.
        slowdown: FP8 seconds a step over the control's; 1 asks FP8 to be as fast.
    """

    loss_error: float = 0.0025
    held_out_error: float | None = 0.0025
    slowdown: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run as the comparison sees it.

    Attributes:
        name: shown in sentences.
        steps: of the surviving trajectory.
        held_out: last held-out loss (nats), None where none was measured.
        step_seconds: median wall time of a step, None where it was not measured.
        data: what identifies data, seed and layout; equal for runs that may be compared.
    """

    name: str
    steps: Sequence[StepEntry]
    held_out: float | None = None
    step_seconds: float | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_ledger(
        cls, name: str, view: LedgerView, held_out: float | None = None, step_seconds: float | None = None
    ) -> RunFigures:
        """From a ledger's lines; identity comes from its last generation."""
        layout = view.runs[-1].layout if view.runs else {}
        data = {key: str(value) for key, value in layout.items()} | (view.runs[-1].data if view.runs else {})
        return cls(name=name, steps=view.surviving, held_out=held_out, step_seconds=step_seconds, data=data)

    @property
    def fp8_share(self) -> float:
        """Share of linear layers that ran in FP8, least over the steps; 0 where nothing says so."""
        shares = [
            1 - step.signals.get("fp8/fallbacks", 0.0) / gemms if (gemms := step.signals.get("fp8/gemms", 0.0)) else 0.0
            for step in self.steps
        ]
        return min(shares, default=0.0)


def compare(
    fp8: RunFigures, control: RunFigures, noise: RunFigures | None, warmup: int, gates: Gates
) -> dict[str, Any]:
    """The comparison as strict JSON; `findings` is empty where every gate passes.

    Args:
        fp8: the run under test.
        control: BF16, the same seed, data and layout.
        noise: BF16 with another seed.
        warmup: steps left out of the gate.
        gates: what passes.

    Raises:
        UsageError: FP8 was not active in `fp8`, was in `control`, the data or layout differ, or too few steps are left.
    """
    refuse(fp8, control, warmup)
    errors = relative_errors(fp8, control)
    after = [error for step, error in errors if step > warmup]
    mean, largest = fmean(after), max(after, key=abs)
    band, size = None, 0.0
    if noise is not None:
        refuse_different(noise, control, but=("seed",))
        spread = [error for step, error in relative_errors(noise, control) if step > warmup]
        size = abs(fmean(spread))  # the gated figure itself, between two BF16 runs
        band = {name: encode_float(v) for name, v in (("mean", fmean(spread)), ("largest", max(spread, key=abs)))}
    norms = [
        a.grad_norm / b.grad_norm
        for a, b in zip(fp8.steps, control.steps, strict=False)
        if a.step > warmup and b.grad_norm
    ]
    tokens = math.fsum(step.tokens for step in fp8.steps[: len(errors)])
    held_out = _relative(fp8.held_out, control.held_out)
    slowdown = None if not (fp8.step_seconds and control.step_seconds) else fp8.step_seconds / control.step_seconds
    limit = max(gates.loss_error, size)
    return {
        "fp8": fp8.name,
        "control": control.name,
        "steps": len(errors),
        "warmup": warmup,
        "tokens": tokens,
        "fp8_share": fp8.fp8_share,
        "loss_error_mean": encode_float(mean),
        "loss_error_largest": encode_float(largest),
        "noise": band,
        "grad_norm_ratio_median": encode_float(median(norms)) if norms else None,
        "held_out_error": held_out,
        "slowdown": slowdown,
        "loss_error_limit": limit,
        "gates": asdict(gates),
        "findings": list(_findings(mean, held_out, slowdown, replace(gates, loss_error=limit), tokens)),
        "errors": [[step, encode_float(error)] for step, error in errors],
    }


def refuse(fp8: RunFigures, control: RunFigures, warmup: int) -> None:
    """Raise for a comparison that would compare something else.

    Raises:
        UsageError: names the run and what is wrong with it.
    """
    if fp8.fp8_share == 0.0:
        raise UsageError(
            f"{fp8.name}: its ledger has steps without any linear in FP8, so FP8 was not active; start it with "
            "--stability-fp8-emulate, or with --fp8-format and Transformer Engine"
        )
    if control.fp8_share > 0.0:
        raise UsageError(f"{control.name} {NO_CONTROL}; give the BF16 run second")
    refuse_different(fp8, control)
    common = min(len(fp8.steps), len(control.steps))
    if common <= warmup:
        raise UsageError(f"{fp8.name} and {control.name} share {common} steps, not more than the {warmup} of --warmup")


def refuse_different(run: RunFigures, control: RunFigures, but: Sequence[str] = ()) -> None:
    """Raise where data, layout, or a step's samples or tokens differ.

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


def relative_errors(run: RunFigures, control: RunFigures) -> list[tuple[int, float]]:
    """(step, relative error of the smoothed losses) of the steps that both runs have."""
    errors = []
    smooth_run = smooth_control = math.nan
    for a, b in zip(run.steps, control.steps, strict=False):
        smooth_run = a.loss if math.isnan(smooth_run) else SMOOTHING * smooth_run + (1 - SMOOTHING) * a.loss
        smooth_control = b.loss if math.isnan(smooth_control) else SMOOTHING * smooth_control + (1 - SMOOTHING) * b.loss
        errors.append((a.step, (smooth_run - smooth_control) / smooth_control))
    return errors


def _relative(value: float | None, control: float | None) -> float | None:
    return None if value is None or control is None else (value - control) / control


def _findings(mean: float, held_out: float | None, slowdown: float | None, gates: Gates, tokens: float) -> list[str]:
    found = []
    if not abs(mean) <= gates.loss_error:  # a NaN is a finding
        found.append(
            f"mean relative loss error {mean:+.4%} over {tokens:,.0f} tokens is beyond the gate of "
            f"{gates.loss_error:.4%}"
        )
    if gates.held_out_error is not None and held_out is not None and not held_out <= gates.held_out_error:
        found.append(f"held-out loss is {held_out:+.4%} off the control's; the gate is {gates.held_out_error:.4%}")
    if gates.slowdown is not None and (slowdown is None or not slowdown <= gates.slowdown):
        measured = "was not measured" if slowdown is None else f"is {slowdown:.2f}x the control's"
        found.append(f"time a step {measured}; the gate is {gates.slowdown:.2f}x")
    return found
