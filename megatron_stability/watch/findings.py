"""What is wrong with a run now, one sentence each; the same words on the terminal and in an alert."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_stability.decide.urgency import Urgency


class Kind(StrEnum):
    """What a finding is about."""

    STALL = "stall"
    NODE = "node"
    NON_FINITE = "non_finite"
    INCIDENT = "incident"
    EPISODE = "episode"
    ENDED = "ended"
    CHECKPOINT = "checkpoint"
    STORAGE = "storage"
    LEDGER = "ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that holds at a look.

    Attributes:
        run: as the watcher was given it.
        kind: what it is about.
        what: tells it from others of its kind: a node, an incident, a step.
        urgency: whether somebody is woken for it.
        text: one sentence, without training text.
        command: what to run next, if there is something.
        event: it happened, and does not come to an end.
    """

    run: str
    kind: Kind
    what: str
    urgency: Urgency
    text: str
    command: str = ""
    event: bool = False

    @property
    def key(self) -> tuple[str, Kind, str]:
        """By which it is known again at the next look."""
        return self.run, self.kind, self.what

    def __str__(self) -> str:
        return f"{self.run}: {self.text}" + (f" Next: {self.command}" if self.command else "")
