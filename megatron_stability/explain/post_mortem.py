"""A post-mortem to fill in, with what the ledger already knows: timeline, evidence, cause, repair gate, recurrence."""

from __future__ import annotations

from datetime import UTC, datetime

from megatron_stability.explain.triage import Evidence, Triage, filled
from megatron_stability.ledger.entries import StepEntry

AROUND = 8  # steps of the timeline on either side


def post_mortem(found: Triage, run: str) -> str:
    """Markdown; what only people know is left as a line that begins with `TODO`.

    Args:
        found: of the incident.
        run: the run's folder, as the reader named it.
    """
    scene, first = found.scene, found.first
    step = scene.step
    lines = [
        f"# Post-mortem: step {step.step} of {run}",
        "",
        f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from the ledger.",
        "TODO: author, start and end of the outage, lost GPU-hours.",
        "",
        "## What happened",
        "",
        f"{step.reason or (found.facts['found'].says if found.facts['found'] else '')}",
        "",
        "## Timeline",
        "",
        "| Step | Samples | Loss | Gradient norm | Learning rate | Done | Why |",
        "|---|---|---|---|---|---|---|",
        *[_row(each) for each in (*scene.before[-AROUND:], step, *scene.after[:AROUND])],
        "",
        "What restarts before it changed:",
        *([f"- {change}" for change in scene.changes[:10]] or ["- nothing that the ledger records"]),
        "",
        "## Cause",
        "",
        f"{first.cause.kind}, {first.name}: {first.cause.says}",
        f"(probability {first.probability:.0%}, confidence {found.confidence}).",
        "",
        *[f"- for: {_said(each)}" for each in first.speaks_for],
        *[f"- against: {_said(each)}" for each in first.against],
        *[f"- not measured: {each.fact} ({each.flag})" for each in found.enable],
        "",
        "Other hypotheses: " + "; ".join(f"{each.name} {each.probability:.0%}" for each in found.hypotheses[1:4]) + ".",
        "",
        "## Why this is causal",
        "",
        "TODO: the branch of the replay that removes the incident, and the one that keeps it, with their figures.",
        *[f"- `{command}`" for command in found.commands(run)],
        "",
        "## Repair gate",
        "",
        f"- [ ] {first.cause.gate}",
        "- [ ] no update norm, throughput or held-out loss outside its band",
        "",
        "## Prevents recurrence",
        "",
        f"- [ ] {filled(first.cause.prevents, scene, run) or 'TODO'}",
        "",
    ]
    return "\n".join(lines)


def _row(step: StepEntry) -> str:
    done = step.action if step.action is step.advised else f"{step.action} (would {step.advised})"
    why = step.reason.replace("|", "/")
    figures = f"{step.loss:.4f} | {step.grad_norm:.4g} | {step.learning_rate:.4g}"
    return f"| {step.step} | {step.first_sample}–{step.last_sample} | {figures} | {done} | {why} |"


def _said(each: Evidence) -> str:
    return f"{each.says} ({each.fact}, {each.weight:+g})"
