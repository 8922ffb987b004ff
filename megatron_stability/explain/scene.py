"""An incident with what stood around it, as the ledger tells it: what every fact of triage is taken from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from megatron_stability.errors import UsageError
from megatron_stability.ledger import changes
from megatron_stability.ledger.changes import Changed
from megatron_stability.ledger.entries import EpisodeEntry, LedgerView, StepEntry, UndoEntry
from megatron_stability.records import Tier

BEFORE, AFTER = 100, 40  # steps that are looked at around an incident
SHORT = 5  # fewer steps before it give no usual level
MAD = 1.4826  # of a normal distribution: σ = MAD x this


@dataclass(frozen=True, kw_only=True)
class Level:
    """What a quantity usually was before the incident: median, and a robust σ that is never zero."""

    middle: float
    sigma: float

    def distance(self, value: float) -> float:
        """How many σ a value is above the middle; infinite where it is not finite."""
        return (value - self.middle) / self.sigma if math.isfinite(value) else math.inf


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One step of a run, and its surroundings.

    Attributes:
        view: the run's ledger.
        step: where the incident began.
        before: up to `BEFORE` steps on the trajectory as it was then, oldest first.
        after: up to `AFTER` steps that the same process made next, whether they were undone later or not.
        replay: what `replay` wrote of this step, where it was run.
    """

    view: LedgerView
    step: StepEntry
    before: tuple[StepEntry, ...]
    after: tuple[StepEntry, ...]
    replay: Mapping[str, Any] | None = None

    @classmethod
    def at(cls, view: LedgerView, number: int | None = None, replay: Mapping[str, Any] | None = None) -> Scene:
        """The scene of a step.

        Args:
            view: a ledger.
            number: of a step; None: the last incident, at its first step.
            replay: the result of a replay of that step.

        Returns:
            Where a rewind repeated the step, the scene of the eventful one, else of the last.

        Raises:
            UsageError: there is no such step, or no incident.
        """
        step = _last_incident(view) if number is None else _step(view, number)
        place = next(at for at, entry in enumerate(view.entries) if entry is step)
        live: list[StepEntry] = []
        for entry in view.entries[:place]:
            if isinstance(entry, StepEntry):
                live.append(entry)
            elif isinstance(entry, UndoEntry):
                live = [one for one in live if one.step <= entry.from_step]
        after = [
            entry
            for entry in view.entries[place + 1 :]
            if isinstance(entry, StepEntry) and entry.generation == step.generation and entry.step > step.step
        ]
        return cls(view=view, step=step, before=tuple(live[-BEFORE:]), after=tuple(after[:AFTER]), replay=replay)

    @cached_property
    def changes(self) -> tuple[Changed, ...]:
        """What restarts on the way changed, the latest first."""
        return changes.before(self.view, self.step)

    @cached_property
    def episodes(self) -> tuple[EpisodeEntry, ...]:
        """Those of the same process that were open at the step, or opened soon after."""
        last = self.after[-1].step if self.after else self.step.step
        return tuple(
            each
            for each in self.view.episodes
            if each.generation == self.step.generation and each.first_step <= last and each.last_step >= self.step.step
        )

    @property
    def first_step(self) -> int:
        """The first step that the process made which met the incident."""
        runs = [run.resumed_step for run in self.view.runs if run.generation == self.step.generation]
        undone = [
            entry.from_step
            for entry in self.view.entries
            if isinstance(entry, UndoEntry) and entry.generation == self.step.generation
        ]
        return max([*runs, *undone], default=0) + 1

    def spoke(self, *detectors: str) -> list[str]:
        """Reasons of verdicts at the step by these detectors, and of episodes that were open then."""
        reasons = {v.reason: None for v in self.step.verdicts if v.detector in detectors}
        reasons |= {each.reason: None for each in self.episodes if each.detector in detectors}
        return list(reasons)

    def curve(self, read: Callable[[StepEntry], float | None], steps: Sequence[StepEntry]) -> list[tuple[int, float]]:
        """(step, value) where it was measured."""
        found = ((step.step, read(step)) for step in steps)
        return [(number, value) for number, value in found if value is not None]

    def signal(self, name: str, steps: Sequence[StepEntry] | None = None) -> list[tuple[int, float]]:
        """A signal where it was measured, in `before` and at the step unless `steps` says where."""
        return self.curve(lambda step: step.signals.get(name), (*self.before, self.step) if steps is None else steps)

    def level(self, read: Callable[[StepEntry], float | None], floor: float = 0.0) -> Level | None:
        """The usual level of a quantity before the incident; None where too little is known.

        Args:
            read: the quantity of a step.
            floor: least σ.
        """
        values = [
            value
            for _, value in self.curve(read, [s for s in self.before if s.fate == "trained"])
            if math.isfinite(value)
        ]
        if len(values) < SHORT:
            return None
        recent = values[-50:]
        middle = median(recent)
        spread = MAD * median(abs(value - middle) for value in recent)
        return Level(middle=middle, sigma=max(spread, floor, 1e-3 * abs(middle), 1e-12))

    @cached_property
    def loss(self) -> Level | None:
        """The usual loss, nats."""
        return self.level(lambda step: step.loss, floor=0.02)

    @cached_property
    def norm(self) -> Level | None:
        """The usual gradient norm."""
        return self.level(lambda step: step.grad_norm)

    @property
    def ranks(self) -> int:
        """Ranks of the process that met the incident; 0: the ledger does not say."""
        sizes = [run.layout.get("world_size", 0) for run in self.view.runs if run.generation <= self.step.generation]
        return sizes[-1] if sizes else 0


def _step(view: LedgerView, number: int) -> StepEntry:
    found = [step for step in view.steps if step.step == number]
    if not found:
        known = f"steps {view.steps[0].step} to {view.steps[-1].step}" if view.steps else "no step"
        raise UsageError(f"step {number}: is not in the ledger, which holds {known}; give one of those, or --last")
    told = [step for step in found if step.eventful or step.verdicts]
    return (told or found)[-1]


def _last_incident(view: LedgerView) -> StepEntry:
    """The first step of the last stretch of decisions, or of the last episode that is more than a watch."""
    grave = [each for each in view.episodes if each.tier.severity > Tier.WATCH.severity]
    eventful = {(step.generation, step.step) for step in view.decisions}
    eventful |= {(each.generation, step) for each in grave for step in (each.first_step,)}
    if not eventful:
        raise UsageError(
            "no incident in this ledger: nothing was withheld, and no episode is above `watch`; give a step"
        )
    generation = max(each for each, _ in eventful)
    numbers = sorted(step for each, step in eventful if each == generation)
    first = numbers[-1]
    for number in reversed(numbers[:-1]):
        if first - number > AFTER // 2:
            break
        first = number
    return next(step for step in reversed(view.steps) if (step.generation, step.step) == (generation, first))
