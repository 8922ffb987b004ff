"""The table that ends a command in the terminal: one column a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from megatron_stability.report.runview import RunView


def table(runs: Sequence[RunView]) -> Table:
    """The runs side by side.

    Args:
        runs: at least one.

    Returns:
        A rich table; `rich.print` shows it.
    """
    result = Table(show_edge=False, pad_edge=False)
    result.add_column("")
    for run in runs:
        result.add_column(escape(run.name), justify="right")
    summaries = [run.summary() for run in runs]
    for label, key in (
        ("steps", "steps"),
        ("loss, first step", "first_loss"),
        ("loss, last trained step", "final_loss"),
        ("steps with NaN or Inf", "nonfinite_steps"),
        ("steps skipped", "skipped_steps"),
    ):
        result.add_row(label, *[number(summary[key]) for summary in summaries])
    result.add_row("episodes", *[_episodes(run) for run in runs])
    result.add_row("decisions", *[_counts(summary["decisions"]) for summary in summaries])
    if any(summary["advised_only"] for summary in summaries):
        result.add_row("advised only", *[_counts(summary["advised_only"]) for summary in summaries])
    for fate in ("trained", "skipped", "undone", "lost", "repeated"):
        cells = [number(summary["samples"][fate]) if summary["samples"] else "no ledger" for summary in summaries]
        result.add_row(f"samples {fate}", *cells)
    return result


def number(value: Any) -> str:
    """A count or float for people: 12,345, 4.213, 1.2e+06, NaN, Inf; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{float(value):.4g}"
    return text.replace("nan", "NaN").replace("inf", "Inf")


def _episodes(run: RunView) -> str:
    """By detector, the gravest first."""
    worst: dict[str, int] = {}
    for episode in run.episodes:
        worst[episode.detector] = max(worst.get(episode.detector, 0), episode.tier.severity)
    counts = Counter(episode.detector for episode in run.episodes)
    names = sorted(counts, key=lambda name: -worst[name])
    return ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in names) or "none"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {action.replace('_', ' ')}" for action, n in counts.items()) or "none"
