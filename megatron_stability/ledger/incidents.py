"""Incidents of a run: the episodes and decisions that belong together, under one number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron_stability.decide.urgency import pages
from megatron_stability.ledger.entries import AnyEntry, EpisodeEntry, StepEntry
from megatron_stability.records import PASSED_OVER, Action, Change, Tier

Event = EpisodeEntry | StepEntry


@dataclass(slots=True)
class Incident:
    """One incident so far.

    Attributes:
        number: the first step of its first episode.
        last_step: of its episodes and decisions.
        tier: the worst of its episodes.
        episodes: each as it was last, by detector and first step.
        decisions: steps on which something else than a plain APPLY was done or advised, in their order.
        page: the event that somebody is to be woken for, if any.
    """

    number: int
    last_step: int = 0
    tier: Tier = Tier.WATCH
    episodes: dict[tuple[str, int], EpisodeEntry] = field(default_factory=dict)
    decisions: list[StepEntry] = field(default_factory=list)
    page: Event | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """What was done, each once, the gravest first."""
        return tuple(sorted({each.action for each in self.decisions}, key=lambda action: -action.precedence))


def events(entries: Iterable[AnyEntry]) -> Iterator[tuple[int, Event]]:
    """Decisions and changes of episodes, each with its incident's number.

    A decision belongs to the incident of the episode that one of its verdicts opened or went on with; that line is
    written just after the step's.

    Args:
        entries: lines of a ledger in their order, of a run that goes on, too.

    Yields:
        As the lines come; a decision once the line after it is known, at the end of `entries` at the latest.
    """
    open_: dict[str, int] = {}
    waiting: StepEntry | None = None
    for entry in entries:
        if waiting is not None:
            ours = isinstance(entry, EpisodeEntry) and entry.last_step == waiting.step
            yield (entry.incident if ours and isinstance(entry, EpisodeEntry) else waiting.step), waiting
            waiting = None
        if isinstance(entry, EpisodeEntry):
            open_[entry.detector] = entry.incident
            if entry.change is Change.CLOSED:
                del open_[entry.detector]
            yield entry.incident, entry
        elif isinstance(entry, StepEntry) and entry.eventful and PASSED_OVER not in entry.parameters:
            known = [open_[verdict.detector] for verdict in entry.verdicts if verdict.detector in open_]
            if known:
                yield min(known), entry
            else:
                waiting = entry
    if waiting is not None:
        yield waiting.step, waiting


def incidents(entries: Iterable[AnyEntry]) -> list[Incident]:
    """All incidents of a ledger's lines, in the order in which they began."""
    found: dict[int, Incident] = {}
    seen = list(events(entries))
    for number, event in seen:
        incident = found.setdefault(number, Incident(number))
        if isinstance(event, EpisodeEntry):
            incident.episodes[event.detector, event.first_step] = event
            incident.last_step = max(incident.last_step, event.last_step)
            incident.tier = max(incident.tier, event.tier, key=lambda tier: tier.severity)
        else:
            incident.decisions.append(event)
            incident.last_step = max(incident.last_step, event.step)
    for number, event in pages(seen):
        found[number].page = found[number].page or event
    return list(found.values())
