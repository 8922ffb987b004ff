"""Every sample has one fate: the ledger folded into intervals of the global sample order, and its audit.

A fate belongs to the step that consumed the sample: trained or skipped. A halted step gives none, since its samples
are read again after the resume. What a resume or rewind undid has no say on the surviving trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_stability.ledger.entries import LedgerView, StepEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Samples `first` to `last` (exclusive) and their fate in steps `first_step` to `last_step` (inclusive)."""

    first: int
    last: int
    fate: Literal["trained", "skipped"]
    reason: str
    generation: int
    first_step: int
    last_step: int
    undone: bool
    masked: int = 0  # targets of these samples that the skip list took out of the loss

    @property
    def samples(self) -> int:
        """How many samples the interval holds."""
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A stretch of samples, `first` to `last` (exclusive), without exactly one fate."""

    kind: Literal["repeated", "lost"]
    first: int
    last: int
    message: str


def fates(view: LedgerView) -> tuple[Interval, ...]:
    """The fate of every sample on the surviving trajectory, in the order of the steps.

    Args:
        view: a ledger.

    Returns:
        Intervals; neighbours of equal fate, reason and generation are one.
    """
    return _merged(_interval(step, undone=False) for step in view.surviving if step.fate != "halted")


def history(view: LedgerView) -> tuple[Interval, ...]:
    """As `fates`, followed by what was undone."""
    return fates(view) + _merged(_interval(step, undone=True) for step in view.undone if step.fate != "halted")


def audit(view: LedgerView) -> list[Finding]:
    """Look for samples with two fates (repeated) or none (lost) on the surviving trajectory.

    Lost is a sample at or after the ledger's origin and before the last sample with a fate. An intact run has no
    finding.

    Args:
        view: a ledger.

    Returns:
        Findings by first sample; each names the steps around it.
    """
    intervals = sorted((i for i in fates(view) if i.samples), key=lambda i: (i.first, i.last))
    findings = _lost(intervals, view.origin) + _repeated(intervals)
    return sorted(findings, key=lambda finding: finding.first)


def count(intervals: Sequence[Interval]) -> dict[str, int]:
    """Samples by fate: `trained`, `skipped` and, where `history` gave the intervals, `undone`."""
    total = {"trained": 0, "skipped": 0, "undone": 0}
    for interval in intervals:
        total["undone" if interval.undone else interval.fate] += interval.samples
    return total


def _interval(step: StepEntry, *, undone: bool) -> Interval:
    skipped = step.fate == "skipped"
    return Interval(
        first=step.first_sample,
        last=step.last_sample,
        fate="skipped" if skipped else "trained",
        reason=step.reason if skipped else "",
        generation=step.generation,
        first_step=step.step,
        last_step=step.step,
        undone=undone,
        masked=0 if skipped else int(step.signals.get("data/masked", 0)),
    )


def _merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for new in intervals:
        old = merged[-1] if merged else None
        if (
            old is not None
            and (old.fate, old.reason, old.generation) == (new.fate, new.reason, new.generation)
            and (old.last, old.last_step + 1) == (new.first, new.first_step)
        ):
            merged[-1] = replace(old, last=new.last, last_step=new.last_step, masked=old.masked + new.masked)
        else:
            merged.append(new)
    return tuple(merged)


def _lost(intervals: Sequence[Interval], origin: int) -> list[Finding]:
    findings: list[Finding] = []
    cursor, before = origin, "the start"
    for interval in intervals:
        if interval.first > cursor:
            findings.append(
                Finding(
                    kind="lost",
                    first=cursor,
                    last=interval.first,
                    message=f"no fate for {_samples(cursor, interval.first)}: the ledger knows no step between "
                    f"{before} and step {interval.first_step} that read them",
                )
            )
        if interval.last > cursor:
            cursor, before = interval.last, f"step {interval.last_step}"
    return findings


def _repeated(intervals: Sequence[Interval]) -> list[Finding]:
    """Maximal stretches that two or more intervals cover; `intervals` are sorted by first sample."""
    findings: list[Finding] = []
    longest: Interval | None = None
    for interval in intervals:
        if longest is not None and interval.first < longest.last:
            last = min(interval.last, longest.last)
            message = f"{_steps(longest)} and {_steps(interval)}"
            if findings and interval.first <= findings[-1].last:
                first, last = findings[-1].first, max(last, findings[-1].last)
                findings.pop()
            else:
                first = interval.first
            message = f"two fates for {_samples(first, last)}: {message}"
            findings.append(Finding(kind="repeated", first=first, last=last, message=message))
        if longest is None or interval.last > longest.last:
            longest = interval
    return findings


def _samples(first: int, last: int) -> str:
    return f"sample {first}" if last == first + 1 else f"samples {first} to {last - 1}"


def _steps(interval: Interval) -> str:
    one = interval.first_step == interval.last_step
    steps = f"step {interval.first_step}" if one else f"steps {interval.first_step} to {interval.last_step}"
    return f"{interval.fate} in {steps} (generation {interval.generation})"
