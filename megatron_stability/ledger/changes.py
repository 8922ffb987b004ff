"""What was changed between two processes of a run: settings, data, layout, versions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_stability.ledger.entries import LedgerView, RunEntry, StepEntry

DEFAULT = "default"  # stands for what a `run` line leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One name whose value a restart changed."""

    after_step: int  # the last step with the old value
    generation: int  # that began with the new one
    kind: str  # settings, data, layout or versions
    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new} (restart after step {self.after_step})"


def between(earlier: RunEntry, later: RunEntry) -> tuple[Changed, ...]:
    """What differs between two processes, by name.

    Args:
        earlier: the `run` line of the one before.
        later: that of the one after.

    Returns:
        Settings first; nothing for what either line, written by an older version, does not hold at all.
    """
    found: list[Changed] = []
    for kind in ("settings", "data", "layout", "versions"):
        old, new = getattr(earlier, kind), getattr(later, kind)
        if old and new:
            names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
            found += [_changed(later, kind, name, old, new) for name in names]
    return tuple(found)


def before(view: LedgerView, step: StepEntry) -> tuple[Changed, ...]:
    """What the restarts on the way to a step changed, the latest restart first.

    Args:
        view: the run's ledger.
        step: one of its steps.

    Returns:
        Changes at or before the step, in the generations up to its own.
    """
    runs = [run for run in view.runs if run.generation <= step.generation and run.resumed_step < step.step]
    pairs = list(itertools.pairwise(runs))
    return tuple(change for earlier, later in reversed(pairs) for change in between(earlier, later))


def _changed(later: RunEntry, kind: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Changed:
    return Changed(
        after_step=later.resumed_step,
        generation=later.generation,
        kind=kind,
        name=name,
        old=str(old.get(name, DEFAULT)),
        new=str(new.get(name, DEFAULT)),
    )
