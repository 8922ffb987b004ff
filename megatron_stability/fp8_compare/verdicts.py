"""From the comparison's figures to a verdict: every gate passes, fails, or says why nothing is judged by it. Pure.

A figure that a run can give and did not is a failure: a gate that saw nothing proves nothing. What a run can't give is
named, and so is what was left out on purpose (`--without`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_stability.fp8_compare.figures import RunFigures
from megatron_stability.fp8_compare.gates import EARLY, GATES, LONG_HISTORY, Gates, layer_name, least

Outcome = Literal["pass", "fail", "not measured", "none to judge", "left out"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one gate says.

    Attributes:
        gate: its name, as `--without` takes it.
        outcome: `fail` and `not measured` fail the comparison; `none to judge`: this run can't give the figure.
        why: one sentence; empty for a pass.
    """

    gate: str
    outcome: Outcome
    why: str = ""

    @property
    def is_finding(self) -> bool:
        """Whether it fails the comparison."""
        return self.outcome in ("fail", "not measured")


def judge(result: Mapping[str, Any], fp8: RunFigures, control: RunFigures, gates: Gates) -> list[Verdict]:
    """Every gate's verdict, in the order of `GATES`.

    Args:
        result: the figures of `criteria.compare`.
        fp8: the run under test.
        control: BF16.
        gates: what passes.
    """
    verdicts = [
        _whole(fp8),
        _steps(fp8, control),
        _loss(result),
        _cosine(result, fp8, control, gates),
        _binades(result["telemetry"], fp8, gates),
        _share("underflow", result["telemetry"], fp8, gates.underflow, "of a tensor's non-zero elements became zero"),
        _share("saturation", result["telemetry"], fp8, gates.saturation, "of a tensor's elements were cut off"),
        _held_out(result),
        _slowdown(result, gates),
    ]
    assert [verdict.gate for verdict in verdicts] == list(GATES)
    return verdicts


def summary(verdicts: Sequence[Verdict]) -> str:
    """`PASS: 7 of 9 gates judged; ...` or `FAIL: 2 of 7 ...`, and what was not judged."""
    judged = [verdict for verdict in verdicts if verdict.outcome in ("pass", "fail")]
    failed = [verdict.gate for verdict in verdicts if verdict.is_finding]
    blank = [f"{each.gate} ({each.outcome}{_because(each)})" for each in verdicts if each not in judged]
    said = f"{len(judged)} of {len(verdicts)} gates judged"
    head = f"FAIL: {', '.join(failed)}; {said}" if failed else f"PASS: {said}"
    return head + (f"; not judged: {', '.join(blank)}" if blank else "")


def as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [asdict(verdict) for verdict in verdicts]


def _because(verdict: Verdict) -> str:
    return f": {verdict.why}" if verdict.outcome == "none to judge" else ""


def _whole(fp8: RunFigures) -> Verdict:
    if not fp8.halted:
        return Verdict(gate="halt", outcome="pass")
    last = fp8.steps[-1]
    return Verdict(gate="halt", outcome="fail", why=f"{fp8.name} was halted at step {last.step}: {last.reason}")


def _steps(fp8: RunFigures, control: RunFigures) -> Verdict:
    """From a step on that only one run applied, the two have different weights for a reason that is not rounding."""
    unequal = list(_unequal(fp8, control))
    if not unequal:
        return Verdict(gate="steps", outcome="pass")
    more = f", and {len(unequal) - 1} more" if len(unequal) > 1 else ""
    return Verdict(
        gate="steps",
        outcome="fail",
        why=f"{unequal[0]}{more}: from there on the runs differ by more than FP8; compare runs that withheld the same "
        "steps, e.g. both with --stability-mode observe (stability.mode: observe)",
    )


def _unequal(fp8: RunFigures, control: RunFigures) -> Iterator[str]:
    for a, b in zip(fp8.steps, control.steps, strict=False):
        if "halted" not in (a.fate, b.fate) and (a.fate == "trained") != (b.fate == "trained"):
            withheld, other = (fp8, control) if b.fate == "trained" else (control, fp8)
            yield f"{withheld.name} withheld step {a.step}, which {other.name} did not"


def _loss(result: Mapping[str, Any]) -> Verdict:
    worst, limit = result["loss_error_worst"], result["loss_error_limit"]
    if abs(float(worst["error"])) <= limit:  # a NaN is a finding
        return Verdict(gate="loss", outcome="pass")
    return Verdict(
        gate="loss",
        outcome="fail",
        why=f"relative loss error {float(worst['error']):+.4%} in steps {worst['first_step']} to {worst['last_step']}, "
        f"after {result['tokens']:,.0f} tokens, is beyond the gate of {limit:.4%}",
    )


def _cosine(result: Mapping[str, Any], fp8: RunFigures, control: RunFigures, gates: Gates) -> Verdict:
    if gates.cosine is None:
        return Verdict(gate="cosine", outcome="left out")
    early = next((row for row in result["updates"] if row["step"] == EARLY), None)
    first = max(run.steps[0].step for run in (fp8, control))
    if early is None and first > EARLY:
        why = f"gradients are judged in step {EARLY}, and the runs begin with step {first}"
        return Verdict(gate="cosine", outcome="none to judge", why=why)
    if early is None:
        return Verdict(
            gate="cosine",
            outcome="not measured",
            why=f"gradient cosine was not measured: no sketch of step {EARLY} in both runs; give both "
            "--stability-observe-sketch-every N (stability.observe.sketch.every)",
        )
    row, value = least(early["gradient_cosine"])
    if value >= gates.cosine:
        return Verdict(gate="cosine", outcome="pass")
    return Verdict(
        gate="cosine",
        outcome="fail",
        why=f"gradients of {layer_name(row)} in step {EARLY} have a cosine of {value:.3f} with the control's; the gate "
        f"is {gates.cosine:g}",
    )


def _binades(telemetry: Mapping[str, Any], fp8: RunFigures, gates: Gates) -> Verdict:
    value = telemetry["binades"]
    if gates.binades is None:
        return Verdict(gate="binades", outcome="left out")
    if value is None and fp8.scaling not in (None, "delayed"):
        why = f"{fp8.scaling} scaling takes each tensor's own amax"
        return Verdict(gate="binades", outcome="none to judge", why=why)
    if value is None and fp8.scaling is None and not fp8.delayed_seen:
        why = "no scale of an earlier step was in use"
        return Verdict(gate="binades", outcome="none to judge", why=why)
    if value is None:
        why = "binades were not measured, though scaling is delayed; its signal fp8/binades is missing after warmup"
        return Verdict(gate="binades", outcome="not measured", why=why)
    if float(value) >= gates.binades:
        return Verdict(gate="binades", outcome="pass")
    return Verdict(
        gate="binades",
        outcome="fail",
        why=f"scales leave {float(value):.1f} binades to normal values{_where(telemetry, 'binades')}; the gate is "
        f"{gates.binades:g}: a smaller --fp8-margin (model.fp8_margin)",
    )


def _share(gate: str, telemetry: Mapping[str, Any], fp8: RunFigures, most: float | None, what: str) -> Verdict:
    value = telemetry[gate]
    if most is None:
        return Verdict(gate=gate, outcome="left out")
    if value is None:
        return Verdict(
            gate=gate,
            outcome="not measured",
            why=f"{gate} was not measured: no sampled step after warmup; give --stability-fp8-sample-every N "
            "(stability.fp8.sample_every), and under Transformer Engine --stability-fp8-inspect true "
            "(stability.fp8.inspect)",
        )
    if float(value) <= most:
        return Verdict(gate=gate, outcome="pass")
    remedy = _remedy(fp8) if gate == "saturation" else ""
    why = f"{float(value):.2%} {what}{_where(telemetry, gate)}; the gate is {most:.2%}{remedy}"
    return Verdict(gate=gate, outcome="fail", why=why)


def _remedy(fp8: RunFigures) -> str:
    """Saturation of delayed scaling: a scale made for a smaller amax than the step's."""
    if not (fp8.scaling == "delayed" or fp8.delayed_seen):
        return ""
    length, algorithm = fp8.history
    if (length, algorithm) == LONG_HISTORY:
        return (
            ": amaxes grow faster than a history follows; a larger --fp8-margin (model.fp8_margin) or a longer --warmup"
        )
    return (
        f": its scales follow the {algorithm} amax of {length} step{'s' if length > 1 else ''}; use "
        f"--fp8-amax-history-len {LONG_HISTORY[0]} --fp8-amax-compute-algo {LONG_HISTORY[1]} "
        "(model.fp8_amax_history_len, model.fp8_amax_compute_algo)"
    )


def _where(telemetry: Mapping[str, Any], name: str) -> str:
    return f", first at {telemetry[f'{name}_at']}" if telemetry[f"{name}_at"] else ""


def _held_out(result: Mapping[str, Any]) -> Verdict:
    error, most = result["held_out_error"], result["held_out_limit"]
    if most is None:
        return Verdict(gate="held-out", outcome="left out")
    if error is None:
        return Verdict(
            gate="held-out",
            outcome="not measured",
            why="held-out loss was not measured in both runs; give both a validation split, --eval-iters and an "
            "--eval-interval within the run (validation.eval_iters, validation.eval_interval)",
        )
    if float(error) <= most:
        return Verdict(gate="held-out", outcome="pass")
    why = f"held-out loss is {float(error):+.4%} off the control's; the gate is {most:.4%}"
    return Verdict(gate="held-out", outcome="fail", why=why)


def _slowdown(result: Mapping[str, Any], gates: Gates) -> Verdict:
    slowdown = result["slowdown"]
    if gates.slowdown is None:
        return Verdict(gate="time", outcome="left out")
    if slowdown is not None and slowdown <= gates.slowdown:
        return Verdict(gate="time", outcome="pass")
    measured = "was not measured" if slowdown is None else f"is {slowdown:.2f}x the control's"
    why = f"time a step {measured}; the gate is {gates.slowdown:.2f}x"
    return Verdict(gate="time", outcome="not measured" if slowdown is None else "fail", why=why)
