"""The repair gate: after a rewind, a short continuation must look like the run's own healthy past."""

from __future__ import annotations

from typing import Any

from megatron_stability.decide.config import Gate
from megatron_stability.detect.base import PLAUSIBLE
from megatron_stability.detect.window import Window
from megatron_stability.records import Action, Decision, StepRecord, Tier, Verdict
from megatron_stability.signals import HELD_OUT, SETS

HISTORY = 100  # healthy steps that the continuation is compared with


def measures(record: StepRecord) -> dict[str, float]:
    """What of a finite step is compared: loss, gradient norm, seconds a token, mean held-out loss; what there is."""
    if not (record.finite and record.tokens > 0):
        return {}
    found = {"loss": record.loss, "gradient norm": record.grad_norm}
    signals = record.signals
    if (seconds := signals.get("step_seconds")) is not None:
        found["seconds a token"] = seconds / record.tokens
    if HELD_OUT in signals:
        losses = [loss for name, loss in signals.items() if name.startswith(SETS)]
        found["held-out loss"] = sum(losses) / max(len(losses), 1)
    return {name: value for name, value in found.items() if abs(value) <= PLAUSIBLE}


class RepairGate:
    """Compares the means of `steps` steps after a rewind with those of the last healthy steps before the first one.

    Losses may be `loss` nats above, the gradient norm `norm` times, seconds a token `slow` times. A continuation that
    is worse is a LARGE verdict on its last step, and the policy escalates; one that isn't ends the comparison. Healthy
    are applied steps without a finding. What comes before the middle of that past is not compared: after a rewind far
    back the loss is where it was then, above what it had come down to.
    """

    name = "repair_gate"

    def __init__(self, config: Gate) -> None:
        self.config = config
        self.history: dict[str, Window] = {}
        self.target: dict[str, float] | None = None  # means before the first rewind; None: the gate is open
        self.seen: dict[str, Window] = {}
        self.steps = 0
        self.places = Window(HISTORY)  # step numbers of the healthy past
        self.begins = 0  # first step that may be compared
        self.first = 0  # first step that was

    def inspect(self, record: StepRecord) -> Verdict | None:
        """A verdict at the end of a continuation that is worse; changes nothing."""
        if self.target is None or self.steps + 1 < self.config.steps or record.step < self.begins:
            return None
        now = measures(record)
        if not now:
            return None
        for name, target in self.target.items():
            values = [*self.seen[name].values] if name in self.seen else []
            values += [now[name]] if name in now else []
            if not values:
                continue
            mean, limit = sum(values) / len(values), self._limit(name, target)
            if mean > limit:
                reason = f"{self.steps + 1} steps after the rewind, {name} is {mean:.4g}, above {limit:.4g}"
                return Verdict(
                    detector=self.name,
                    tier=Tier.LARGE,
                    step=record.step,
                    value=mean,
                    threshold=limit,
                    reason=reason,
                    onset=self.first,
                )
        return None

    def _limit(self, name: str, target: float) -> float:
        if "loss" in name:
            return target + self.config.loss
        return target * (self.config.norm if name == "gradient norm" else self.config.slow)

    def settle(self, record: StepRecord, decision: Decision) -> None:
        """Follow a decision that was carried out."""
        if self.config.steps == 0:
            return
        if decision.advised is Action.REWIND:
            if self.target is None:
                self.target = {name: window.mean for name, window in self.history.items()}
                self.begins = int(self.places.mean)
            self.seen, self.steps = {}, 0
            return
        now = measures(record)
        if not now or not decision.advised.updates_weights:
            return
        if self.target is None:
            if not decision.verdicts:
                self._push(self.history, now, HISTORY)
                self.places.push(record.step)
            return
        if record.step < self.begins:
            return
        self._push(self.seen, now, self.config.steps)
        if self.steps == 0:
            self.first = record.step
        self.steps += 1
        if self.steps >= self.config.steps:
            self.open()

    def open(self) -> None:
        """The comparison is over, or has lost its measure: what came back was taken as a level."""
        self.target, self.seen, self.steps = None, {}, 0

    @staticmethod
    def _push(windows: dict[str, Window], now: dict[str, float], size: int) -> None:
        for name, value in now.items():
            windows.setdefault(name, Window(size)).push(value)

    def state_dict(self) -> dict[str, Any]:
        """JSON primitives."""
        return {
            "history": {name: window.state_dict() for name, window in self.history.items()},
            "target": self.target and dict(self.target),
            "seen": {name: window.state_dict() for name, window in self.seen.items()},
            "steps": self.steps,
            "places": self.places.state_dict(),
            "begins": self.begins,
            "first": self.first,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.history, self.seen = {}, {}
        for windows, saved, size in (
            (self.history, state["history"], HISTORY),
            (self.seen, state["seen"], max(self.config.steps, 1)),
        ):
            for name, window in saved.items():
                windows[str(name)] = Window(size)
                windows[str(name)].load_state_dict(window)
        target = state["target"]
        self.target = None if target is None else {str(name): float(value) for name, value in target.items()}
        self.steps, self.begins, self.places = int(state["steps"]), int(state.get("begins", 0)), Window(HISTORY)
        self.first = int(state.get("first", 0))  # absent: older
        if "places" in state:  # absent: older
            self.places.load_state_dict(state["places"])
