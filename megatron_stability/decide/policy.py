"""The policy table: verdicts in, one Decision out, within budgets.

The worst matching rule wins, by `Action.precedence`; a verdict without a rule is advice only. Budgets see to it that a
fault which an action can't cure ends in a HALT instead of a run that stands still:

    SKIP                  too many in a row or in 1000 steps -> `when_exhausted`
    REWIND                one more than `max_rewinds` -> HALT; each attempt goes one generation further back, with the
                          rule's next `later_factors`, or half the learning-rate factor of the one before; a
                          continuation that fails the repair gate is the next attempt. What is left out, before which
                          the checkpoint lies, reaches `skip_steps` back from the onset that the verdicts know of, for
                          a slow divergence is certain long after it began. With `level`, what comes back at
                          the samples of the last such rewind is the data's own level: it is applied
    SCALE_LR, SCALE_WD    not again within `cooldown_steps`
    any                   for `probation_steps` afterwards tiers up to LARGE count one higher, but never towards a skip,
                          which judges one step by itself

A change that was announced, or that the record itself shows (`detect.expect`), opens a grace in which nothing is
scaled or rewound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megatron_stability.decide.config import Decide, Rule
from megatron_stability.decide.repair_gate import RepairGate
from megatron_stability.detect.expected import EXPECTED, STARTS_ANEW
from megatron_stability.records import LEVEL, Action, Decision, StepRecord, Tier, Verdict

WINDOW = 1000  # settled steps over which `max_skips_per_1000_steps` counts
OUTSIDE_BUDGET = "outside_budget"  # Decision.parameters: this skip is the loss scaler's own
SAME_STEPS = 40  # steps' worth of samples within which two incidents are at the same samples
TAKEN_STEPS = 100  # settled steps for which a level that was taken as one is not asked about again
SCALES = (Action.SCALE_LR, Action.SCALE_WEIGHT_DECAY)


class TablePolicy:
    """`pipeline.Policy` by table.

    A skip that the fp16 loss scaler itself asked for (overflow while every loss is finite) is its normal search for a
    scale: it leaves the budgets as they are. In `observe` mode nothing is done, non-finite steps are applied as stock
    applies them, and the budgets follow the advice, so that it says what `act` would do; only the repair gate is shut,
    since there is no continuation to judge.

    `Decision.parameters` by `advised` action: SCALE_LR and SCALE_WEIGHT_DECAY carry `factor` and `steps`; REWIND
    `generations`, `skip_steps`, `attempt` (1-based), and `factor` and `steps` where the rule has them; `level` says
    that a rewind met what may be a level, or that an APPLY took it as one.
    """

    def __init__(self, config: Decide, mode: Literal["observe", "act"]) -> None:
        self.config = config
        self.mode = mode
        rewinds = config.when_exhausted == "rewind" or any(rule.action is Action.REWIND for rule in config.rules)
        self._gated = mode == "act" and rewinds  # else there is no continuation to judge
        self._start()

    def _start(self) -> None:
        self._settled = 0  # steps, counted here since a rewind turns the step number back
        self._consecutive = 0
        self._skips: deque[int] = deque()  # values of `_settled` at the skips of the last WINDOW steps
        self._rewinds = 0
        self._acted: dict[str, int] = {}  # `_settled` at the last time of each action
        self._met: int | None = None  # first sample of the step at which a rule with `level` last rewound
        self._taken: int | None = None  # `_settled` when what came back there was last taken as a level
        self._grace = 0, -1  # first and last step of the last one
        self._gate = RepairGate(self.config.gate)
        self._record: StepRecord | None = None  # remembered from `decide` to `settle`: no state
        self._raised: dict[str, dict[str, int]] = {}  # detector -> tier -> `_settled` at its last verdict of that tier

    @property
    def on_probation(self) -> bool:
        """Whether an action was taken in the last `probation_steps`."""
        return any(self._settled - at <= self.config.probation_steps for at in self._acted.values())

    def decide(self, record: StepRecord, verdicts: Sequence[Verdict]) -> Decision:
        """The decision for this step; changes no budget.

        Args:
            record: the reduced record.
            verdicts: what the detectors found, in their order.

        Returns:
            The decision, with one sentence of reason for the log line.
        """
        self._record = record
        failed = self._gate.inspect(record)
        advised, reason, parameters = Action.APPLY, "no finding", dict[str, float]()
        rule, verdict = self._worst(record, verdicts) if verdicts else (None, None)
        if rule is not None and verdict is not None:
            advised, reason, parameters = self._take(rule, _because(verdict), record, self._onset(rule, verdicts))
        elif verdicts:
            worst = max(verdicts, key=lambda verdict: verdict.tier.severity)
            reason = f"advice only: {_because(worst)}"
        if failed is not None:
            verdicts = [*verdicts, failed]
            if advised.precedence < Action.REWIND.precedence:
                plain = self._plain().model_copy(update={"skip_steps": 1})  # the continuation, and no more
                advised, reason, parameters = self._rewind(plain, _because(failed), record, failed.onset)
        action = advised if self.mode == "act" else Action.APPLY
        if action is not advised:
            reason = f"observe mode, would {advised.replace('_', ' ')}: {reason}"
        return Decision(
            step=record.step,
            action=action,
            advised=advised,
            reason=reason,
            verdicts=tuple(verdicts),
            parameters=parameters,
        )

    def _worst(self, record: StepRecord, verdicts: Sequence[Verdict]) -> tuple[Rule | None, Verdict | None]:
        """The first of the matching rules with the highest precedence, and the verdict that it matched."""
        best: tuple[Rule | None, Verdict | None] = (None, None)
        shown = next((verdict for verdict in verdicts if verdict.detector == EXPECTED), None)
        graced = shown is not None or self._grace[0] <= record.step <= self._grace[1]
        spared: tuple[Action, ...] = (*SCALES, Action.REWIND) if graced else ()
        if shown is not None and shown.value == STARTS_ANEW:
            spared = *spared, Action.SKIP  # the norm of this very step is judged by a level that is over
        raised = int(self.on_probation)
        for verdict in verdicts:
            for rule in self.config.rules:
                if best[0] is not None and rule.action.precedence <= best[0].action.precedence:
                    continue
                if rule.action in spared and verdict.tier.severity <= Tier.LARGE.severity:
                    continue
                severity = verdict.tier.severity
                if rule.action is not Action.SKIP and severity < Tier.LARGE.severity:
                    severity += raised
                if severity >= rule.tier.severity and self._agree(rule, verdict, verdicts):
                    best = rule, verdict
        return best

    def _agree(self, rule: Rule, verdict: Verdict, verdicts: Sequence[Verdict]) -> bool:
        """Whether a rule names this verdict's detector and, where it joins several, the others found it too."""
        if rule.detector == "*":
            return True
        if verdict.detector not in rule.names:
            return False
        now = {other.detector for other in verdicts if other.tier.severity >= rule.tier.severity}
        return all(
            name in now or name == verdict.detector or self._lately(name, rule.tier, rule.within) for name in rule.names
        )

    def _lately(self, name: str, tier: Tier, within: int) -> bool:
        ticks = self._raised.get(name, {})
        return any(Tier(t).severity >= tier.severity and self._settled - at < within for t, at in ticks.items())

    def _onset(self, rule: Rule, verdicts: Sequence[Verdict]) -> int:
        """The earliest step at which what a rule acts on may have begun; 0 where no verdict of its detectors says."""
        told = [each.onset for each in verdicts if rule.detector == "*" or each.detector in rule.names]
        return min((onset for onset in told if onset), default=0)

    def _take(self, rule: Rule, reason: str, record: StepRecord, onset: int) -> tuple[Action, str, dict[str, float]]:
        """A rule's action within the budgets."""
        if rule.action is Action.SKIP:
            if record.overflow and not record.nonfinite_losses:
                return Action.SKIP, reason, {OUTSIDE_BUDGET: 1.0}
            exhausted = self._exhausted()
            if exhausted is None:
                return Action.SKIP, reason, {}
            reason = f"{exhausted}; last: {reason}"
            if self.config.when_exhausted == "halt":
                return Action.HALT, reason, {}
            streak = record.step - self._consecutive
            return self._rewind(self._plain(), reason, record, min(onset or streak, streak))
        if rule.action is Action.REWIND:
            if rule.level and self._recurs(record):
                return Action.APPLY, f"came back at the same samples, so it is taken as a level: {reason}", {LEVEL: 1.0}
            return self._rewind(rule, reason, record, onset)
        if rule.action in SCALES and rule.factor is not None and rule.steps is not None:
            since = self._settled - self._acted.get(rule.action, -self.config.cooldown_steps - 1)
            if since <= self.config.cooldown_steps:
                return Action.APPLY, f"{rule.action.replace('_', ' ')} is in its cool-down: {reason}", {}
            return rule.action, reason, {"factor": rule.factor, "steps": float(rule.steps)}
        return rule.action, reason, {}

    def _recurs(self, record: StepRecord) -> bool:
        """Whether what asks for a rewind is at the samples of the last such rewind, or was just taken as a level."""
        if self._taken is not None and self._settled - self._taken <= TAKEN_STEPS:
            return True
        return self._met is not None and abs(record.first_sample - self._met) <= SAME_STEPS * record.samples

    def _plain(self) -> Rule:
        """The rewind that no rule asked for by itself."""
        skip_steps = self.config.rewind_skip_steps
        return Rule(detector="*", tier=Tier.WATCH, action=Action.REWIND, generations=1, skip_steps=skip_steps)

    def _rewind(self, rule: Rule, reason: str, record: StepRecord, onset: int) -> tuple[Action, str, dict[str, float]]:
        """A rewind, from which `skip_steps` steps up to the onset are left out and all that came after it."""
        attempt = self._rewinds
        if attempt >= self.config.max_rewinds:
            return Action.HALT, f"{attempt} rewinds were not enough; last: {reason}", {}
        parameters = {
            "generations": float((rule.generations or 1) + attempt),
            "skip_steps": float((rule.skip_steps or 1) + (record.step - onset if 0 < onset <= record.step else 0)),
            "attempt": attempt + 1.0,
        }
        if rule.factor is not None and rule.steps is not None:
            factors = (rule.factor, *rule.later_factors)
            beyond = max(attempt - len(factors) + 1, 0)
            parameters |= {"factor": factors[attempt - beyond] / 2**beyond, "steps": float(rule.steps)}
        return Action.REWIND, reason, parameters | ({LEVEL: 1.0} if rule.level else {})

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
        if self._gated and self._record is not None and self._record.step == decision.step:
            self._gate.settle(self._record, decision)
        self._remember(decision)
        self._record = None
        advised = decision.advised
        for verdict in decision.verdicts:
            self._raised.setdefault(verdict.detector, {})[verdict.tier] = self._settled
        if advised is Action.SKIP:
            self._consecutive += 1
            self._skips.append(self._settled)
        elif advised.updates_weights or advised is Action.REWIND:
            self._consecutive = 0
        if advised is Action.REWIND:
            self._rewinds += 1
            self._skips.clear()
        if advised is not Action.APPLY:
            self._acted[advised] = self._settled
        self._settled += 1
        while self._skips and self._settled - self._skips[0] >= WINDOW:
            self._skips.popleft()

    def _remember(self, decision: Decision) -> None:
        """Where a level may have been met, that it was taken as one, and until when a change has its grace."""
        if decision.parameters.get(LEVEL) and decision.advised is Action.REWIND:
            self._met = None if self._record is None else self._record.first_sample
        elif decision.parameters.get(LEVEL):
            self._taken = self._settled
            self._gate.open()
        for verdict in decision.verdicts:
            if verdict.detector == EXPECTED:
                self._grace = decision.step, decision.step + int(verdict.threshold)

    def state_dict(self) -> dict[str, Any]:
        """The budgets as JSON primitives."""
        return {
            "mode": self.mode,
            "settled": self._settled,
            "consecutive": self._consecutive,
            "skips": list(self._skips),
            "rewinds": self._rewinds,
            "met": self._met,
            "taken": self._taken,
            "grace": list(self._grace),
            "gate": self._gate.state_dict(),
            "acted": {str(action): at for action, at in self._acted.items()},
            "raised": {name: {str(tier): at for tier, at in ticks.items()} for name, ticks in self._raised.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; what was only advised doesn't count in `act` mode, nor the reverse.

        After a rewind in process the live budgets stay: loading the checkpoint's would forget the attempt.
        """
        self._start()
        if state["mode"] != self.mode:
            return
        self._settled = int(state["settled"])
        self._consecutive = int(state["consecutive"])
        self._skips.extend(int(at) for at in state["skips"])
        self._rewinds = int(state["rewinds"])
        met, taken, grace = state.get("met"), state.get("taken"), state.get("grace", (0, -1))  # absent: older
        self._met, self._taken = None if met is None else int(met), None if taken is None else int(taken)
        self._grace = int(grace[0]), int(grace[1])
        self._gate.load_state_dict(state["gate"])
        self._acted = {str(action): int(at) for action, at in state["acted"].items()}
        self._raised = {
            str(name): {str(tier): int(at) for tier, at in ticks.items()} for name, ticks in state["raised"].items()
        }


def _because(verdict: Verdict) -> str:
    return f"{verdict.detector} ({verdict.tier}): {verdict.reason}"
