"""What a run's ledger tells of its costs: the time of a step, of a save, of a restart, and between failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megatron_stability.ledger.entries import AnyEntry, LedgerView, RunEntry, SaveEntry, StepEntry, UndoEntry

AFTER_A_SAVE = 10  # steps in which an asynchronous save may still slow training


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds, each a median, but the mean time between failures; None where the ledger does not show it."""

    step_s: float | None = None
    save_s: float | None = None
    interference_s: float | None = None
    restart_s: float | None = None
    mtbf_s: float | None = None


def measure(view: LedgerView) -> Measured:
    """Measure a run by the times of its lines.

    A save's time is that of the step after it beyond a usual step; its interference what the next `AFTER_A_SAVE` steps
    take beyond usual ones; a restart's from the last line before it to the end of its first step, less a step. Every
    process after the first counts as one failure.

    Args:
        view: of one folder; lines without a time are passed over.

    Returns:
        What is there to be seen.
    """
    # an undo line is written by the process that comes after, before its own first line
    runs = _runs([entry for entry in view.entries if entry.time > 0 and not isinstance(entry, UndoEntry)])
    gaps = [_gaps(run) for run in runs]
    usual = [seconds for run in gaps for seconds, saved in run if not saved]
    if not usual:
        return Measured()
    step_s = median(usual)
    saves = [seconds - step_s for run in gaps for seconds, saved in run if saved]
    slowed = [sum(seconds - step_s for seconds in after) for run in gaps for after in _after_saves(run)]
    up_s = sum(run[-1].time - run[0].time for run in runs)
    return Measured(
        step_s=step_s,
        save_s=max(0.0, median(saves)) if saves else None,
        interference_s=max(0.0, median(slowed)) if slowed else None,
        restart_s=_restart(runs, step_s),
        mtbf_s=up_s / (len(runs) - 1) if len(runs) > 1 else None,
    )


def _runs(entries: Sequence[AnyEntry]) -> list[list[AnyEntry]]:
    """The entries of each process."""
    runs: list[list[AnyEntry]] = []
    for entry in entries:
        if isinstance(entry, RunEntry) or not runs:
            runs.append([])
        runs[-1].append(entry)
    return runs


def _gaps(run: Sequence[AnyEntry]) -> list[tuple[float, bool]]:
    """(seconds from one step's line to the next, whether a save was between them)."""
    seen = [entry for entry in run if isinstance(entry, StepEntry | SaveEntry)]
    steps = [(place, entry) for place, entry in enumerate(seen) if isinstance(entry, StepEntry)]
    return [(two.time - one.time, after - before > 1) for (before, one), (after, two) in pairwise(steps)]


def _after_saves(gaps: Sequence[tuple[float, bool]]) -> list[list[float]]:
    """The gaps that follow each save's own, up to the next save's."""
    found: list[list[float]] = []
    for seconds, saved in gaps:
        if saved:
            found.append([])
        elif found and len(found[-1]) < AFTER_A_SAVE:
            found[-1].append(seconds)
    return [after for after in found if after]


def _restart(runs: Sequence[Sequence[AnyEntry]], step_s: float) -> float | None:
    first_steps = [next((entry for entry in run if isinstance(entry, StepEntry)), None) for run in runs]
    times = [
        first.time - step_s - before[-1].time
        for before, first in zip(runs[:-1], first_steps[1:], strict=True)
        if first is not None
    ]
    return max(0.0, median(times)) if times else None
