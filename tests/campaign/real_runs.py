"""Megatron's own runs in the fault campaign: faults, then a kill, a SIGTERM or a wrong rank, then the resume.

Each layout has one list of faults and one run that is never interrupted. Interrupted ones must decide as it did in
every step, account for every sample once, and end with its checkpoint to the bit: weights, moments, generators.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stability.errors import EXIT_HALTED
from megatron_stability.ledger import entries, fates
from megatron_stability.records import Decision, StepRecord
from tests.dist.pool import Pool, RankDied, RankTimeout
from tests.e2e import artifacts, jobs

STEPS, SAVE_EVERY, WARM_UP, BATCH = 20, 5, 4, 8


class Layout(NamedTuple):
    """Flags, world size, ranks with a loss, and one data-parallel replica's rank that may compute wrong, if any."""

    flags: tuple[str, ...]
    world: int
    losses: tuple[int, ...]
    wrong: int | None


LAYOUTS = {
    "dp2-sharded": Layout(jobs.SHARDED, 2, (0, 1), 1),
    "tp2": Layout(jobs.TP2, 2, (0, 1), None),
    "pp2": Layout(jobs.PP2, 2, (1,), None),
    "vpp2": Layout(jobs.VPP2, 2, (1,), None),
    "tp2-dp2-sharded": Layout((*jobs.TP2, *jobs.SHARDED), 4, (0, 1, 2, 3), 2),
    "pp2-dp2-sharded": Layout((*jobs.PP2, *jobs.SHARDED), 4, (2, 3), 1),
    "tp2-pp2": Layout((*jobs.TP2, *jobs.PP2), 4, (2, 3), None),
    "dp4": Layout((), 4, (0, 1, 2, 3), 3),
}


class Watch:
    """Probe: (step, action, reason) of each step; ends or interrupts its process in one of them."""

    def __init__(self, kind: str = "", step: int = 0, rank: int = 0) -> None:
        self.seen: list[tuple[int, str, str]] = []
        self._kind, self._step, self._rank = kind, step, rank

    def begin(self, runtime: Any) -> None:
        """Remember the rank."""
        self._here = runtime.rank

    def write(self, record: StepRecord, decision: Decision) -> None:
        """After the step's decision was carried out, before its line is in the ledger or right after it."""
        self.seen.append((record.step, str(decision.action), decision.reason))
        if (record.step, self._here) == (self._step, self._rank) and self._kind in ("kill", "sigterm"):
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGTERM)


def faults(layout: Layout, rng: random.Random) -> dict[int, str]:
    """Four of them at random steps after the warm-up."""
    steps = rng.sample(range(WARM_UP + 2, STEPS), 4)
    kinds = [rng.choice(("nan", "inf", "nan-loss", "x50", "x1000")) for _ in steps]
    found = {}
    for step, kind in zip(steps, kinds, strict=True):
        if kind.startswith("x"):
            found[step] = f"scale:step={step},factor={kind[1:]}"
        else:
            rank = rng.choice(layout.losses) if kind == "nan-loss" else rng.randrange(layout.world)
            found[step] = f"{kind}:step={step},rank={rank}"
    return found


def train(pool: Pool, name: str, out: Path, struck: dict[int, str], watch: Watch, *more: str) -> list[Any]:
    """One launch: (exit code, what its probe saw) of each rank."""
    layout = LAYOUTS[name]
    flags = (
        *(*layout.flags, "--train-iters", str(STEPS), "--global-batch-size", str(BATCH), "--exit-signal-handler"),
        *("--save", str(out), "--save-interval", str(SAVE_EVERY), "--stability-record-dir", str(out / "stability")),
        *("--stability-detect-grad-norm-spike-warmup-steps", str(WARM_UP)),
        *(word for fault in struck.values() for word in ("--drill-fault", fault)),
    )
    results: list[Any] = pool.run(jobs.train, (*flags, *more), watch, world=layout.world, timeout=240)
    return results


def _alike(results: Sequence[Any]) -> list[str]:
    return [] if len({repr(answer) for answer in results}) == 1 else [f"ranks disagree: {results}"]


def interrupted(pool: Pool, name: str, out: Path, struck: dict[int, str], kind: str, rng: random.Random) -> list[str]:
    """Interrupt a run and resume it: what did not hold before its end."""
    layout, step = LAYOUTS[name], rng.randint(2, STEPS - 1)
    problems: list[str] = []
    if kind == "wrong":
        # not a step whose own fault, in one rank's gradients, the fixed micro-batch would meet as well
        step = rng.choice([step for step in range(2, STEPS) if all(other % step for other in struck)])
        fault = struck | {step: f"wrong:step={step},rank={layout.wrong},param=2,factor=1.01"}
        results = train(pool, name, out, fault, Watch(), "--stability-observe-replicas-compute-every", str(step))
        named = str(layout.wrong) in results[0][1][-1][2]
        if [code for code, _ in results] != [EXIT_HALTED] * layout.world or not named:
            problems.append(f"wrong at step {step}: {[(code, seen[-1]) for code, seen in results]}")
        problems += _alike(results)
    else:
        try:
            results = train(pool, name, out, struck, Watch(kind, step, rng.randrange(layout.world)))
            problems += _alike(results)
            if kind == "kill":
                problems.append(f"the kill at step {step} did not end the run")
        except RankDied:
            if kind != "kill":
                raise
    saved = (out / "latest_checkpointed_iteration.txt").is_file()
    results = train(pool, name, out, struck, Watch(), *(("--load", str(out)) if saved else ()))
    return problems + _alike(results) + [f"exit code {code}" for code, _ in results if code]


def judge(pool: Pool, out: Path, struck: dict[int, str], reference: dict[str, Any]) -> dict[str, list[str]]:
    """What does not hold of a finished run."""
    view = entries.read(out / "stability")
    skipped = {step.step for step in view.surviving if step.fate == "skipped"}
    samples = [finding.message for finding in fates.audit(view)]
    if fates.count(fates.fates(view))["trained"] != (STEPS - len(struck)) * BATCH:
        samples.append(f"trained samples: {fates.count(fates.fates(view))}")
    differ = artifacts.differences(jobs.read_checkpoint(pool, out, STEPS), reference) if reference else []
    return {
        "skips": [] if skipped == set(struck) else [f"skipped {sorted(skipped)}, faults in {sorted(struck)}"],
        "samples": samples,
        "state": differ,
    }


def run(runs: int, first_seed: int = 1) -> dict[str, Any]:
    """Interrupted runs over the layouts in turn; the totals."""
    total: Counter[str] = Counter()
    bad: dict[str, Any] = {}
    pool = Pool(jobs.patched)
    try:
        for number, name in enumerate(LAYOUTS):
            layout, rng = LAYOUTS[name], random.Random(first_seed + number)
            struck = faults(layout, rng)
            kinds = ["kill", "sigterm", "kill" if layout.wrong is None else "wrong"]
            with tempfile.TemporaryDirectory() as folder:
                whole = Path(folder) / "whole"
                train(pool, name, whole, struck, Watch())
                found = {"whole": judge(pool, whole, struck, {})}
                reference = jobs.read_checkpoint(pool, whole, STEPS)
                for at, kind in enumerate(kinds[: max(0, runs - 3 * number)]):
                    out = Path(folder) / f"{at}-{kind}"
                    try:
                        problems = interrupted(pool, name, out, struck, kind, rng)
                        found[out.name] = judge(pool, out, struck, reference) | {"decisions": problems}
                    except RankTimeout as hang:
                        found[out.name] = {"hang": [str(hang)]}
                    total[f"interruptions: {kind}"] += 1
                    total["runs"] += 1
            total.update(f"faults: {fault.partition(':')[0]}" for fault in struck.values())
            total["steps"] += STEPS * (1 + len(found))
            for key, parts in found.items():
                for what, problems in parts.items():
                    if problems:
                        bad[f"{name} {key} {what}"] = problems[:5]
            print(f"{name}: {sorted(struck.values())}, {kinds}; so far {len(bad)} bad", flush=True)
    finally:
        pool.close()
    return {"first_seed": first_seed, **dict(sorted(total.items())), "bad": bad}
