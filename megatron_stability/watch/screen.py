"""The terminal's view: a run a block, for a person over ssh."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from statistics import median

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megatron_stability.decide.urgency import Urgency
from megatron_stability.ledger.entries import strict
from megatron_stability.report.summary import number
from megatron_stability.watch.findings import Finding
from megatron_stability.watch.run import WatchedRun


def view(runs: Sequence[WatchedRun], findings: Sequence[Finding], clock: str) -> RenderableType:
    """Everything on one screen.

    Args:
        runs: after a look.
        findings: of all of them.
        clock: the time of the look, for people.
    """
    table = Table(show_edge=False, pad_edge=False)
    heads = ("run", "step", "loss", "grad norm", "lr", "s/step", "tokens/s", "left", "open", "line", "nodes", "free")
    for head in heads:
        table.add_column(head, justify="left" if head == "run" else "right", overflow="fold")
    for run in runs:
        table.add_row(*_row(run))
    lines: list[RenderableType] = [Text(f"{clock}  (Ctrl-C ends the watcher, not the runs)", style="dim"), table]
    for each in findings:
        style = "bold red" if each.urgency is Urgency.PAGE else "yellow"
        lines.append(Text(str(each), style=style))
    if not findings:
        lines.append(Text("nothing is wrong", style="green"))
    return Group(*lines)


def _row(run: WatchedRun) -> list[str]:
    last = run.steps[-1] if run.steps else None
    seconds = run.step_seconds
    left = run.seconds_left
    living = sum(beat.state == "training" for beat in run.beats.values())
    return [
        escape(run.name),
        f"{run.step:,}",
        number(last.loss if last else None),
        number(last.grad_norm if last else None),
        number(last.learning_rate if last else None),
        number(median(seconds) if seconds else None),
        number(run.tokens_per_second),
        "–" if left is None else str(timedelta(seconds=round(left))),
        str(len(run.open)),
        f"{run.line_age:.0f} s ago",
        f"{living}/{len(run.beats)}" if run.beats else "–",
        "–" if run.space is None else f"{run.space.percent:.0f} %",
    ]


def as_json(run: WatchedRun, findings: Sequence[Finding]) -> dict[str, object]:
    """A run in figures, for `--json`."""
    last = run.steps[-1] if run.steps else None
    seconds = run.step_seconds
    told: dict[str, object] = strict(
        {
            "run": run.name,
            "step": run.step,
            "loss": last.loss if last else None,
            "grad_norm": last.grad_norm if last else None,
            "step_seconds": median(seconds) if seconds else None,
            "tokens_per_second": run.tokens_per_second,
            "seconds_left": run.seconds_left,
            "ledger_age_seconds": round(run.line_age, 1),
            "open_episodes": [each.detector for each in run.open.values()],
            "nodes": {node: round(run.beat_age(node), 1) for node in run.beats},
            "over": run.over,
            "findings": [
                {"kind": each.kind.value, "urgency": each.urgency.value, "text": each.text, "next": each.command}
                for each in findings
                if each.run == run.name
            ],
        }
    )
    return told
