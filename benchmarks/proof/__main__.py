"""Run the experiments and write results and page.

    python -m benchmarks.proof --quick             3 seeds, the short sweeps; what the nightly checks run
    python -m benchmarks.proof --full              5 seeds, all values and arms; hours, and goes on where it was

Runs are forked from one process that has imported Megatron. Each is on disk as soon as it ends, with the digest of the
code that it is of (`benchmarks/results.py`); exit code 1 where a direction that is claimed does not hold.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.proof import page
from benchmarks.proof.experiments import EXPERIMENTS, TAIL, Rows
from benchmarks.proof.training import train
from benchmarks.results import PLUGIN, ROOT, Results
from megatron_stability.ledger import entries
from megatron_stability.ledger.entries import LedgerView
from megatron_stability.megatron.start import quickstart
from megatron_stability.megatron.start.prepare_data import prepare
from tests.dist.pool import Pool
from tests.e2e import jobs

OUT = ROOT / "benchmarks/data/proof.json"
EXCESS, LASTS = 0.1, 20  # nats above the control of the same seed, for so many steps: a loss that has departed


def figures(view: LedgerView) -> dict[str, Any]:
    """What a run's ledger says of it; None for what was not measured or is not finite."""
    steps = [step for step in view.surviving if step.computed]
    losses = [step.loss for step in steps]
    tail = losses[-TAIL:]
    spoke = [v.step for step in steps for v in step.verdicts if v.detector.startswith("fp8_") and v.tier != "watch"]
    logits = [step.signals["attention/max_logit"] for step in steps if "attention/max_logit" in step.signals]
    last = steps[-1].signals
    held = [step.signals["held_out/validation"] for step in steps if "held_out/validation" in step.signals]
    log_z = abs(last["log_z/sum"] / last["log_z/weight"]) if last.get("log_z/weight") else None
    return {
        "first_loss": losses[0],
        "final_loss": _finite(sum(tail) / len(tail)),
        "max_logit": _finite(max(logits, default=None)),
        "log_z": log_z,
        "held_out": _finite(held[-1] if held else None),
        "withheld": sum(step.fate != "trained" for step in view.surviving),
        "first_fp8_verdict": spoke[0] if spoke else None,
        "losses": [round(loss, 4) if math.isfinite(loss) else None for loss in losses],
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def departs(losses: list[float | None], control: list[float | None]) -> int | None:
    """The first step from which a run lies `EXCESS` nats above its twin for `LASTS` steps, by medians of five."""
    excess = [math.inf if a is None else a - (b or 0.0) for a, b in zip(losses, control, strict=False)]
    smooth = [median(excess[max(0, at - 4) : at + 1]) for at in range(len(excess))]
    for at in range(len(smooth) - LASTS):
        if min(smooth[at : at + LASTS]) > EXCESS:
            return at + 1
    return None


def with_departures(rows: Rows) -> Rows:
    """Rows with the step at which each departed from the experiment's first arm."""
    first = rows[0]["arm"] if rows else ""
    twins = {(row["value"], row["seed"]): row["losses"] for row in rows if row["arm"] == first}
    return [row | {"departs": departs(row["losses"], twins.get((row["value"], row["seed"]), []))} for row in rows]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--quick", action="store_true")
    how.add_argument("--full", action="store_true")
    parser.add_argument("--only", choices=list(EXPERIMENTS), action="append")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    results = Results(options.out, (*PLUGIN, "benchmarks/proof"))
    seeds = 5 if options.full else 3
    pool = Pool(jobs.patched)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            data = prepare([sysconfig.get_paths()["stdlib"]], Path(scratch) / "text", quickstart.text_options())
            common = (*data.training_flags, "--data-cache-path", f"{scratch}/cache")
            for name in options.only or EXPERIMENTS:
                _run(name, options.full, seeds, pool, results, common, Path(scratch))
    finally:
        pool.close()
    found = {name: with_departures(rows_of(results, name)) for name in EXPERIMENTS if rows_of(results, name)}
    claims = {name: EXPERIMENTS[name].claims(rows) for name, rows in found.items()}
    results.put("claims", {name: [list(claim) for claim in each] for name, each in claims.items()})
    page.write(found, claims, options.out)
    broken = [claim.says for each in claims.values() for claim in each if not claim.holds]
    print("\n".join(f"does not hold: {says}" for says in broken) or "every direction holds")
    return int(bool(broken))


def rows_of(results: Results, name: str) -> Rows:
    """The runs of an experiment that are known."""
    return [row for key, row in results.rows.items() if key.startswith(f"{name} | ")]


def _run(
    name: str, full: bool, seeds: int, pool: Pool, results: Results, common: tuple[str, ...], scratch: Path
) -> None:
    todo = list(EXPERIMENTS[name].runs(full, seeds))
    for number, (arm, value, seed, flags) in enumerate(todo, 1):
        key = f"{name} | {arm} | {value} | {seed}"
        if key in results.rows:
            continue
        began, folder = time.monotonic(), scratch / f"{name}-{number}"
        (code,) = pool.run(train, (*common, *flags, "--stability-record-dir", str(folder)), world=1, timeout=600)
        known = {"arm": arm, "value": value, "seed": seed, "code": code}
        results.put(key, known | figures(entries.read(folder)))
        print(f"{name} {number}/{len(todo)} {arm} {value} seed {seed}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
