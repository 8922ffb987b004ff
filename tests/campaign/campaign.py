"""The fault campaign: many runs with many faults in random order, and what must hold of each.

    python -m tests.campaign.campaign --simulated 300 --presets 100 --out tests/campaign/campaign.json
    python -m tests.campaign.campaign --real 24 --out tests/campaign/campaign_real.json

Zero disagreements between ranks, zero hangs, zero lost or repeated samples; every non-finite or huge gradient is
skipped and nothing healthy is; a rank that went apart is named, and its weights are in no checkpoint that is resumed
from; and the weights at the end are, to the bit, those of a run that was never stopped and leaves out by itself what
must be. `simulated.py` is the simulated loop; `presets.py` the same under `safe` and `field` with divergences, level
changes and rewinds; `real_runs.py` are Megatron's own on gloo ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import PLUGIN, PURE
from tests.campaign import presets, simulated


def simulate(runs: int, first_seed: int = 1) -> dict[str, Any]:
    """The totals of simulated runs, and the seeds of those where something did not hold."""
    total: Counter[str] = Counter()
    bad: dict[str, Any] = {}
    for seed in range(first_seed, first_seed + runs):
        scenario = simulated.draw(seed)
        with tempfile.TemporaryDirectory() as folder:
            outcome = simulated.Job(scenario, Path(folder)).run()
        total.update(f"faults: {fault.kind}" for fault in scenario.faults)
        total.update(f"stops: {stop.kind}" for stop in scenario.stops)
        total.update(
            {
                "runs": 1,
                "steps": scenario.steps,
                "disagreements": len(outcome.disagreements),
                "hangs": len(outcome.hangs),
                "lost or repeated samples": len(outcome.samples),
                "faults not met as expected": len(outcome.unexpected),
                "weights other than by hand": int(not outcome.equal),
                "skipped steps": outcome.skipped,
                "halts": outcome.halts,
                "starts": outcome.starts,
                "checkpoints of wrong ranks, suspect": outcome.suspect,
            }
        )
        if outcome[:4] != ([], [], [], []) or not outcome.equal:
            bad[str(seed)] = outcome._asdict()
    return {"seeds": [first_seed, first_seed + runs - 1], **dict(sorted(total.items())), "bad": bad}


def under(preset: str, runs: int, first_seed: int = 1) -> dict[str, Any]:
    """As `simulate`, of runs that may go back."""
    total: Counter[str] = Counter()
    bad: dict[str, Any] = {}
    for seed in range(first_seed, first_seed + runs):
        scenario = presets.draw(seed)
        with tempfile.TemporaryDirectory() as folder:
            job = presets.PresetJob(scenario, Path(folder), preset)
            outcome = job.run()
        total.update(f"faults: {fault.kind}" for fault in scenario.faults)
        total.update(f"stops: {stop.kind}" for stop in scenario.stops)
        total.update(
            {
                "runs": 1,
                "steps": scenario.steps,
                "disagreements": len(outcome.disagreements),
                "hangs": len(outcome.hangs),
                "lost or repeated samples": len(outcome.samples),
                "faults not met as expected": len(outcome.unexpected),
                "weights other than by the ledger's fates": int(not outcome.equal),
                "rewinds": job.rewinds,
                "divergences in the checkpoint that was gone back to": len(job.saved),
                "steps not trained": outcome.skipped,
                "halts": outcome.halts,
                "starts": outcome.starts,
            }
        )
        if outcome[:4] != ([], [], [], []) or not outcome.equal:
            bad[str(seed)] = outcome._asdict()
    return {"seeds": [first_seed, first_seed + runs - 1], **dict(sorted(total.items())), "bad": bad}


def main() -> int:
    """Run, print and write; 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, default=0, help="simulated runs")
    parser.add_argument("--presets", type=int, default=0, help="simulated runs under `safe`, and as many under `field`")
    parser.add_argument("--real", type=int, default=0, help="real runs, a few minutes for each dozen")
    parser.add_argument("--out", type=Path, help="write the totals here")
    args = parser.parse_args()
    of = results.stamp((*(PLUGIN if args.real else PURE), "tests/campaign"))
    totals: dict[str, Any] = {}
    if args.simulated:
        totals["simulated"] = simulate(args.simulated)
    for preset in ("safe", "field") if args.presets else ():
        totals[preset] = under(preset, args.presets)
    if args.real:
        from tests.campaign import real_runs

        totals["real"] = real_runs.run(args.real)
    print(json.dumps(totals, indent=1))
    if args.out:
        results.write(args.out, totals, of)
    return int(any(part["bad"] for part in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
