"""Input that is plainly odd, told once each."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, ClassVar

from megatron_stability.detect import config as c
from megatron_stability.records import StepRecord, Tier, Verdict

SUM, ZERO, PERIOD = "sum", "zero", "period"
REASONS = {
    SUM: "the loss is a sum, or in another unit than nats a token: no vocabulary makes a guess that bad",
    ZERO: "the gradient norm is 0: nothing is trained, or the norm is not measured",
    PERIOD: "steps are withheld at a fixed distance, as by one part of the data that comes round",
}


class OddInput:
    """WATCH, once each for a run: a loss that can't be nats a token, a norm always 0, steps withheld with a period.

    The first two are judged by the smallest loss and largest norm of the first `first_steps` finite steps; the third by
    the last `in_period` withheld steps, whose samples it names.
    """

    name = "odd_input"
    requires: ClassVar[tuple[str, ...]] = ()
    told: list[str]
    withheld: deque[tuple[int, int]]

    def __init__(self, config: c.OddInput, early: c.Early) -> None:
        del early  # it looks at the first steps on purpose
        self.config = config
        self.lowest, self.highest = 0.0, 0.0
        self.reset()

    def inspect(self, record: StepRecord) -> Verdict | None:
        """See the class."""
        kind = self._kind()
        if kind is None:
            return None
        value, threshold, reason = float(self.lowest), self.config.nats, REASONS[kind]
        if kind == SUM:
            reason += f" (at least {self.lowest:.4g} in the first {self.seen} steps)"
        elif kind == ZERO:
            value = threshold = 0.0
            reason += f" (in each of the first {self.seen} steps)"
        else:
            (step, _), (after, _) = self.withheld[0], self.withheld[1]
            value, threshold = float(after - step), float(self.config.in_period)
            reason += f": every {after - step} steps, first samples {', '.join(str(s) for _, s in self.withheld)}"
        return Verdict(
            detector=self.name, tier=Tier.WATCH, step=record.step, value=value, threshold=threshold, reason=reason
        )

    def _kind(self) -> str | None:
        """What is to be told now."""
        first = self.seen >= self.config.first_steps
        if first and self.lowest > self.config.nats and SUM not in self.told:
            return SUM
        if first and self.highest == 0 and ZERO not in self.told:
            return ZERO
        if len(self.withheld) == self.config.in_period and PERIOD not in self.told:
            steps = [step for step, _ in self.withheld]
            gaps = {after - before for before, after in pairwise(steps)}
            if len(gaps) == 1 and min(gaps) > 1:
                return PERIOD
        return None

    def learn(self, record: StepRecord, applied: bool) -> None:
        """The first steps, and every withheld one."""
        if (kind := self._kind()) is not None:
            self.told.append(kind)
        if not applied and not record.overflow:
            self.withheld.append((record.step, record.first_sample))
        if self.seen < self.config.first_steps and record.finite and record.tokens > 0:
            self.seen += 1
            self.lowest = min(self.lowest, record.loss) if self.seen > 1 else record.loss
            self.highest = max(self.highest, record.grad_norm)

    def reset(self) -> None:
        """See `Detector.reset`."""
        self.seen, self.lowest, self.highest = 0, 0.0, 0.0
        self.told = []
        self.withheld = deque(maxlen=self.config.in_period)

    def state_dict(self) -> dict[str, Any]:
        """See `Detector.state_dict`."""
        first = {"seen": self.seen, "lowest": self.lowest, "highest": self.highest}
        return {**first, "told": list(self.told), "withheld": [list(pair) for pair in self.withheld]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Detector.load_state_dict`."""
        self.reset()
        self.seen, self.lowest, self.highest = int(state["seen"]), float(state["lowest"]), float(state["highest"])
        self.told = [str(kind) for kind in state["told"]]
        self.withheld.extend((int(step), int(sample)) for step, sample in state["withheld"])
