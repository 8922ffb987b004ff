"""What wakes a person, and what waits for the daily digest.

A page goes out for what is large and lasts, for a rewind, a halt and a stall, once an incident: `pages` says which.
A single step that was withheld, however large its norm, is in the digest with all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from megatron_stability.decide.episodes import LASTS
from megatron_stability.records import Action, Tier


class Urgency(StrEnum):
    """Who hears of an event, and when."""

    PAGE = "page"
    DIGEST = "digest"


class EpisodeLike(Protocol):
    """An `Episode`, or its line in a ledger."""

    @property
    def incident(self) -> int: ...
    @property
    def tier(self) -> Tier: ...
    @property
    def grave(self) -> int: ...


@runtime_checkable
class DecisionLike(Protocol):
    """A `Decision`, or a step's line in a ledger."""

    @property
    def step(self) -> int: ...
    @property
    def action(self) -> Action: ...
    @property
    def advised(self) -> Action: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """No step has ended for longer than it should take."""

    last_step: int
    seconds: float  # since that step ended


def urgency(event: EpisodeLike | DecisionLike | Stall) -> Urgency:
    """Whether an event is a page by itself.

    Args:
        event: an episode after a change, a step's decision, or a stall.

    Returns:
        PAGE for a stall, for a rewind or halt that was made (in `observe` mode: that would have been), for ranks that
        disagree, and for an episode with at least `LASTS` verdicts that were LARGE or not finite.
    """
    if isinstance(event, Stall):
        return Urgency.PAGE
    if isinstance(event, DecisionLike):
        return Urgency.PAGE if _undoes(event) else Urgency.DIGEST
    lasts = event.tier is Tier.SYSTEM or event.grave >= LASTS
    return Urgency.PAGE if lasts else Urgency.DIGEST


def _undoes(decision: DecisionLike) -> bool:
    return any(action in (Action.REWIND, Action.HALT) for action in (decision.action, decision.advised))


def pages[Event: EpisodeLike | DecisionLike | Stall](
    events: Iterable[tuple[int, Event]],
) -> Iterator[tuple[int, Event]]:
    """Of events in their order, those to page for: the first of an incident, and its halt.

    Args:
        events: each with the incident that it belongs to (`ledger.incidents`).

    Yields:
        The incident and the event.
    """
    told: set[tuple[int, bool]] = set()
    for incident, event in events:
        halt = getattr(event, "action", None) is Action.HALT
        if urgency(event) is Urgency.PAGE and (incident, halt) not in told:
            told.add((incident, halt))
            yield incident, event
