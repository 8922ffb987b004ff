"""The policy table: verdicts in, one Decision out, within budgets.

The worst matching rule wins, by `Action.precedence`; a verdict without a rule is advice only. Skips are budgeted, so
that a fault that skipping can't cure ends in a HALT instead of a run that stands still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from megatron_stability.config import Decide, Rule
from megatron_stability.records import Action, Decision, StepRecord, Verdict

WINDOW = 1000  # settled steps over which `max_skips_per_1000_steps` counts
OUTSIDE_BUDGET = "outside_budget"  # Decision.parameters: this skip is the loss scaler's own


class TablePolicy:
    """`pipeline.Policy` by table.

    A skip that the fp16 loss scaler itself asked for (overflow while every loss is finite) is its normal search for a
    scale: it leaves both budgets as they are. In `observe` mode nothing is done, non-finite steps are applied as stock
    applies them, and the budgets follow the advice, so that it says what `act` would do.
    """

    def __init__(self, config: Decide, mode: Literal["observe", "act"]) -> None:
        self.config = config
        self.mode = mode
        self._start()

    def _start(self) -> None:
        self._settled = 0  # steps, counted here since a rewind turns the step number back
        self._consecutive = 0
        self._skips: deque[int] = deque()  # values of `_settled` at the skips of the last WINDOW steps

    def decide(self, record: StepRecord, verdicts: Sequence[Verdict]) -> Decision:
        """The decision for this step; changes no budget.

        Args:
            record: the reduced record.
            verdicts: what the detectors found, in their order.

        Returns:
            The decision, with one sentence of reason for the log line.
        """
        advised, reason = Action.APPLY, "no finding"
        for verdict, rule in self._matches(verdicts):
            if rule.action.precedence > advised.precedence:
                advised, reason = rule.action, _because(verdict)
        if advised is Action.APPLY and verdicts:
            worst = max(verdicts, key=lambda verdict: verdict.tier.severity)
            reason = f"advice only: {_because(worst)}"
        scaler = advised is Action.SKIP and record.overflow and not record.nonfinite_losses
        if advised is Action.SKIP and not scaler and (exhausted := self._exhausted()):
            advised, reason = Action.HALT, f"{exhausted}; last: {reason}"
        action = advised if self.mode == "act" else Action.APPLY
        if action is not advised:
            reason = f"observe mode, would {advised.replace('_', ' ')}: {reason}"
        return Decision(
            step=record.step,
            action=action,
            advised=advised,
            reason=reason,
            verdicts=tuple(verdicts),
            parameters={OUTSIDE_BUDGET: 1.0} if scaler else {},
        )

    def _matches(self, verdicts: Sequence[Verdict]) -> Iterator[tuple[Verdict, Rule]]:
        for verdict in verdicts:
            for rule in self.config.rules:
                if rule.detector in ("*", verdict.detector) and verdict.tier.severity >= rule.tier.severity:
                    yield verdict, rule

    def _exhausted(self) -> str | None:
        """Why one more skip is too many, or None."""
        config = self.config
        if self._consecutive >= config.max_consecutive_skips:
            return f"{self._consecutive} steps in a row were skipped and this one would be too"
        recent = sum(self._settled - at < WINDOW for at in self._skips)
        if recent >= config.max_skips_per_1000_steps:
            return f"{recent} of the last {WINDOW} steps were skipped and this one would be too"
        return None

    def settle(self, decision: Decision) -> None:
        """Count a decision that was carried out (in `observe` mode: that was advised) against the budgets."""
        if decision.parameters.get(OUTSIDE_BUDGET):
            return
        if decision.advised is Action.SKIP:
            self._consecutive += 1
            self._skips.append(self._settled)
        elif decision.advised.updates_weights:
            self._consecutive = 0
        self._settled += 1
        while self._skips and self._settled - self._skips[0] >= WINDOW:
            self._skips.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The budgets as JSON primitives."""
        return {
            "mode": self.mode,
            "settled": self._settled,
            "consecutive": self._consecutive,
            "skips": list(self._skips),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; skips that were only advised don't count in `act` mode, nor the reverse."""
        self._start()
        if state["mode"] != self.mode:
            return
        self._settled = int(state["settled"])
        self._consecutive = int(state["consecutive"])
        self._skips.extend(int(at) for at in state["skips"])


def _because(verdict: Verdict) -> str:
    return f"{verdict.detector} ({verdict.tier}): {verdict.reason}"
