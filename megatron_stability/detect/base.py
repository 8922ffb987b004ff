"""What a detector is, and what all detectors with a baseline share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol

from megatron_stability.records import StepRecord, Tier, Verdict

PLAUSIBLE = 1e100  # a finite loss or norm beyond this is no measurement; its square would still be finite


class Detector(Protocol):
    """Looks at each step's record; pure, deterministic, with state that can be saved.

    Order per step: `inspect` judges the record against the baseline as it was, the policy decides, then `learn` is told
    whether the step was accepted (finite, not flagged by this detector, and applied). A flagged or skipped value never
    enters a baseline.
    """

    name: str

    def inspect(self, record: StepRecord) -> Verdict | None:
        """A verdict, or None where nothing was found. Does not change the baseline."""

    def learn(self, record: StepRecord, verdict: Verdict | None, applied: bool) -> None:
        """Update the baseline after the decision."""

    def reset(self) -> None:
        """Back to the state before the first step."""

    def state_dict(self) -> dict[str, Any]:
        """State as JSON primitives (numbers, strings, lists, dicts)."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


class Finding(NamedTuple):
    """What `BaselineDetector.judge` found in one value."""

    tier: Tier
    threshold: float
    reason: str


class Stateless:
    """The state half of `Detector` for a detector that judges each record alone."""

    def learn(self, record: StepRecord, verdict: Verdict | None, applied: bool) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        """An empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class BaselineDetector(ABC):
    """One value a step against a baseline of accepted values.

    A value is accepted if its step is finite, it is not suspicious by `judge`, and the step was applied. A verdict
    needs `persistence` suspicious values in a row; the earlier ones raise none but stay out of the baseline too.
    After `relearn_after` suspicious values in a row this is the new level: the verdict says so, and the baseline starts
    anew. A non-finite step neither counts nor interrupts a row. Values beyond `PLAUSIBLE` are always suspicious.
    """

    name: str
    requires: ClassVar[tuple[str, ...]] = ()  # names in `record.signals`; absent: the detector stays silent

    def __init__(self, *, relearn_after: int, persistence: int = 1) -> None:
        self.relearn_after = relearn_after
        self.persistence = persistence
        self.run = 0  # suspicious finite values in a row

    @abstractmethod
    def value(self, record: StepRecord) -> float | None:
        """The value under watch, or None where this record has none."""

    @abstractmethod
    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """A finding if the plausible `value` is suspicious against the baseline as it is."""

    @abstractmethod
    def accept(self, value: float) -> None:
        """Take a plausible value into the baseline."""

    @abstractmethod
    def clear(self) -> None:
        """Empty the baseline."""

    @abstractmethod
    def baseline(self) -> dict[str, Any]:
        """The baseline as JSON primitives."""

    @abstractmethod
    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse of `baseline`."""

    def inspect(self, record: StepRecord) -> Verdict | None:
        """See `Detector.inspect`."""
        value = self._measured(record)
        if value is None:
            return None
        finding = self._find(value, record)
        if finding is None or self.run + 1 < self.persistence:
            return None
        reason = finding.reason
        if self.run + 1 == self.relearn_after:
            reason += f"; level shift: {self.relearn_after} flags in a row, the baseline starts anew"
        return Verdict(
            detector=self.name,
            tier=finding.tier,
            step=record.step,
            value=value,
            threshold=finding.threshold,
            reason=reason,
        )

    def learn(self, record: StepRecord, verdict: Verdict | None, applied: bool) -> None:
        """See `Detector.learn`."""
        value = self._measured(record)
        if value is None:
            return
        if verdict is not None or (self.persistence > 1 and self._find(value, record) is not None):
            self.run += 1
            if self.run >= self.relearn_after:
                self.reset()
            return
        self.run = 0
        if applied:
            self.accept(value)

    def reset(self) -> None:
        """See `Detector.reset`."""
        self.run = 0
        self.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `Detector.state_dict`."""
        return {"run": self.run, **self.baseline()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Detector.load_state_dict`."""
        self.run = int(state["run"])
        self.load_baseline(state)

    def _measured(self, record: StepRecord) -> float | None:
        return self.value(record) if record.finite and record.tokens > 0 else None

    def _find(self, value: float, record: StepRecord) -> Finding | None:
        if not abs(value) <= PLAUSIBLE:  # written so that a NaN, against the record's contract, is caught as well
            return Finding(Tier.LARGE, PLAUSIBLE, f"value {value:.3g} is beyond {PLAUSIBLE:.0e}")
        return self.judge(value, record)
