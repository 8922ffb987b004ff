"""What a detector is, and what all detectors with a baseline share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from megatron_stability.detect.config import Early, Windowed
from megatron_stability.detect.window import Window
from megatron_stability.records import StepRecord, Tier, Verdict

PLAUSIBLE = 1e100  # a finite loss or norm beyond this is no measurement; its square would still be finite


class Detector(Protocol):
    """Looks at each step's record; pure, deterministic, with state that can be saved.

    Order per step: `inspect` judges the record against the baseline as it was, the policy decides, then `learn` is told
    whether the step was accepted (finite, not flagged by this detector, and applied). A flagged or skipped value never
    enters a baseline.
    """

    @property
    def name(self) -> str:
        """The name of its section in `detect`; verdicts and policy rules carry it."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Names in `record.signals` (see `detect.signals`) without which it stays silent."""

    def inspect(self, record: StepRecord) -> Verdict | None:
        """A verdict, or None where nothing was found. Does not change the baseline."""

    def learn(self, record: StepRecord, applied: bool) -> None:
        """Update the baseline after the decision; `applied`: the step changed the weights."""

    def reset(self) -> None:
        """Back to the state before the first step."""

    def state_dict(self) -> dict[str, Any]:
        """State as JSON primitives (numbers, strings, lists, dicts)."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


class Finding(NamedTuple):
    """What `BaselineDetector.judge` found in one value."""

    tier: Tier | None  # None: suspicious, so kept out of the baseline, but not (yet) worth a verdict
    threshold: float
    reason: str
    at_once: bool = False  # needs no persistence


class Stateless:
    """The state half of `Detector` for a detector that judges each record alone."""

    requires: ClassVar[tuple[str, ...]] = ()

    def learn(self, record: StepRecord, applied: bool) -> None:
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

    A value is accepted if its step is finite, `judge` doesn't suspect it, and the step was applied. A verdict needs
    `persistence` suspicious values in a row; the earlier ones raise none but stay out of the baseline too. After
    `relearn_after` suspicious values in a row this is the new level: the verdict says so, and the baseline starts anew.
    A non-finite step neither counts nor interrupts a row. Values beyond `PLAUSIBLE` are always suspicious, and raise a
    verdict at once.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()  # names in `record.signals` (see `detect.signals`); absent: silent

    def __init__(self, early: Early, *, relearn_after: int, persistence: int = 1) -> None:
        self.early = early
        self.relearn_after = relearn_after
        self.persistence = persistence
        self.run = 0  # suspicious finite values in a row
        self.since = 0  # the step of the first of them
        self._judged: StepRecord | None = None  # what `find` remembers: no state
        self._value: float | None = None
        self._finding: Finding | None = None

    @abstractmethod
    def value(self, record: StepRecord) -> float | None:
        """The value under watch, or None where this record has none."""

    @abstractmethod
    def judge(self, value: float, record: StepRecord) -> Finding | None:
        """A finding if the plausible `value` is suspicious against the baseline as it is."""

    @abstractmethod
    def accept(self, value: float, record: StepRecord) -> None:
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

    def warms_up_for(self) -> int:
        """Accepted values that are still to come before it can speak; 0 where it can."""
        return 0

    def onset(self) -> int:
        """The step at which what the row shows may have begun; 0 without a row."""
        return self.since if self.run else 0

    def suspect(self, value: float, record: StepRecord) -> None:
        """Told of a value that stays out of the baseline, unless the baseline starts anew with it."""
        del value, record

    def inspect(self, record: StepRecord) -> Verdict | None:
        """See `Detector.inspect`."""
        finding = self._find(record)
        return None if finding is None else self._verdict(record.step, finding)

    def _verdict(self, step: int, finding: Finding) -> Verdict | None:
        shift = self.run + 1 == self.relearn_after
        tier = finding.tier or (Tier.WATCH if shift else None)
        if tier is None or not (shift or finding.at_once or self.run + 1 >= self.persistence):
            return None
        assert self._value is not None, "a finding is about a value"
        reason, threshold = finding.reason, finding.threshold
        if shift:
            reason += f"; level shift: {self.relearn_after} flags in a row, the baseline starts anew"
        return Verdict(
            detector=self.name,
            tier=tier,
            step=step,
            value=self._value,
            threshold=threshold,
            reason=reason,
            onset=self.onset(),
        )

    def learn(self, record: StepRecord, applied: bool) -> None:
        """See `Detector.learn`."""
        finding = self._finding if self._judged is record else self._find(record)
        self._judged = None  # the baseline is about to change
        value = self._value
        if value is None:
            return
        if finding is None:
            self.run = 0
            if applied:
                self.accept(value, record)
            return
        if self.run == 0:
            self.since = record.step
        self.run += 1
        if self.run >= self.relearn_after:
            self.run = 0
            self.clear()
        else:
            self.suspect(value, record)

    def reset(self) -> None:
        """See `Detector.reset`."""
        self.run = self.since = 0
        self._judged = None
        self.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `Detector.state_dict`."""
        return {"run": self.run, "since": self.since, **self.baseline()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Detector.load_state_dict`."""
        self.reset()
        self.run, self.since = int(state["run"]), int(state.get("since", 0))  # absent: older
        self.load_baseline(state)

    def _find(self, record: StepRecord) -> Finding | None:
        """What `judge` says of a finite step's value; remembered until `learn`, so that it is computed once a step."""
        self._judged = record
        value = self.value(record) if record.finite and record.tokens > 0 else None
        self._value = value
        if value is None:
            finding = None
        elif -PLAUSIBLE <= value <= PLAUSIBLE:
            finding = self.judge(value, record)
        else:  # a NaN, against the record's contract, comes here as well
            reason = f"value {value:.3g} is beyond {PLAUSIBLE:.0e}"
            finding = Finding(Tier.LARGE, PLAUSIBLE, reason, at_once=True)
        self._finding = finding
        return finding


class WindowDetector(BaselineDetector):
    """Mean and deviation of the last W accepted values; silent until `warmup_steps` of them are there."""

    def __init__(self, config: Windowed, early: Early) -> None:
        super().__init__(early, relearn_after=config.relearn_after, persistence=config.persistence)
        self.window = Window(config.window)
        self.warmup_steps = config.warmup_steps

    def accept(self, value: float, record: StepRecord) -> None:
        """Into the window."""
        self.window.push(value)

    def warms_up_for(self) -> int:
        """See `BaselineDetector`."""
        return max(self.warmup_steps - len(self.window), 0)

    def clear(self) -> None:
        """Empty the window."""
        self.window.clear()

    def baseline(self) -> dict[str, Any]:
        """The window."""
        return {"window": self.window.state_dict()}

    def load_baseline(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.window.load_state_dict(state["window"])


def blind(detectors: Sequence[Detector], step: int) -> dict[str, int]:
    """Detectors that still lack a baseline, as after a start without saved state.

    Args:
        detectors: from `build`.
        step: the next one.

    Returns:
        By name the first step at which each can speak, if every step until then is accepted.
    """
    return {d.name: step + left for d in detectors if isinstance(d, BaselineDetector) and (left := d.warms_up_for())}


def silent(detectors: Sequence[Detector], available: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Detectors that will say nothing, and the signals they lack.

    Args:
        detectors: from `build`.
        available: names of the signals that the run's observers measure.

    Returns:
        Missing signal names by detector name; empty if every detector has what it reads.
    """
    lacking = {d.name: tuple(name for name in d.requires if name not in available) for d in detectors}
    return {name: missing for name, missing in lacking.items() if missing}
