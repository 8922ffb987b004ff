"""READ FIRST. One training step, as data sees it:

    local signals ──observe──► StepRecord ──detect──► Verdicts ──decide──► Decision ──act──► optimizer ──► record

`observe` is the only place where ranks talk: two all-reduces of fixed width. From there on every rank computes the
same values from the same record, so every rank takes the same decision without another word.

Two calls a step, made by the adapter (`megatron/runtime.py`, for either host's loop):

    record, decision = pipeline.decide(local)   # between the gradient norm and the optimizer step
    pipeline.finish(record, decision)           # after it: baselines learn, the ledger gets its line
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from megatron_stability.detect.base import Detector
from megatron_stability.detect.expected import starts_anew
from megatron_stability.records import Change, Decision, Episode, StepRecord, Verdict


class Policy(Protocol):
    """Verdicts in, one Decision out; keeps its own budgets."""

    def decide(self, record: StepRecord, verdicts: Sequence[Verdict]) -> Decision:
        """The decision for this step. Changes no budget until `settle`."""

    def settle(self, decision: Decision) -> None:
        """Count a decision that was carried out against the budgets."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Grouping(Protocol):
    """Groups verdicts into episodes; see `decide/episodes.py`."""

    @property
    def open(self) -> tuple[Episode, ...]:
        """The episodes that are open."""

    def settle(self, record: StepRecord, decision: Decision) -> list[tuple[Change, Episode]]:
        """What changed by a finished step."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Sink(Protocol):
    """Takes one finished step: the ledger, TensorBoard, incident bundles. Called on every rank; most write on one."""

    def write(self, record: StepRecord, decision: Decision) -> None: ...


@runtime_checkable
class EpisodeSink(Protocol):
    """A sink that is told of episodes as well, after the step in which they changed."""

    def write_episode(self, change: Change, episode: Episode) -> None: ...


@dataclass(frozen=True)
class Pipeline[Local]:
    """The rooms in their order. `observe` maps a rank's local signals to the reduced record (collective)."""

    observe: Callable[[Local], StepRecord]
    detectors: Sequence[Detector]
    policy: Policy
    sinks: Sequence[Sink]
    episodes: Grouping
    afresh: Collection[str] = ()  # names of detectors that a load starts afresh
    idle: Collection[str] = ()  # names of detectors whose signals this run does not measure: they are not asked

    def without(self, idle: Collection[str]) -> Pipeline[Local]:
        """The same with these detectors idle; what they have learned stays in checkpoints."""
        return replace(self, idle=idle)

    @cached_property
    def _inspect(self) -> list[Callable[[StepRecord], Verdict | None]]:
        return [detector.inspect for detector in self._asked]  # bound once, for they run every step

    @cached_property
    def _learn(self) -> list[Callable[[StepRecord, bool], None]]:
        return [detector.learn for detector in self._asked]

    @property
    def _asked(self) -> list[Detector]:
        return [detector for detector in self.detectors if detector.name not in self.idle]

    def decide(self, local: Local) -> tuple[StepRecord, Decision]:
        """Observe, detect, decide. Collective: every rank calls it once a step, in the same order.

        Args:
            local: what this rank saw of the step.

        Returns:
            The reduced record and the decision, both equal on every rank.
        """
        record = self.observe(local)
        verdicts = [verdict for inspect in self._inspect if (verdict := inspect(record)) is not None]
        return record, self.policy.decide(record, verdicts)

    def finish(self, record: StepRecord, decision: Decision) -> None:
        """Learn and record, once the optimizer step has run or was withheld. No collective."""
        applied = decision.updates_weights
        if decision.verdicts:
            for detector in self._asked:
                if starts_anew(detector.name, decision):
                    detector.reset()
        for learn in self._learn:
            learn(record, applied)
        self.policy.settle(decision)
        changes = self.episodes.settle(record, decision)  # first, so that what is written of the step counts it
        for sink in self.sinks:
            sink.write(record, decision)
        for change, episode in changes:
            for sink in self.sinks:
                if isinstance(sink, EpisodeSink):
                    sink.write_episode(change, episode)

    def state_dict(self) -> dict[str, Any]:
        """Detector baselines and policy budgets as JSON primitives, for the checkpoint."""
        baselines = {detector.name: detector.state_dict() for detector in self.detectors}
        return {
            "detectors": baselines,
            "policy": self.policy.state_dict(),
            "episodes": self.episodes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; a detector without saved state, or of `afresh`, starts afresh."""
        for detector in self.detectors:
            if detector.name in state["detectors"] and detector.name not in self.afresh:
                detector.load_state_dict(state["detectors"][detector.name])
            else:
                detector.reset()
        self.policy.load_state_dict(state["policy"])
        self.episodes.load_state_dict(state.get("episodes", ()))  # absent: saved before there were any
