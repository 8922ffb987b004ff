"""One run as the report and the summary see it, with or without a ledger."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stability.detect import DETECTORS
from megatron_stability.echo import said
from megatron_stability.ledger.entries import (
    AttentionEntry,
    EpisodeEntry,
    LedgerView,
    RunEntry,
    StepEntry,
    UndoEntry,
    home,
    read,
)
from megatron_stability.ledger.fates import Finding, Interval, audit, count, history
from megatron_stability.ledger.incidents import Incident, incidents
from megatron_stability.records import Action, encode_float


class Curve(NamedTuple):
    """A signal over the steps of the surviving trajectory at which it was measured."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Curves, decisions and sample fates of one run.

    `steps`, `loss`, `grad_norm` and `learning_rate` are of equal length: the surviving trajectory. NaN and Inf stay in
    them. `intervals` is None where nothing recorded the fate of samples (a stock run).
    """

    name: str
    steps: Sequence[int]
    loss: Sequence[float]  # nats per token
    grad_norm: Sequence[float]
    learning_rate: Sequence[float]
    withheld: frozenset[int] = frozenset()  # steps of the curves whose update did not reach the weights
    decisions: Sequence[StepEntry] = ()  # other than a plain APPLY; undone ones too
    episodes: Sequence[EpisodeEntry] = ()  # undone ones too
    incidents: Sequence[Incident] = ()  # undone ones too
    judged: Mapping[str, Curve] = field(default_factory=dict)  # by detector with an episode: what it judged
    signals: Mapping[str, Curve] = field(default_factory=dict)  # of the ledger's steps, by name
    attention: Sequence[AttentionEntry] = ()  # of generations that stand, in the order of steps
    resumes: Sequence[int] = ()  # the steps after which a later generation went on
    intervals: Sequence[Interval] | None = None
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # mode, layout, versions: shown under the run's name

    def __post_init__(self) -> None:
        lengths = {len(self.steps), len(self.loss), len(self.grad_norm), len(self.learning_rate)}
        if len(lengths) != 1:
            raise ValueError(f"run {self.name!r}: steps, loss, grad_norm and learning_rate differ in length")

    @classmethod
    def from_ledger(cls, folder: str | Path, name: str | None = None) -> RunView:
        """The run whose ledger lies in `folder`, or in its subfolder `stability`.

        Args:
            folder: a run's folder.
            name: shown in the report; the folder's name by default.

        Returns:
            Its view; what resumes and rewinds undid appears among the decisions and intervals, not in the curves.

        Raises:
            UsageError: no readable ledger there.
        """
        folder, view = Path(folder), ledger_of(folder)
        return cls(
            name=said(name or folder.resolve().name),
            steps=[step.step for step in view.surviving],
            loss=[step.loss for step in view.surviving],
            grad_norm=[step.grad_norm for step in view.surviving],
            learning_rate=[step.learning_rate for step in view.surviving],
            withheld=frozenset(step.step for step in view.surviving if step.fate != "trained"),
            decisions=view.decisions,
            episodes=view.episodes,
            incidents=incidents(view.entries),
            judged={name: _judged(view, name) for name in dict.fromkeys(e.detector for e in view.episodes)},
            signals=_signals(view),
            attention=_tables(view),
            resumes=sorted(_resumes(view)),
            intervals=history(view),
            findings=audit(view),
            notes=_notes(view),
            facts=_facts(view.runs[-1]) if view.runs else {},
        )

    def summary(self) -> dict[str, Any]:
        """The run in figures, as strict JSON: floats through `encode_float`, None where nothing is known."""
        trained = [value for step, value in zip(self.steps, self.loss, strict=True) if step not in self.withheld]
        known = self.intervals is not None
        amiss = Counter({"lost": 0, "repeated": 0})
        for finding in self.findings:
            amiss[finding.kind] += finding.last - finding.first
        return {
            "name": self.name,
            "steps": len(self.steps),
            "first_loss": encode_float(trained[0]) if trained else None,
            "final_loss": encode_float(trained[-1]) if trained else None,
            "lowest_loss": min((v for v in trained if math.isfinite(v)), default=None),
            "nonfinite_steps": len(nonfinite_steps(self)),
            "skipped_steps": sum(step.action is Action.SKIP for step in self.decisions),
            "decisions": _by_action(step.action for step in self.decisions),
            "advised_only": _by_action(step.advised for step in self.decisions if step.action is not step.advised),
            "episodes": [_in_short(episode) for episode in self.episodes],
            "incidents": len(self.incidents),
            "pages": [each.number for each in self.incidents if each.page is not None],
            "samples": {**count(self.intervals or ()), **amiss} if known else None,
            "findings": [finding.message for finding in self.findings],
        }


def ledger_of(folder: str | Path) -> LedgerView:
    """The ledger in a run's folder, or in its subfolder `stability`.

    Args:
        folder: a run's folder.

    Raises:
        UsageError: no readable ledger there.
    """
    return read(home(folder))


_REQUIRES = {detector.name: detector.requires for detector in DETECTORS}


def _judged(view: LedgerView, detector: str) -> Curve:
    """The first of the signals that a detector reads; of one that reads none, loss or gradient norm."""
    requires = _REQUIRES.get(detector, ())
    if requires:
        points = [(step.step, step.signals[requires[0]]) for step in view.surviving if requires[0] in step.signals]
        return Curve(requires[0], [step for step, _ in points], [value for _, value in points])
    name = "grad_norm" if "norm" in detector else "loss"
    return Curve(name, [step.step for step in view.surviving], [getattr(step, name) for step in view.surviving])


def _signals(view: LedgerView) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for step in view.surviving:
        for name, value in step.signals.items():
            steps, values = found.setdefault(name, Curve(name, [], []))[1:]
            steps.append(step.step)
            values.append(value)
    return found


def _tables(view: LedgerView) -> list[AttentionEntry]:
    """The last table of each step that stands; what a resume or rewind undid was written again, or never was."""
    stands = {(step.step, step.generation) for step in view.surviving}
    last = {table.step: table for table in view.attention if (table.step, table.generation) in stands}
    return [last[step] for step in sorted(last)]


def _in_short(episode: EpisodeEntry) -> dict[str, Any]:
    fields = episode.model_dump(mode="json", exclude={"kind", "time"})
    return fields | {"value": encode_float(episode.value), "threshold": encode_float(episode.threshold)}


def _by_action(actions: Iterable[Action]) -> dict[str, int]:
    counts = Counter(actions)
    return {action.value: counts[action] for action in Action if counts[action] and action is not Action.APPLY}


def nonfinite_steps(run: RunView) -> list[int]:
    """The steps of the curves with a NaN or Inf loss or gradient norm."""
    curves = zip(run.steps, run.loss, run.grad_norm, strict=True)
    return [step for step, loss, norm in curves if not (math.isfinite(loss) and math.isfinite(norm))]


def _resumes(view: LedgerView) -> set[int]:
    runs = {entry.resumed_step for entry in view.runs[1:]}
    return runs | {entry.from_step for entry in view.entries if isinstance(entry, UndoEntry)}


def _notes(view: LedgerView) -> list[str]:
    notes = []
    if view.torn_bytes:
        notes.append(f"The ledger's last line is torn ({view.torn_bytes} bytes); it was ignored.")
    notes += [
        f"{run.trimmed_bytes} bytes of a torn last line were trimmed when generation {run.generation} began."
        for run in view.runs
        if run.trimmed_bytes
    ]
    notes += [f"Generation {end.generation} ended with exit code {end.code}: {end.reason}." for end in view.ends]
    if view.undone:
        undone = len(view.undone)
        notes.append(f"{undone} step{'s were' if undone > 1 else ' was'} undone by a resume or rewind.")
    if not view.steps:
        notes.append("The ledger holds no step yet.")
    return notes


def _facts(run: RunEntry) -> dict[str, str]:
    facts = {"mode": run.mode, "generation": str(run.generation)}
    if run.layout:
        facts["layout"] = ", ".join(f"{key} {value}" for key, value in run.layout.items())
    return facts | run.versions
