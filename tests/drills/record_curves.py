"""Curves of real runs with faults put in on purpose, for `benchmarks/detection_quality.py`.

    python -m tests.drills.record_curves --out benchmarks/data/recorded.json

A small GPT learns Python source, observed only, so that every fault is applied. "blip" and "spike": targets are random
for one step, or for eight; "gradient": one step's gradient is too large (clipping takes most of it); "slow burn": one
weight's gradient has the wrong sign, and thrice its size, for 120 steps.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.results import PLUGIN
from megatron_stability.data.prepare import Options
from megatron_stability.ledger import entries
from megatron_stability.megatron.start.prepare_data import prepare
from tests.dist.pool import Pool
from tests.e2e import jobs

STEPS = 1500
FAULTS = (  # kind, first step, last step, drill
    ("blip", 250, 250, "noise:step={step}"),
    ("gradient", 370, 370, "scale:step={step},factor=6"),
    ("spike", 490, 497, "noise:step={step}"),
    ("gradient", 630, 630, "scale:step={step},factor=40"),
    ("blip", 750, 750, "noise:step={step}"),
    ("slow burn", 880, 999, "wrong:step={step},param=4,factor=-3"),
    ("spike", 1180, 1187, "noise:step={step}"),
    ("gradient", 1330, 1330, "scale:step={step},factor=12"),
)


def record(pool: Pool, data: Path, out: Path, seed: int) -> dict[str, object]:
    """One run's curve and labels."""
    drills = [d.format(step=step) for _, first, last, d in FAULTS for step in range(first, last + 1)]
    flags = (
        *("--train-data-path", str(data), "--vocab-size", "257", "--seed", str(seed), "--train-iters", str(STEPS)),
        *("--lr", "2e-3", "--lr-warmup-iters", "50", "--global-batch-size", "4", "--micro-batch-size", "4"),
        *("--stability-mode", "observe", "--stability-record-dir", str(out), "--log-interval", "500"),
        *(word for drill in drills for word in ("--drill-fault", drill)),
    )
    ((code, _),) = pool.run(jobs.train, flags, world=1, timeout=900)
    assert code == 0, f"the run ended with {code}"
    steps = entries.read(out).steps
    return {
        "seed": seed,
        "loss": [round(step.loss, 4) for step in steps],
        "grad_norm": [float(f"{step.grad_norm:.4g}") for step in steps],
        "learning_rate": [float(f"{step.learning_rate:.4g}") for step in steps],
        "faults": [[kind, first, last] for kind, first, last, _ in FAULTS],
    }


def main() -> None:
    """Record, one curve a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    of = results.stamp((*PLUGIN, "tests/drills/record_curves.py"))
    library, pool = Path(sysconfig.get_paths()["stdlib"]), Pool(jobs.patched)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sources = [library / name for name in ("asyncio", "email", "json")]
            prepare(sources, folder / "data", Options(patterns=("*.py",)))
            curves = [record(pool, folder / "data", folder / str(seed), seed) for seed in args.seeds]
    finally:
        pool.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results.write(args.out, {"steps": STEPS, "curves": curves}, of)


if __name__ == "__main__":
    main()
