"""The simulated job under a preset that goes back: divergences, level changes and drift besides the other faults.

What holds under `safe` alone (which step is withheld follows from its norm) is not asked here. Asked are: ranks that
agree, an end, one fate for every sample, gradients that are not finite or a thousandfold never in a weight, a
divergence undone by `field` and told by `safe`, and weights that are, to the bit, those of the steps that the ledger
says were trained, applied by hand in their order. A lower learning rate is decided, but not simulated.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from megatron_stability.act.pass_over import PassOver
from megatron_stability.ledger import entries, fates
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.records import PASSED_OVER, Action, Decision, StepRecord
from tests.campaign.simulated import (
    GRADIENT,
    KICK,
    OWN,
    PHASES,
    SAVE_EVERY,
    Fault,
    Job,
    Outcome,
    Rank,
    Scenario,
    Stop,
    Weights,
    gradients,
    summed,
)

KINDS = (*GRADIENT, "spike", "drift", "wrong", "divergence", "level")
LATELY = 40  # steps within which a divergence is found
NEVER = ("nan", "inf", "x1000")  # gradients that may be in no weight


def draw(seed: int) -> Scenario:
    """As `simulated.draw`, longer; one divergence or one level at most, so that the rewinds suffice."""
    rng = random.Random(seed)
    world, steps = rng.choice((2, 3, 4)), rng.randint(130, 170)
    kinds: list[str] = []
    for kind in (rng.choice(KINDS) for _ in range(rng.randint(3, 6))):
        once = ("divergence", "level") if kind in ("divergence", "level") else (kind,) * (kind == "wrong")
        if not set(once) & {*kinds}:
            kinds.append(kind)
    places = sorted(rng.sample(range(40, steps - 35, 10), len(kinds)))  # one is over before the next begins
    faults = [Fault(kind, at, rng.randrange(world)) for kind, at in zip(kinds, places, strict=True)]
    stops = []
    for step in rng.sample(range(1, steps + 1), rng.randint(1, 4)):
        kill = rng.random() < 0.7
        stops.append(Stop("kill", step, rng.choice(PHASES)) if kill else Stop("sigterm", step))
    return Scenario(seed, world, steps, tuple(faults), tuple(stops))


class PresetJob(Job):
    """A scenario under a preset."""

    def __init__(self, scenario: Scenario, folder: Path, preset: str) -> None:
        super().__init__(scenario, folder)
        self.preset, self.pass_over = preset, PassOver()
        self.rewinds = 0
        self.struck: set[int] = set()  # steps whose last pass ended with a kick
        self.reached: set[int] = set()  # steps at which a rank went apart
        self.saved: set[int] = set()  # divergences that a rewind found in the checkpoint it went back to

    def run(self) -> Outcome:
        """To the end, however often it stops or goes back."""
        while self.checkpoints[-1].step < self.scenario.steps:
            self.starts += 1
            if self.starts > 40 or self.rewinds > 20:
                self.hangs.append(f"no end after {self.starts} starts and {self.rewinds} rewinds")
                break
            self._start()
        view = entries.read(self.folder)
        numbers = [step.step for step in view.surviving]
        found = [finding.message for finding in fates.audit(view)]
        if numbers != list(range(1, self.scenario.steps + 1)):
            found.append(f"steps of the surviving trajectory: {numbers}")
        if sum(fates.count(fates.fates(view)).values()) != self.scenario.steps * self.scenario.world * OWN:
            found.append("the fates do not add up to the samples of the run")
        trained = {step.step for step in view.surviving if step.fate == "trained"}
        self._judge(trained, view)
        return Outcome(
            self.disagreements,
            self.hangs,
            found,
            self.unexpected,
            self.checkpoints[-1].weights.equals(self._by_fates(trained)),
            self.scenario.steps - len(trained),
            self.halts,
            self.starts,
            self.suspect,
        )

    def _judge(self, trained: set[int], view: entries.LedgerView) -> None:
        detectors = {episode.detector for episode in view.episodes}
        for fault in self.scenario.faults:
            if fault.kind in NEVER and fault.step in trained:
                self.unexpected.append(f"step {fault.step}: {fault.kind} was applied")
            if fault.kind != "divergence" or fault.step not in self.struck & trained or fault.step in self.saved:
                continue
            if self.preset == "field":
                self.unexpected.append(f"step {fault.step}: the divergence was not undone")
            if not detectors & {"loss_divergence", "level_change"}:
                self.unexpected.append(f"step {fault.step}: the divergence was not told")
        if self.wrong and {fault.step for fault in self.wrong} & self.reached:
            self.unexpected.append(f"never found: {sorted(self.wrong)}")

    def _by_fates(self, trained: set[int]) -> Weights:
        weights, world = Weights(), self.scenario.world
        for step in sorted(trained):
            weights.apply(summed(gradients(self.data, self.scenario, step, [weights] * world)[1]))
            if step in self.struck:
                weights.w += KICK
        return weights

    def _start(self) -> None:
        last, world = self.checkpoints[-1], self.scenario.world
        ranks = [Rank(last.weights, last.state, number, world, self.preset) for number in range(world)]
        info = RunInfo(mode="act", versions={}, layout={"data_parallel_size": world})
        batch = world * OWN
        stop: Stop | None = None
        with Ledger.open(self.folder, resume_step=last.step, resume_sample=last.step * batch, run_info=info) as ledger:
            ranks[0].sinks.append(ledger)
            step = last.step + 1
            while step <= self.scenario.steps:
                stop = next((stop for stop in self.stops if stop.step == step), None)
                self.back: int | None = None
                if self._passes_over(step, ledger):
                    if stop is not None:  # what has no gate is ended after it
                        break
                elif self._step(step, ranks, stop):
                    break
                if self.back is not None:
                    ledger.rewind(self.back, self.back * batch, f"a rewind from step {step}")
                    step = self.back + 1
                    continue
                ended = step == self.scenario.steps or (stop is not None and stop.kind == "sigterm")
                if step % SAVE_EVERY == 0 or ended:
                    ledger.flush()
                    self._save(step, ranks)
                if stop is not None and stop.kind == "sigterm":
                    break
                step += 1
        if stop is not None and stop in self.stops:
            self.stops.remove(stop)
            if stop.phase == "in a ledger line":
                self._tear()

    def _passes_over(self, step: int, ledger: Ledger) -> bool:
        batch = self.scenario.world * OWN
        first = (step - 1) * batch
        reason = self.pass_over.reason(step, first, first + batch)
        if reason is None:
            return False
        record = StepRecord(step=step, first_sample=first, samples=batch, tokens=0.0, loss=math.nan, grad_norm=math.nan)
        skip, parameters = Action.SKIP, {PASSED_OVER: 1.0}
        ledger.write(record, Decision(step=step, action=skip, advised=skip, reason=reason, parameters=parameters))
        self.struck.discard(step)
        return True

    def _step(self, step: int, ranks: list[Rank], stop: Stop | None) -> bool:
        self.struck.discard(step)
        self.decided = None
        ended = super()._step(step, ranks, stop)
        if self.decided is None:
            return ended
        decision = self.decided[1]
        if decision.updates_weights and (stop is None or stop.phase != "at the gate"):
            self.struck |= {step} & self.kicks
            self.reached |= {fault.step for fault in self.wrong if fault.step == step}
        if not ended and decision.action is Action.REWIND:
            self._rewind(step, decision, ranks)
        return ended

    def _rewind(self, step: int, decision: Decision, ranks: list[Rank]) -> None:
        """Every rank loads the same older checkpoint, its policy goes on; what is newer than that is no more."""
        self.rewinds += 1
        batch = self.scenario.world * OWN
        first = max(0, (step - int(decision.parameters["skip_steps"])) * batch)
        self.pass_over.add(first, step * batch, f"window of rewind {decision.parameters['attempt']:g}")
        older = [each for each in self.checkpoints if each.step * batch <= first] or self.checkpoints[:1]
        target = older[max(len(older) - int(decision.parameters["generations"]), 0)]
        self.checkpoints = [each for each in self.checkpoints if each.step < target.step]
        self.saved |= {kick for kick in self.kicks if step - LATELY < kick <= target.step}
        self.kicks = {kick for kick in self.kicks if kick <= target.step or kick > step}
        states = set()
        for rank in ranks:
            live = rank.pipeline.policy.state_dict()
            fresh = Rank(target.weights, target.state, 0, self.scenario.world, self.preset)
            if target.state is None:
                rank.pipeline.load_state_dict(fresh.pipeline.state_dict() | {"policy": live})
            else:
                rank.pipeline.load_state_dict(json.loads(target.state) | {"policy": live})
            rank.weights = fresh.weights
            states.add(rank.state())
        if len(states) > 1:
            self.disagreements.append(f"after the rewind at step {step}: {len(states)} states")
        # a start after a kill finds the policy as it was at the rewind, beside the checkpoint
        self.checkpoints.append(target._replace(state=states.pop()))
        self.back = target.step
