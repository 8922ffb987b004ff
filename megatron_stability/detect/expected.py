"""Changes that are meant: announced by the operator, or shown by the record itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from megatron_stability.detect import config as c
from megatron_stability.detect.base import Detector
from megatron_stability.records import LEVEL, Decision, StepRecord, Tier, Verdict

EXPECTED = "expect"
STARTS_ANEW = 1.0  # a verdict's value: baselines of loss and norm start anew with this step; 0: they stay
LEVELS = ("loss_", "grad_norm_")  # how the names of detectors begin whose baselines do
OWN = "grad_norm_spike"  # which learns a level by itself, from the norms that it withheld
JUMP = 2.0  # x by which a learning rate changes from one step to the next only where a phase begins
WARM_UP = 10  # first steps, in which a warm-up from zero doubles


class ExpectedChange:
    """WATCH at the step where a change is announced (`steps`), or where the batch size or the learning rate jumps.

    The verdict opens the policy's grace, `threshold` steps long. At an announced change the baselines of loss and
    gradient norm start anew, since their level is expected to move; at one that the record shows they stay, as they do
    where a resume was allowed to change arguments. The first step of a process whose settings name baselines to `reset`
    says so.
    """

    name = EXPECTED
    requires: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: c.Expect, early: c.Early) -> None:
        del early  # a change is meant at any time
        self.config = config
        self.announced = dict(config.announced)
        self._begun = not config.reset  # of this process, not of the run: no state
        self._allowed: tuple[str, ...] = ()  # likewise
        self.reset()

    def allow(self, names: Sequence[str]) -> None:
        """Arguments that differ from the loaded checkpoint's and may: the next step says so and opens the grace."""
        self._allowed = tuple(names)

    def inspect(self, record: StepRecord) -> Verdict | None:
        """See the class."""
        if record.step in self.announced:
            reason, value = f"announced change of {self.announced[record.step]}", STARTS_ANEW
        elif not self._begun or self._allowed:
            reset = f"the saved baselines of {', '.join(self.config.reset)} are left, as detect.expect.reset says"
            changed = f"{', '.join(self._allowed)} may differ from the checkpoint's, as checkpoint.allow_changes says"
            said = [changed] * bool(self._allowed) + [reset] * (not self._begun)
            reason, value = "; ".join(said), 0.0
        elif (shown := self._shown(record)) is not None:
            reason, value = shown, 0.0
        else:
            return None
        grace = self.config.grace_steps
        reason += f"; nothing is scaled or rewound for {grace} steps"
        if value:
            reason += ", and the baselines of loss and gradient norm start anew"
        return Verdict(
            detector=self.name, tier=Tier.WATCH, step=record.step, value=value, threshold=grace, reason=reason
        )

    def _shown(self, record: StepRecord) -> str | None:
        if self.samples and record.samples != self.samples:
            return f"the batch changes from {self.samples} to {record.samples} samples"
        before, now = self.learning_rate, record.learning_rate
        if record.step > WARM_UP and before > 0 and now > 0 and not before / JUMP < now < before * JUMP:
            return f"the learning rate goes from {before:.4g} to {now:.4g}"
        return None

    def learn(self, record: StepRecord, applied: bool) -> None:
        """Batch size and learning rate of the step, whatever became of it."""
        self._begun, self._allowed = True, ()
        self.samples = record.samples
        self.learning_rate = record.learning_rate if 0 <= record.learning_rate < 1e30 else 0.0

    def reset(self) -> None:
        """See `Detector.reset`."""
        self.samples, self.learning_rate = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """See `Detector.state_dict`."""
        return {"samples": self.samples, "learning_rate": self.learning_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Detector.load_state_dict`."""
        self.samples, self.learning_rate = int(state["samples"]), float(state["learning_rate"])


def starts_anew(name: str, decision: Decision) -> bool:
    """Whether a detector's baseline begins with this step: the change was announced, or the policy took it as a level.

    Args:
        name: the detector's.
        decision: the step's; so that its line in the ledger says why.
    """
    if not name.startswith(LEVELS):
        return False
    if any(verdict.detector == EXPECTED and verdict.value == STARTS_ANEW for verdict in decision.verdicts):
        return True
    return name != OWN and bool(decision.parameters.get(LEVEL)) and decision.updates_weights


def allow(detectors: Iterable[Detector], names: Sequence[str]) -> None:
    """Open the grace at the next step, where a resume was allowed to change what changes training.

    Args:
        detectors: the run's.
        names: of what differs from the checkpoint; none: nothing happens.
    """
    for detector in detectors:
        if isinstance(detector, ExpectedChange):
            detector.allow(names)
