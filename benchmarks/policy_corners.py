"""What each preset does to runs at the corners: levels that change, spikes that heal, divergences, odd input.

    python -m benchmarks.policy_corners [--runs 4] [--seed 100] [--out benchmarks/data/policy_corners.json]

Every corner is a curve by sample, with noise from a seed, that answers to what the policy does: what a fault did is
undone by a rewind to before it, a divergence then stays away (its window is left out and the rate is lower), and what
belongs to the data or the schedule comes back at its place. The real pipeline decides; its state goes through JSON at
every save, and a run that halts is started again from its last save, once. Thresholds were chosen on seeds below 100.

The learning rate's share counts steps with a lower one. `acted` counts divergences on which a rewind, halt or skip
followed in time: the clock starts when the loss is 1 nat above its clean twin's (where it is not finite: at once), and
allows 2 steps where it is not finite, 20 with a norm above 5 times, 250 by loss only. `wasted` are the steps that were
undone or withheld, as a share.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.peers import Rule, olmo_core, sigmas, ten_times_max, zclip
from benchmarks.results import PURE
from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, StepRecord

SAVE_EVERY, LENGTH = 250, 4000
PRESETS = ("safe", "field")


class Shape(NamedTuple):
    """What a corner does at a step, `since` steps after its onset: nats added, factor on the norm."""

    nats: float = 0.0
    norm: float = 1.0


Effect = Callable[[int, int], Shape]


@dataclass(frozen=True)
class Corner:
    """One corner: `right` is what should come of it.

    Attributes:
        effect: by steps since the onset and the run's seed.
        onset: first step.
        heals: whether a rewind to before the onset keeps it away: a divergence, not a property of the data.
        limit: steps from the clock's start within which it must be acted on; None: nothing needs to be done.
        announced: as `detect.expect` has it.
        batch: samples of a step.
        grows: whether that changes.
        scale: factor on what is logged as the loss, and on the norm.
        sigma: nats of loss noise.
        start: step at which a run without state begins.
    """

    right: str
    effect: Effect = lambda since, seed: Shape()
    onset: int = 2000
    heals: bool = False
    limit: int | None = None
    announced: str = ""
    batch: Callable[[int], int] = lambda step: 256
    grows: bool = False
    scale: float = 1.0
    sigma: float = 0.02
    start: int = 1
    steps: int = LENGTH


def ramp(nats: float, climb: int, norm: float = 1.0, later: float = 1.0) -> Effect:
    """A rise that stays, with a norm at first and one later."""
    return lambda since, seed: Shape(nats * min(since + 1, climb) / climb, norm if since < 40 else later)


def heal(height: float, tail: float, norm: float) -> Effect:
    """A spike that comes back by itself."""
    climb = 3
    return lambda since, seed: Shape(
        height * ((since + 1) / climb if since < climb else math.exp(-(since - climb + 1) / tail)),
        1.0 + (norm - 1.0) * math.exp(-since / 5),
    )


def once(nats: float, norm: float) -> Effect:
    """One step."""
    return lambda since, seed: Shape(nats, norm) if since == 0 else Shape()


def easy(since: int, seed: int) -> Shape:
    """300 steps of easy data."""
    return Shape(-0.4, 0.08) if since < 300 else Shape()


def extension(since: int, seed: int) -> Shape:
    """Longer context: +3 nats that heal in hundreds of steps, and one large norm."""
    return Shape(3.0 * math.exp(-since / 400), 15.0 if since == 0 else 1.0 + 2.0 * math.exp(-since / 50))


def zero_init(rate: float) -> Effect:
    """A norm that grows by a rate a step, from e**-9.2 of its later level; the onset is the first step."""
    return lambda since, seed: Shape(0.0, math.exp(min(since * math.log1p(rate) - 9.2, 0.0)))


def hard(since: int, seed: int) -> Shape:
    """Every twentieth batch has a gradient of fifty times."""
    return Shape(0.3, 50.0) if since % 20 == 0 and since < 400 else Shape()


SPACING = 200


def spikes(since: int, seed: int) -> Shape:
    """Every SPACING steps a spike of its own height, tail and norm, which heals."""
    rng = random.Random(1000 * seed + since // SPACING)
    height, tail = math.exp(rng.uniform(math.log(0.3), math.log(4.0))), rng.uniform(3.0, 40.0)
    return heal(height, tail, rng.uniform(1.5, 15.0))(since % SPACING, seed)


def diverges(amplified: bool) -> Effect:
    """A rise of its own height and pace in each run, which stays."""

    def effect(since: int, seed: int) -> Shape:
        rng = random.Random(seed)
        nats, norm = rng.uniform(1.5, 6.0), rng.uniform(5.5, 30.0)
        climb = math.exp(rng.uniform(0.0, math.log(60.0 if amplified else 300.0)))
        first, later = (norm, rng.uniform(1.0, 3.0)) if amplified else (rng.uniform(0.8, 2.0), 1.0)
        return ramp(nats, round(climb), first, later)(since, seed)

    return effect


CORNERS: dict[str, Corner] = {
    "healthy": Corner("nothing"),
    "healthy, small batches": Corner("nothing", sigma=0.1),
    "loss is a sum over 1024 tokens": Corner("nothing is done", scale=1024.0),
    "batch ramp": Corner("nothing", batch=lambda step: 64 + 32 * min(step // 200, 12), grows=True),
    "norm x12 for good": Corner("a level, no halt", ramp(0.0, 1, 12.0, 12.0)),
    "zero-init growth, 12 %": Corner("no halt", zero_init(0.12), onset=1),
    "zero-init growth, 20 %": Corner("no halt", zero_init(0.20), onset=1),
    "context extension, announced": Corner("nothing", extension, announced="2000:sequence_length"),
    "context extension, unannounced": Corner("one rewind at most", extension),
    "stage change, +1.5 nats, norm x3": Corner("one rewind at most", ramp(1.5, 1, 3.0, 3.0)),
    "easy stretch and back": Corner("one rewind at most, no halt", easy),
    "lone spike, +3 nats": Corner("applied or skipped", once(3.0, 1.5)),
    "spike that heals in 30 steps": Corner("no rewind", heal(2.0, 10.0, 8.0)),
    "spike that heals in 100 steps": Corner("no rewind", heal(1.5, 30.0, 8.0)),
    "random spikes that heal, 17 a run": Corner("2 % rewind at most", spikes, onset=600),
    "every 20th batch x50": Corner("skips only", hard),
    "+3 nats in 40 steps, norm x6 then x2": Corner("rewind", ramp(3.0, 40, 6.0, 2.0), heals=True, limit=20),
    "+3 nats at once, norm x20": Corner("rewind", ramp(3.0, 1, 20.0, 20.0), heals=True, limit=20),
    "+2 nats in 200 steps, by loss only": Corner("rewind", ramp(2.0, 200), heals=True, limit=250),
    "+5 nats in 10 steps, by loss only": Corner("rewind", ramp(5.0, 10), heals=True, limit=250),
    "random divergences, norm above 5x": Corner("rewind", diverges(True), heals=True, limit=20),
    "random divergences, by loss only": Corner("rewind", diverges(False), heals=True, limit=250),
    "+3 nats at step 120 of the fall": Corner("rewind", ramp(3.0, 20, 6.0, 2.0), onset=120, heals=True, limit=20),
    "NaN from one step on": Corner("skip, then rewind or halt", ramp(math.nan, 1), heals=True, limit=2),
    "resume without state, +2 nats at its 10th step": Corner("told", ramp(2.0, 1), onset=3009, start=3000, steps=5000),
}


@dataclass
class Outcome:
    """What became of one run."""

    steps: int = 0
    skips: int = 0
    rewinds: int = 0
    halts: int = 0
    lowered: int = 0  # steps with a lower learning rate
    wasted: int = 0
    told: bool = False  # a verdict within 20 steps of the onset
    clock: int | None = None
    acted: int | None = None  # steps from the clock to the first action
    stuck: bool = False  # halted again where it had halted
    actions: list[str] = field(default_factory=list)


class Run:
    """One corner under one preset."""

    def __init__(self, corner: Corner, preset: str, seed: int) -> None:
        self.corner, self.seed = corner, seed
        self.detect = Detect.model_validate({"expect": corner.announced} if corner.announced else {})
        self.decide = Decide(preset=preset)
        self.step, self.cured, self.lower_until = corner.start, False, 0
        self.skipped: set[int] = set()
        self.pipeline = self._begin()
        self.saved = [(self.step, json.dumps(self.pipeline.state_dict(), allow_nan=False))]
        self.out = Outcome()

    def _begin(self) -> Pipeline[StepRecord]:
        detectors = build(self.detect)
        policy = TablePolicy(self.decide, "act")
        return Pipeline(lambda record: record, detectors, policy, (), Episodes(detectors, self.decide.quiet_steps))

    def record(self, step: int) -> StepRecord:
        """The step's record; its noise follows from step and seed."""
        corner, rng = self.corner, random.Random(self.seed * 1_000_003 + step)
        heavy = rng.gauss(0, 1) / math.sqrt(rng.gammavariate(5, 2) / 10)
        loss = 1.9 + 9.0 * (step + 2) ** -0.4 + corner.sigma * (1.0 + 4.0 * math.exp(-step / 200)) * heavy
        norm = (0.25 + 6.0 * (step + 2) ** -0.6) * math.exp(rng.gauss(0, 0.15))
        if step >= corner.onset and not (self.cured and corner.heals):
            shape = corner.effect(step - corner.onset, self.seed)
            loss, norm = loss + shape.nats, norm * shape.norm
        batch = corner.batch(step)
        bad = not math.isfinite(loss)
        return StepRecord(
            step=step,
            first_sample=sum(corner.batch(at) for at in range(1, step)) if corner.grows else batch * (step - 1),
            samples=batch,
            tokens=batch * 4096.0,
            loss=math.nan if bad else loss * corner.scale,
            grad_norm=math.nan if bad else norm * corner.scale,
            nonfinite_losses=int(bad),
            nonfinite_grads=int(bad),
            learning_rate=3e-4 * min(step / 500, 1.0),
        )

    def run(self) -> Outcome:
        """To the end, through rewinds and one new start after a halt."""
        out, halted_at = self.out, None
        while self.step <= self.corner.steps and out.steps < 3 * self.corner.steps:
            if self.step in self.skipped:
                self.step += 1
                continue
            record = self.record(self.step)
            self.watch(record)
            _, decision = self.pipeline.decide(record)
            out.told = out.told or (bool(decision.verdicts) and 0 <= self.step - self.corner.onset <= 20)
            self._count(decision.action, decision.parameters)
            self.pipeline.finish(record, decision)
            if decision.action is Action.REWIND:
                self._rewind(int(decision.parameters["generations"]), int(decision.parameters["skip_steps"]))
                continue
            if decision.action is Action.HALT:
                out.stuck = halted_at is not None and abs(self.step - halted_at) < 60
                if halted_at is not None:
                    break
                halted_at = self.step
                self.step, state = self.saved[-1]
                self.pipeline = self._begin()
                self.pipeline.load_state_dict(json.loads(state))
                continue
            self.step += 1
            if self.step % SAVE_EVERY == 0:
                self.saved.append((self.step, json.dumps(self.pipeline.state_dict(), allow_nan=False)))
        return out

    def watch(self, record: StepRecord) -> None:
        """Start the clock."""
        corner, out = self.corner, self.out
        if out.clock is not None or corner.limit is None or self.step < corner.onset:
            return
        if not record.finite or corner.effect(self.step - corner.onset, self.seed).nats >= 1.0:
            out.clock = self.step

    def _count(self, action: Action, parameters: Mapping[str, float]) -> None:
        out = self.out
        out.steps += 1
        out.lowered += self.step < self.lower_until
        out.skips += action is Action.SKIP
        out.wasted += action is Action.SKIP
        out.rewinds += action is Action.REWIND
        out.halts += action is Action.HALT
        if action in (Action.SCALE_LR, Action.REWIND) and "factor" in parameters:
            self.lower_until = self.step + int(parameters["steps"])
        acts = action in (Action.REWIND, Action.HALT) or (action is Action.SKIP and self.corner.limit == 2)
        if acts and out.acted is None and self.step >= self.corner.onset:
            out.acted = max(self.step - out.clock, 0) if out.clock is not None else 0
        if action is not Action.APPLY:
            out.actions.append(f"{self.step} {action}")

    def _rewind(self, generations: int, skip_steps: int) -> None:
        """Back to a save before the window, whose policy stays as it is."""
        window = range(self.step - skip_steps + 1, self.step + 1)
        older = [save for save in self.saved if save[0] <= window[0]] or self.saved[:1]
        older = older[: max(len(older) - generations + 1, 1)]
        step, state = older[-1]
        self.out.wasted += self.step - step
        self.saved, self.skipped = older, self.skipped | set(window)
        self.cured = self.cured or step <= self.corner.onset
        live = self.pipeline.policy.state_dict()
        self.pipeline.load_state_dict(json.loads(state) | {"policy": live})
        if self.lower_until:
            self.lower_until = step + 500
        self.step = step


def row(name: str, preset: str, runs: int, seed: int) -> dict[str, Any]:
    """The sums over the seeds of a corner under a preset."""
    corner = CORNERS[name]
    outs = [Run(corner, preset, seed + i).run() for i in range(runs)]
    steps = sum(out.steps for out in outs)
    found: dict[str, Any] = {
        "right": corner.right,
        "runs": runs,
        "steps": steps,
        **{key: sum(getattr(out, key) for out in outs) for key in ("skips", "rewinds", "halts", "stuck", "told")},
        "lowered %": round(100 * sum(out.lowered for out in outs) / steps, 2),
        "wasted %": round(100 * sum(out.wasted for out in outs) / steps, 2),
    }
    if corner.limit is not None:
        delays = [out.acted for out in outs]
        found["acted"] = sum(delay is not None and delay <= (corner.limit or 0) for delay in delays)
        found["delays"] = delays
    return found


PEERS: dict[str, Callable[[], Rule]] = {
    "mu + 6 sigma": partial(sigmas, 6.0),
    "OLMo-core": olmo_core,
    "ZClip": zclip,
    "Megatron": ten_times_max,
}


def peer(name: str, rule: str, runs: int, seed: int) -> dict[str, Any]:
    """What a rule of others does on a corner's curves: steps on which it acts, and those where it does so in time.

    They have one action, to withhold or clip the step (stock Megatron: to ask for a replay), and nothing that undoes a
    divergence: each curve goes on as it is.
    """
    corner, flagged, steps, acted = CORNERS[name], 0, 0, 0
    for number in range(seed, seed + runs):
        curve, acts = Run(corner, "watch", number), PEERS[rule]()
        records = [curve.record(step) for step in range(corner.start, corner.steps + 1)]
        alerts = [record.step for record in records if acts(record)]
        flagged, steps = flagged + len(alerts), steps + len(records)
        for record in records:
            curve.step = record.step
            curve.watch(record)
        clock = curve.out.clock
        acted += clock is not None and any(corner.onset <= at <= clock + (corner.limit or 0) for at in alerts)
    return {"acted on": flagged, "%": round(100 * flagged / steps, 2), "in time": acted if corner.limit else None}


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4, help="runs of each corner and preset")
    parser.add_argument("--seed", type=int, default=100, help="of the first run; tune on others than the table's")
    parser.add_argument("--only", default="", help="corners whose name holds this")
    parser.add_argument("--out", type=Path, help="write the table here, as JSON")
    args = parser.parse_args()
    of = results.stamp((*PURE, "benchmarks/policy_corners.py", "benchmarks/peers.py"))
    table: dict[str, Any] = {}
    print(f"{'':50}{'':8}{'skips':>6}{'rewinds':>8}{'halts':>6}{'stuck':>6}{'told':>5}{'lower %':>8}  acted")
    for name in CORNERS:
        for preset in PRESETS if args.only in name else ():
            found = table.setdefault(name, {})[preset] = row(name, preset, args.runs, args.seed)
            acted = f"{found['acted']} of {found['runs']}, {found['delays']}" if "acted" in found else ""
            cells = f"{found['skips']:6}{found['rewinds']:8}{found['halts']:6}{found['stuck']:6}{found['told']:5}"
            print(f"{name:50}{preset:8}{cells}{found['lowered %']:8}  {acted}", flush=True)
    for name in table:
        table[name]["peers"] = {rule: peer(name, rule, args.runs, args.seed) for rule in PEERS}
        cells = [f"{each['acted on']:6} {each['in time'] or ''!s:3}" for each in table[name]["peers"].values()]
        print(f"{name:50}" + "".join(cells), flush=True)
    if args.out:
        results.write(args.out, {"seed": args.seed, "corners": table}, of)


if __name__ == "__main__":
    main()
