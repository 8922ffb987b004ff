"""From findings to messages: each once, never in a flood, none lost.

A finding is told of when it begins and when it has been over for a while. What comes and goes within that while is one
story: the alert at its beginning, and one digest at its end, or every `digest` seconds while it lasts. More messages
than the limit wait and go out together. What no person is to be woken for waits for the digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron_stability.decide.urgency import Urgency
from megatron_stability.watch.findings import Finding, Kind

LONGEST = 40  # lines of one message
RETRY = 30.0  # seconds after which an undelivered message is tried again

Key = tuple[str, Kind, str]
Send = Callable[[str, str], bool]  # title, body; whether it was delivered


@dataclass
class _Story:
    finding: Finding
    began: float
    times: int = 1  # that it began
    away: float | None = None  # since when it does not hold
    digested: float = 0.0


@dataclass
class Alerts:
    """Decides what is sent when; `look` is called once an interval.

    Attributes:
        send: delivers one message.
        per_hour: messages an hour at most.
        settle: seconds for which a finding has to be away to be over.
        digest: seconds between two digests.
        undelivered: the last attempt failed.
    """

    send: Send
    per_hour: int = 12
    settle: float = 300.0
    digest: float = 86400.0
    undelivered: bool = False
    _stories: dict[Key, _Story] = field(default_factory=dict)
    _told: set[Key] = field(default_factory=set)  # events
    _waiting: list[str] = field(default_factory=list)  # lines to send as soon as may be
    _quiet: list[str] = field(default_factory=list)  # lines for the digest
    _sent: deque[float] = field(default_factory=deque)
    _next_digest: float | None = None
    _retry: float = 0.0

    def look(self, findings: Iterable[Finding], now: float) -> None:
        """Take what holds now, and send what is due.

        Args:
            findings: of all runs.
            now: seconds on a clock that does not go back.
        """
        if self._next_digest is None:
            self._next_digest = now + self.digest
        here = {each.key: each for each in findings}
        for key, finding in here.items():
            self._holds(key, finding, now)
        for key, story in list(self._stories.items()):
            if key not in here:
                self._is_away(key, story, now)
        if now >= self._next_digest:
            self._next_digest = now + self.digest
            self._waiting += self._quiet
            self._quiet = []
        self._deliver(now)

    def _holds(self, key: Key, finding: Finding, now: float) -> None:
        if finding.event:
            if key not in self._told:
                self._told.add(key)
                self._say(finding.urgency, str(finding))
            return
        story = self._stories.get(key)
        if story is None:
            self._stories[key] = _Story(finding, now, digested=now)
            self._say(finding.urgency, str(finding))
            return
        story.finding = finding
        if story.away is not None:
            story.away = None
            story.times += 1
        if story.times > 1 and now - story.digested >= self.digest:
            story.digested = now
            self._say(finding.urgency, f"{_came_and_went(story, now)}, and holds: {finding}")

    def _is_away(self, key: Key, story: _Story, now: float) -> None:
        if story.away is None:
            story.away = now
        elif now - story.away >= self.settle:
            del self._stories[key]
            lasted = f"over after {story.away - story.began:.0f} s"
            head = lasted if story.times == 1 else f"{_came_and_went(story, story.away)}, {lasted}"
            self._say(story.finding.urgency, f"{head}: {story.finding.run}: {story.finding.text}")

    def _say(self, urgency: Urgency, line: str) -> None:
        (self._waiting if urgency is Urgency.PAGE else self._quiet).append(line)

    def _deliver(self, now: float) -> None:
        while self._sent and now - self._sent[0] >= 3600:
            self._sent.popleft()
        if not self._waiting or len(self._sent) >= self.per_hour or now < self._retry:
            return
        more = len(self._waiting) - LONGEST
        body = "\n".join(self._waiting[:LONGEST] + ([f"and {more} more"] if more > 0 else []))
        first, number = self._waiting[0], len(self._waiting)
        title = first if number == 1 else f"{number} messages, first: {first}"
        self.undelivered = not self.send(f"megatron-stability: {title}"[:120], body)
        if self.undelivered:
            self._retry = now + RETRY
        else:
            self._sent.append(now)
            self._waiting = []


def _came_and_went(story: _Story, until: float) -> str:
    return f"came and went {story.times} times in {until - story.began:.0f} s"
