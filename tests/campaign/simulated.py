"""A training job in one process: data-parallel ranks in lockstep over the real pipeline, ledger and reduction.

Each rank has its own weights, Adam moments, detectors, policy and history; the all-reduce of gradients is a sum in rank
order, and the reduction `Reduction.together`. The model is a regression with samples from the run's seed. A kill drops
everything but files and checkpoints, a SIGTERM saves first; the job then goes on from the newest checkpoint that is not
suspect. A checkpoint holds rank 0's weights, and is suspect where another rank's differ: loaded by all, what rank 0 or
a gradient got wrong would be found by none.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect.config import Detect, Early, GradNormSpike
from megatron_stability.ledger import entries, fates
from megatron_stability.ledger.entries import FILE
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.observe.config import Replicas as Digests
from megatron_stability.observe.fingerprint import digest
from megatron_stability.observe.reduction import LocalSignals, Reduction, Sent, chained
from megatron_stability.observe.wide import Replicas, fold
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Decision, StepRecord

SIZE, OWN = 8, 2  # weights; samples of a rank and step
WARM_UP, SAVE_EVERY, DIGEST_EVERY = 15, 7, 5  # steps
GRADIENT = {"nan": float("nan"), "inf": float("inf"), "x50": 50.0, "x1000": 1000.0}  # element, or factor of all
LEVEL, KICK = 12.0, 30.0  # x the targets from a step on; what a divergence adds to every weight
PHASES = ("before the gate", "at the gate", "after the update", "in a ledger line")


class Fault(NamedTuple):
    """`kind` strikes in `step` (1-based) on `rank`: gradients, targets ("spike", "drift", "level"), or the update.

    Of the update "wrong" strikes one rank's, "divergence" all ranks' alike, until a rewind has gone back behind it.
    """

    kind: str
    step: int
    rank: int


class Stop(NamedTuple):
    """The job ends in `step`: "sigterm", or "kill" in one of `PHASES`."""

    kind: str
    step: int
    phase: str = ""


class Scenario(NamedTuple):
    """One run, drawn from its seed."""

    seed: int
    world: int
    steps: int
    faults: tuple[Fault, ...]
    stops: tuple[Stop, ...]


def draw(seed: int) -> Scenario:
    """World size, faults and stops in random order; skips stay within the default budgets."""
    rng = random.Random(seed)
    world, steps = rng.choice((2, 3, 4)), rng.randint(60, 90)
    kinds = [rng.choice((*GRADIENT, *GRADIENT, "spike", "drift", "wrong")) for _ in range(rng.randint(3, 7))]
    places = rng.sample(range(WARM_UP + 6, steps - DIGEST_EVERY), len(kinds))
    ranks = [rng.randrange(world) for _ in kinds]
    faults = [Fault(*fault) for fault in zip(kinds, places, ranks, strict=True)]
    stops = []
    for step in rng.sample(range(1, steps + 1), rng.randint(1, 4)):
        kill = rng.random() < 0.7
        stops.append(Stop("kill", step, rng.choice(PHASES)) if kill else Stop("sigterm", step))
    return Scenario(seed, world, steps, tuple(faults), tuple(stops))


class Data:
    """Sample i of a run: x_i [SIZE], y_i; equal for equal seeds."""

    def __init__(self, scenario: Scenario) -> None:
        draw = torch.Generator().manual_seed(scenario.seed)
        samples = scenario.steps * scenario.world * OWN
        self.x = torch.randn(samples, SIZE, generator=draw, dtype=torch.float64)
        noise = torch.randn(samples, generator=draw, dtype=torch.float64)
        self.y = self.x @ torch.randn(SIZE, generator=draw, dtype=torch.float64) + 2.0 * noise
        batch = scenario.world * OWN
        for fault in scenario.faults:
            first = (fault.step - 1) * batch
            if fault.kind == "spike":
                self.y[first : first + batch] *= 30.0
            elif fault.kind == "drift":
                self.y[first:] += 0.02 * torch.arange(samples - first) / batch
            elif fault.kind == "level":
                self.y[first:] *= LEVEL


@dataclass
class Weights:
    """Weights and Adam's moments."""

    w: torch.Tensor = field(default_factory=lambda: torch.zeros(SIZE, dtype=torch.float64))
    m: torch.Tensor = field(default_factory=lambda: torch.zeros(SIZE, dtype=torch.float64))
    v: torch.Tensor = field(default_factory=lambda: torch.zeros(SIZE, dtype=torch.float64))
    updates: int = 0

    def apply(self, grad: torch.Tensor) -> None:
        """Clip to norm 1, then Adam."""
        grad = grad / max(1.0, float(grad.norm()))
        self.updates += 1
        self.m = 0.9 * self.m + 0.1 * grad
        self.v = 0.95 * self.v + 0.05 * grad * grad
        m, v = self.m / (1 - 0.9**self.updates), self.v / (1 - 0.95**self.updates)
        self.w = self.w - 0.02 * m / (v.sqrt() + 1e-8)

    def copy(self) -> Weights:
        """With tensors of its own."""
        return Weights(self.w.clone(), self.m.clone(), self.v.clone(), self.updates)

    def equals(self, other: Weights) -> bool:
        """To the bit."""
        pairs = ((self.w, other.w), (self.m, other.m), (self.v, other.v))
        return self.updates == other.updates and all(a.equal(b) for a, b in pairs)


def gradients(data: Data, scenario: Scenario, step: int, w: Sequence[Weights]) -> tuple[list[Any], list[Any]]:
    """Each rank's loss sum and gradient of a step, faults in them."""
    losses, grads = [], []
    for rank in range(scenario.world):
        at = ((step - 1) * scenario.world + rank) * OWN
        x, y = data.x[at : at + OWN], data.y[at : at + OWN]
        error = x @ w[rank].w - y
        losses.append(0.5 * (error * error).sum())
        grad = x.T @ error / (scenario.world * OWN)
        for fault in scenario.faults:
            here = fault.rank == rank or fault.kind == "x50"  # of one rank's share, 50 times may be no more than usual
            if fault.step == step and here and fault.kind in GRADIENT:
                if fault.kind in ("nan", "inf"):
                    grad[step % SIZE] = GRADIENT[fault.kind]
                else:
                    grad = grad * GRADIENT[fault.kind]
        grads.append(grad)
    return losses, grads


def summed(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """In rank order."""
    total = torch.zeros(SIZE, dtype=torch.float64)
    for grad in grads:
        total = total + grad
    return total


class Rank:
    """What one rank holds."""

    def __init__(self, weights: Weights, state: str | None, rank: int, world: int, preset: str = "safe") -> None:
        decide = Decide.model_validate({"preset": preset})
        self.weights, self.history = weights.copy(), 0
        replicas = Replicas((tuple(range(world)),), rank)
        self.reduction = Reduction(None, torch.device("cpu"), {"clip_grad": "max", "weights": replicas})
        self.sinks: list[Any] = []
        detectors = build(Detect(grad_norm_spike=GradNormSpike(warmup_steps=WARM_UP)))
        self.pipeline: Pipeline[Sequence[Sent]] = Pipeline(
            observe=self.reduction.together,
            detectors=detectors,
            policy=TablePolicy(decide, "act"),
            sinks=self.sinks,
            episodes=Episodes(detectors, decide.quiet_steps),
        )
        if state is not None:
            self.pipeline.load_state_dict(json.loads(state))

    def state(self) -> str:
        """For a checkpoint."""
        return json.dumps(self.pipeline.state_dict(), allow_nan=False)


class Checkpoint(NamedTuple):
    """After `step`; the ledger was flushed at `ledger_size` bytes."""

    step: int
    weights: Weights
    state: str | None
    ledger_size: int


class Outcome(NamedTuple):
    """What one scenario came to; the first four should be empty, and `equal` true."""

    disagreements: list[str]
    hangs: list[str]
    samples: list[str]  # lost or repeated
    unexpected: list[str]  # faults not met as they should be, and skips without a fault
    equal: bool  # weights and moments to those of the run by hand
    skipped: int
    halts: int
    starts: int
    suspect: int  # checkpoints of replicas that had gone apart


class Job:
    """A scenario from its first start to its end."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder, self.data = scenario, folder, Data(scenario)
        self.rng = random.Random(scenario.seed + 1)
        self.stops = list(scenario.stops)
        self.wrong = {fault for fault in scenario.faults if fault.kind == "wrong"}
        self.checkpoints = [Checkpoint(0, Weights(), None, 0)]
        self.disagreements: list[str] = []
        self.hangs: list[str] = []
        self.unexpected: list[str] = []
        self.halts = self.starts = self.suspect = 0
        self.kicks = {fault.step for fault in scenario.faults if fault.kind == "divergence"}  # still to strike
        self.decided: tuple[StepRecord, Decision] | None = None  # of the last step that came to its gate

    def run(self) -> Outcome:
        """To the end, however often it stops."""
        while self.checkpoints[-1].step < self.scenario.steps:
            self.starts += 1
            if self.starts > 40:
                self.hangs.append("no end after 40 starts")
                break
            self._start()
        view = entries.read(self.folder)
        skipped = {step.step for step in view.surviving if step.fate == "skipped"}
        reference, left_out = self._by_hand()
        self._expect(skipped, left_out)
        found = [finding.message for finding in fates.audit(view)]
        if sum(fates.count(fates.fates(view)).values()) != self.scenario.steps * self.scenario.world * OWN:
            found.append("the fates do not add up to the samples of the run")
        return Outcome(
            self.disagreements,
            self.hangs,
            found,
            self.unexpected,
            self.checkpoints[-1].weights.equals(reference),
            len(skipped),
            self.halts,
            self.starts,
            self.suspect,
        )

    def _start(self) -> None:
        """From the newest checkpoint until the job stops."""
        last = self.checkpoints[-1]
        world = self.scenario.world
        ranks = [Rank(last.weights, last.state, number, world) for number in range(world)]
        info = RunInfo(mode="act", versions={}, layout={"data_parallel_size": world})
        batch = world * OWN
        with Ledger.open(self.folder, resume_step=last.step, resume_sample=last.step * batch, run_info=info) as ledger:
            ranks[0].sinks.append(ledger)
            for step in range(last.step + 1, self.scenario.steps + 1):
                stop = next((stop for stop in self.stops if stop.step == step), None)
                if self._step(step, ranks, stop):
                    break
                ended = step == self.scenario.steps or (stop is not None and stop.kind == "sigterm")
                if step % SAVE_EVERY == 0 or ended:
                    ledger.flush()
                    self._save(step, ranks)
                if stop is not None and stop.kind == "sigterm":
                    self.stops.remove(stop)
                    break
        if stop is not None and stop.kind == "kill" and stop in self.stops:
            self.stops.remove(stop)
            if stop.phase == "in a ledger line":
                self._tear()

    def _step(self, step: int, ranks: list[Rank], stop: Stop | None) -> bool:
        """One step on every rank; true where the job ended in it."""
        phase = stop.phase if stop is not None else ""
        losses, grads = gradients(self.data, self.scenario, step, [rank.weights for rank in ranks])
        total = summed(grads)
        if phase == "before the gate":
            return True
        sent = [
            self._sent(rank, step, loss, grad, total) for rank, loss, grad in zip(ranks, losses, grads, strict=True)
        ]
        decided = [rank.pipeline.decide(sent) for rank in ranks]
        self._compare(step, decided)
        if phase == "at the gate":
            return True
        record, decision = self.decided = decided[0]
        for number, rank in enumerate(ranks):
            if decision.updates_weights:
                rank.weights.apply(total)
                if self._is_wrong(step, number):
                    rank.weights.w[step % SIZE] += 1e-3
                if step in self.kicks:
                    rank.weights.w += KICK
            rank.history = chained(rank.history, record, decision)
        if phase == "after the update":
            return True
        for rank in ranks:
            rank.pipeline.finish(record, decision)
        if decision.action is Action.HALT:
            self._halted(step, decision)
            return True
        return phase == "in a ledger line"

    def _sent(self, rank: Rank, step: int, loss: Any, grad: torch.Tensor, total: torch.Tensor) -> Sent:
        extra: dict[str, Any] = {"clip_grad": 1.0}
        if Digests(weights_every=DIGEST_EVERY).weights_due(step, saves=step % SAVE_EVERY == 0):
            extra["weights"] = fold(digest([rank.weights.w]))
        batch = self.scenario.world * OWN
        return rank.reduction.sent(
            LocalSignals(
                step=step,
                first_sample=(step - 1) * batch,
                samples=batch,
                loss_sums_n2=torch.tensor([[float(loss), float(OWN)]]),
                grad_norm=total.norm(),
                grad_amax=grad.abs().amax(),
                history=rank.history,
                extra=extra,
            )
        )

    def _is_wrong(self, step: int, rank: int) -> bool:
        return any((fault.step, fault.rank) == (step, rank) for fault in self.wrong)

    def _compare(self, step: int, decided: list[tuple[StepRecord, Decision]]) -> None:
        if any(repr(other) != repr(decided[0]) for other in decided[1:]):
            self.disagreements.append(f"step {step}: {[decision for _, decision in decided]}")
        if len({decision.action is Action.HALT for _, decision in decided}) > 1:
            self.hangs.append(f"step {step}: some ranks leave")

    def _save(self, step: int, ranks: list[Rank]) -> None:
        states = {rank.state() for rank in ranks}
        if len(states) > 1:
            self.disagreements.append(f"after step {step}: {len(states)} states of detectors and policy")
        if any(not rank.weights.w.equal(ranks[0].weights.w) for rank in ranks):
            self.suspect += 1
            return
        size = (self.folder / FILE).stat().st_size
        self.checkpoints.append(Checkpoint(step, ranks[0].weights.copy(), states.pop(), size))

    def _halted(self, step: int, decision: Decision) -> None:
        """What is in the weights since the last digest is suspect; the rank that was named is replaced."""
        self.halts += 1
        self.checkpoints = [c for c in self.checkpoints if c.step <= step - DIGEST_EVERY]
        cause = [fault for fault in self.wrong if step - DIGEST_EVERY <= fault.step < step]
        outvoted = {str(fault.rank) for fault in cause} if self.scenario.world > 2 else {"0", "1"}
        named = decision.reason.partition("of rank")[2].partition("differ")[0].strip("s ").replace(",", "").split()
        if not cause or not outvoted <= set(named):
            self.unexpected.append(f"step {step}: halt names {named}, not {sorted(outvoted)}: {decision.reason}")
        self.wrong -= set(cause)

    def _tear(self) -> None:
        """Cut some bytes off the ledger's last line, if no checkpoint vouches for it."""
        path = self.folder / FILE
        data = path.read_bytes()
        begin = data.rstrip(b"\n").rfind(b"\n") + 1
        if begin >= self.checkpoints[-1].ledger_size:
            path.write_bytes(data[: self.rng.randint(begin, len(data))])

    def _by_hand(self) -> tuple[Weights, set[int]]:
        """The same faults and data, never stopped, no pipeline, no wrong rank: weights, and steps left out.

        Left out is what is not finite or above 10 times the mean of the norms so far; those above half of that, more
        loosely in early training, are not in the mean.
        """
        scenario, left_out, norms = self.scenario, set(), list[float]()
        weights = Weights()
        for step in range(1, scenario.steps + 1):
            total = summed(gradients(self.data, scenario, step, [weights] * scenario.world)[1])
            norm = float(total.norm())
            mean = max(statistics.fmean(norms), statistics.median(norms[-5:])) if len(norms) >= WARM_UP else math.inf
            if not math.isfinite(norm) or norm > 10.0 * mean:
                left_out.add(step)
                continue
            if norm <= min(10.0, 5.0 * Early().looseness(step)) * mean:
                norms.append(norm)
            weights.apply(total)
        return weights, left_out

    def _expect(self, skipped: set[int], left_out: set[int]) -> None:
        """Non-finite and huge gradients are skipped; nothing else is but a spike or what a drift has become."""
        at = {fault.step: fault.kind for fault in self.scenario.faults}
        for step in skipped ^ left_out:
            self.unexpected.append(f"step {step}: {at.get(step)} was {'skipped' if step in skipped else 'applied'}")
        for step, kind in at.items():
            if kind in GRADIENT and kind != "x50" and step not in left_out:  # 50 times a small norm need not be huge
                self.unexpected.append(f"step {step}: {kind} is no large gradient")
        for step in skipped - at.keys():
            self.unexpected.append(f"step {step} was skipped without a fault")
        if self.wrong:
            self.unexpected.append(f"never found: {sorted(self.wrong)}")
