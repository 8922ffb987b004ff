"""The gate: what an FP8 run may do and still pass. Pure; the limits were set before anything was measured with them.

loss       The mean relative error of every window of steps after warmup stays below 0.25 %, as DeepSeek-V3 reports for
           16B and 230B parameters over 1T tokens. In small and short runs two BF16 seeds differ by more than that, and
           no difference below theirs can be laid on FP8: the limit is never below the largest window's error between
           the control and a second BF16 seed. Windows, since a late departure drowns in the mean of a whole run.
telemetry  Medians over the steps after warmup. An error that the loss can't resolve shows in the tensors: binades that
           delayed scaling leaves to normal values (`observe/fp8/telemetry.py`), shares of elements that became zero or
           were cut off. The limits are the detectors' mildest ones.
cosine     Of the two runs' gradients in step 2, the worst layer: the scales of delayed scaling are in force (in step 1
           they are 1), and the weights differ by one update. The GEMMs' operands have relative rounding errors of about
           2.6 % (E4M3) and 5.3 % (E5M2); 16 linears in a row make a noise power below 0.08 of the signal's, a cosine
           above 0.96. 0.9 stands for 0.23. On later steps trajectories part by themselves, so that cosines fall for a
           sound recipe too; they are shown, not judged.
others     Held-out loss, with the second seed's band too; seconds a step; a run that was halted; a step that only one
           of the two withheld, after which their weights differ for a reason that is not rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from megatron_stability.errors import UsageError
from megatron_stability.fp8_compare.figures import RunFigures, refuse, refuse_noise, relative_errors
from megatron_stability.fp8_compare.gates import EARLY, Gates, least
from megatron_stability.fp8_compare.verdicts import as_json, judge, summary
from megatron_stability.ledger.sketches import cosine, update
from megatron_stability.records import encode_float
from megatron_stability.sites import Site


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
        UsageError: FP8 was not active in `fp8`, was in a BF16 run, data, layout or initial weights differ, a BF16 run
            is not healthy, or too few steps are left.
    """
    refuse(fp8, control, warmup)
    errors = relative_errors(fp8, control)
    if not any(step > warmup for step, _ in errors):
        raise UsageError(f"{control.name} has no finite loss after the {warmup} steps of --warmup; let it run longer")
    result: dict[str, Any] = {
        "fp8": fp8.name,
        "control": control.name,
        "steps": len(errors),
        "steps_of": {"fp8": len(fp8.steps), "control": len(control.steps)},
        "withheld": {"fp8": fp8.withheld, "control": control.withheld},
        "warmup": warmup,
        "tokens": math.fsum(step.tokens for step in fp8.steps[: len(errors)]),
        "fp8_share": fp8.fp8_share,
        "scaling": fp8.scaling,
        "history": list(fp8.history),
        "gates": asdict(gates),
    }
    result |= _loss(errors, warmup, gates)
    result |= _noise(noise, control, warmup, gates)
    result["loss_error_limit"] = max(gates.loss_error, result["noise"]["worst"]["error"] if result["noise"] else 0.0)
    result["grad_norm_ratio_median"] = _grad_norm_ratio(fp8, control, warmup)
    result |= _held_out(fp8, control, noise, gates) | _speed(fp8, control)
    result["telemetry"] = _telemetry(fp8, warmup)
    result["updates"] = _updates(fp8, control)
    result["first_departure"] = _first_departure(result["updates"], gates)
    verdicts = judge(result, fp8, control, gates)
    result["verdicts"] = as_json(verdicts)
    result["findings"] = [verdict.why for verdict in verdicts if verdict.is_finding]
    result["verdict"] = summary(verdicts)
    result["errors"] = [[step, encode_float(error)] for step, error in errors]
    return result


def windows(errors: Sequence[tuple[int, float]], warmup: int, length: int) -> list[tuple[int, int, float]]:
    """(first step, last step, mean error) of the windows after warmup: equal parts of about `length` steps or more."""
    after = [pair for pair in errors if pair[0] > warmup]
    number = max(1, len(after) // length)
    cuts = [len(after) * i // number for i in range(number + 1)]
    parts = [after[a:b] for a, b in pairwise(cuts)]
    return [(part[0][0], part[-1][0], fmean(error for _, error in part)) for part in parts if part]


def _worst(parts: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    first, last, error = max(parts, key=lambda part: math.inf if math.isnan(part[2]) else abs(part[2]))
    return {"first_step": first, "last_step": last, "error": encode_float(error)}


def _loss(errors: Sequence[tuple[int, float]], warmup: int, gates: Gates) -> dict[str, Any]:
    after = [error for step, error in errors if step > warmup]
    return {
        "loss_error_mean": encode_float(fmean(after)),
        "loss_error_largest": encode_float(max(after, key=lambda e: math.inf if math.isnan(e) else abs(e))),
        "loss_error_worst": _worst(windows(errors, warmup, gates.window)),
    }


def _noise(noise: RunFigures | None, control: RunFigures, warmup: int, gates: Gates) -> dict[str, Any]:
    if noise is None:
        return {"noise": None}
    refuse_noise(noise, control, warmup)
    spread = [(step, error) for step, error in relative_errors(noise, control) if math.isfinite(error)]
    if not any(step > warmup for step, _ in spread):
        raise UsageError(f"{noise.name} has no finite loss after the {warmup} steps of --warmup; let it run longer")
    worst = _worst(windows(spread, warmup, gates.window))
    worst["error"] = abs(worst["error"])
    after = [error for step, error in spread if step > warmup]
    return {"noise": {"name": noise.name, "mean": fmean(after), "largest": max(after, key=abs), "worst": worst}}


def _grad_norm_ratio(fp8: RunFigures, control: RunFigures, warmup: int) -> float | str | None:
    pairs = zip(fp8.steps, control.steps, strict=False)
    norms = [
        a.grad_norm / b.grad_norm for a, b in pairs if a.step > warmup and b.grad_norm and not math.isnan(b.grad_norm)
    ]
    return encode_float(median(norms)) if norms else None


def _held_out(fp8: RunFigures, control: RunFigures, noise: RunFigures | None, gates: Gates) -> dict[str, Any]:
    error, band = (_relative(run.held_out, control.held_out) if run else None for run in (fp8, noise))
    limit = None if gates.held_out_error is None else max(gates.held_out_error, abs(band or 0.0))
    return {
        "held_out": {"fp8": encode(fp8.held_out), "control": encode(control.held_out)},
        "held_out_error": encode(error),
        "held_out_noise": encode(band),
        "held_out_limit": limit,
    }


def _speed(fp8: RunFigures, control: RunFigures) -> dict[str, Any]:
    seconds = {"fp8": fp8.step_seconds, "control": control.step_seconds}
    tokens = {name: median(s.tokens for s in run.steps) for name, run in (("fp8", fp8), ("control", control))}
    return {
        "step_seconds": seconds,
        "tokens_per_second": {name: tokens[name] / value if value else None for name, value in seconds.items()},
        "slowdown": fp8.step_seconds / control.step_seconds if fp8.step_seconds and control.step_seconds else None,
    }


def _telemetry(fp8: RunFigures, warmup: int) -> dict[str, Any]:
    """Medians over the steps after warmup, each with the site at which the value was beyond most often."""
    found: dict[str, Any] = {}
    for name in ("binades", "underflow", "saturation"):
        seen = [step.signals for step in fp8.steps if step.step > warmup and f"fp8/{name}" in step.signals]
        places = [signals[f"fp8/{name}/at"] for signals in seen if f"fp8/{name}/at" in signals]
        found[name] = encode_float(median(signals[f"fp8/{name}"] for signals in seen)) if seen else None
        found[f"{name}_at"] = str(Site.at(max(sorted(set(places)), key=places.count))) if places else None
    return found


def _updates(fp8: RunFigures, control: RunFigures) -> list[dict[str, Any]]:
    """Cosines of both runs' gradients, and of what the weights changed by since the first step that both recorded."""
    common = sorted(fp8.sketches.keys() & control.sketches.keys())
    rows = []
    for step in common:
        gradients = zip(fp8.sketches[step].gradients, control.sketches[step].gradients, strict=True)
        changes = zip(*(update(run.sketches, common[0], step) for run in (fp8, control)), strict=True)
        rows.append(
            {
                "step": step,
                "gradient_cosine": [encode_float(cosine(a, b)) for a, b in gradients],
                "update_cosine": [encode_float(cosine(a, b)) for a, b in changes] if step > common[0] else None,
            }
        )
    return rows


def _first_departure(updates: Sequence[dict[str, Any]], gates: Gates) -> dict[str, Any] | None:
    """The first recorded step from step 2 on with a layer below the limit, and its layer with the least cosine."""
    for row in updates:
        layer, value = least(row["gradient_cosine"])
        if row["step"] >= EARLY and gates.cosine is not None and not value >= gates.cosine:
            return {"step": row["step"], "layer": layer, "gradient_cosine": encode_float(value)}
    return None


def encode(value: float | None) -> float | str | None:
    """As `encode_float`, None stays."""
    return None if value is None else encode_float(value)


def _relative(value: float | None, control: float | None) -> float | None:
    return None if value is None or not control else (value - control) / control
