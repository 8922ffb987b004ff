"""Verdicts that belong together: one detector's, from when it speaks up until it has been quiet for a while.

A detector repeats itself at every step of a lasting shift; a person wants to hear of it when it begins, when it grows
worse and when it is over. Everything here follows from records and decisions, so it is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_stability.detect.base import Detector
from megatron_stability.records import (
    Action,
    Change,
    Decision,
    Episode,
    StepRecord,
    Tier,
    Verdict,
    decode_float,
    encode_float,
)

QUIET_LOOKS = 2  # a signal that is measured now and then has to be seen this often without a verdict
WORSE = 4.0  # times further beyond the threshold than when it was last told of
LASTS = 3  # grave verdicts that are more than a single step's, which is withheld and forgotten


@dataclass
class _Open:
    """An open episode, and what decides when to speak of it again."""

    episode: Episode
    told: float  # distance beyond the threshold, in thresholds, at which it was last told of
    looks: int = 0  # steps since its last verdict at which the detector could have spoken


class Episodes:
    """The open episodes of a run.

    An incident is the episodes that overlap. A rewind closes them, and what opens again before the run has been quiet
    beyond the step that asked for it is the same incident.

    Args:
        detectors: of the run; one whose signals a step does not have could not have spoken at it.
        quiet_steps: steps without a verdict after which an episode is over.
    """

    def __init__(self, detectors: Sequence[Detector], quiet_steps: int) -> None:
        self._requires = {detector.name: detector.requires for detector in detectors}
        self._quiet_steps = quiet_steps
        self._open: dict[str, _Open] = {}
        self._undone: tuple[int, int] | None = None  # incident that a rewind closed, and the last step that is still it

    @property
    def open(self) -> tuple[Episode, ...]:
        """Those that are open, in the order in which they opened."""
        return tuple(each.episode for each in self._open.values())

    def settle(self, record: StepRecord, decision: Decision) -> list[tuple[Change, Episode]]:
        """What changed by a finished step; a step that undoes or ends the run closes all.

        Args:
            record: the step's.
            decision: with the step's verdicts.

        Returns:
            Each change with the episode as it is after it.
        """
        changes = [change for verdict in decision.verdicts if (change := self._raised(verdict)) is not None]
        spoke = {verdict.detector for verdict in decision.verdicts}
        over = decision.action in (Action.REWIND, Action.HALT)
        if decision.action is Action.REWIND:
            first = min((each.episode.incident for each in self._open.values()), default=record.step)
            self._undone = first, record.step + self._quiet_steps
        for name, each in list(self._open.items()):
            if name not in spoke and record.finite:
                each.looks += all(signal in record.signals for signal in self._requires.get(name, ()))
            quiet = each.looks >= QUIET_LOOKS and record.step - each.episode.last_step >= self._quiet_steps
            if over or quiet:
                changes.append((Change.CLOSED, self._open.pop(name).episode))
        return changes

    def _raised(self, verdict: Verdict) -> tuple[Change, Episode] | None:
        beyond, each = _beyond(verdict), self._open.get(verdict.detector)
        if each is None:
            incident = min((other.episode.incident for other in self._open.values()), default=verdict.step)
            if self._undone is not None and verdict.step <= self._undone[1]:
                incident = min(incident, self._undone[0])
            self._open[verdict.detector] = _Open(_first(verdict, incident), beyond)
            return Change.OPENED, self._open[verdict.detector].episode
        before = each.episode
        each.looks = 0
        grave = before.grave + _is_grave(verdict)
        each.episode = replace(before, last_step=verdict.step, verdicts=before.verdicts + 1, grave=grave)
        graver = verdict.tier.severity > before.tier.severity
        if graver or (verdict.tier is before.tier and beyond > _beyond(before)):
            each.episode = replace(
                each.episode,
                tier=verdict.tier,
                value=verdict.value,
                threshold=verdict.threshold,
                reason=verdict.reason,
            )
            if graver or beyond > WORSE * each.told:
                each.told = beyond
                return Change.WORSENED, each.episode
        return (Change.WORSENED, each.episode) if before.grave < grave == LASTS else None

    def state_dict(self) -> list[dict[str, Any]]:
        """The open episodes as JSON primitives; what a rewind closed is remembered by the process alone."""
        fields = [asdict(each.episode) | {"told": each.told, "looks": each.looks} for each in self._open.values()]
        return [
            {name: encode_float(value) if isinstance(value, float) else value for name, value in saved.items()}
            for saved in fields
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of `state_dict`."""
        self._open = {}
        for saved in state:
            fields = {name: value for name, value in saved.items() if name not in ("told", "looks")}
            fields |= {"tier": Tier(saved["tier"])} | {k: decode_float(saved[k]) for k in ("value", "threshold")}
            self._open[saved["detector"]] = _Open(Episode(**fields), decode_float(saved["told"]), int(saved["looks"]))


def _first(verdict: Verdict, incident: int) -> Episode:
    return Episode(
        incident=incident,
        detector=verdict.detector,
        first_step=verdict.step,
        last_step=verdict.step,
        tier=verdict.tier,
        value=verdict.value,
        threshold=verdict.threshold,
        verdicts=1,
        grave=int(_is_grave(verdict)),
        reason=verdict.reason,
    )


def _is_grave(verdict: Verdict) -> bool:
    return verdict.tier.severity >= Tier.LARGE.severity


def _beyond(found: Verdict | Episode) -> float:
    """How far a value is beyond its threshold, in thresholds; infinite where it is not finite."""
    distance = abs(found.value - found.threshold) / max(abs(found.threshold), 1e-30)
    return distance if math.isfinite(distance) else math.inf


def sentence(change: Change, episode: Episode) -> str:
    """One line for people: the log, the writers and the report say the same.

    Args:
        change: what became of it.
        episode: as it is now.
    """
    head = f"{episode.detector} {change} ({episode.tier}), incident {episode.incident}"
    if change is not Change.CLOSED:
        return f"{head}: {episode.reason}"
    verdicts = f"{episode.verdicts} verdict{'s' * (episode.verdicts > 1)}"
    steps = f"steps {episode.first_step} to {episode.last_step}"
    return f"{head}: {steps}, {verdicts}, worst {episode.value:.6g} against {episode.threshold:.6g}: {episode.reason}"
