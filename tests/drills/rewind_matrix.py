"""REWIND and window skip against the same by hand, to the bit, over layouts, optimizers and ways to run.

    python -m tests.drills.rewind_matrix --out tests/drills/rewind_matrix.json

Each case trains eleven steps, meets a NaN in the last, rewinds to step 8 in the running job, leaves steps 10 and 11 out
and goes on to step 12. Its checkpoint there is compared, entry by entry, with that of a fresh process which starts from
step 8 with `--iterations-to-skip 10 11`. See `tests/e2e/test_rewind.py`, which has two of the cases in CI.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.dist.pool import Pool
from tests.e2e import jobs
from tests.e2e.test_rewind import OVERLAP, assert_as_by_hand, iterations

MUON = ("--optimizer", "muon")
ASYNC = ("--async-save", "--async-strategy", "mcore")
# Ten steps of 2 samples, then 4; Megatron saves where it changes, so that step 8 is two checkpoints back from step 11.
RAMP = (
    *("--rampup-batch-size", "2", "2", "20", "--micro-batch-size", "1", "--train-samples", "28"),
    *("--lr-decay-samples", "240", "--lr-warmup-iters", "0", "--lr-warmup-samples", "4"),
)
BACK: dict[str, Any] = {
    "dp2-batch-ramp": {"left_out": (11,), "generations_back": 2},
    "moe-dp2-snapshot": {"back_to": 9},
    "muon-tp2-pp2-snapshot": {"back_to": 9},
}
SNAPSHOT = ("--stability-decide-snapshot-steps", "9")
CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "tp2-pp2": ((*jobs.TP2, *jobs.PP2), 4),
    "dp2-distributed-optimizer": (jobs.SHARDED, 2),
    "dp2-distributed-optimizer-overlap": (OVERLAP, 2),
    "vpp2": (jobs.VPP2, 2),
    "pp4": (("--pipeline-model-parallel-size", "4", "--num-layers", "4"), 4),
    "muon-dp2": (MUON, 2),
    "muon-tp2-pp2": ((*MUON, *jobs.TP2, *jobs.PP2), 4),
    "moe-dp2-distributed-optimizer": ((*jobs.MOE, *jobs.SHARDED), 2),
    "dp2-data-loader-workers": ((*jobs.SHARDED, "--num-workers", "2"), 2),
    "dp2-cyclic": ((*jobs.SHARDED, "--dataloader-type", "cyclic"), 2),
    "pp2-async-save": ((*jobs.PP2, *ASYNC), 2),
    "pp2-rerun-disabled": ((*jobs.PP2, "--rerun-mode", "disabled"), 2),
    "tp2-fp8-emulated": ((*jobs.TP2, "--stability-fp8-emulate", "delayed"), 2),
    "moe-dp2-snapshot": ((*jobs.MOE, *jobs.SHARDED, *SNAPSHOT), 2),
    "muon-tp2-pp2-snapshot": ((*MUON, *jobs.TP2, *jobs.PP2, *SNAPSHOT), 4),
    "dp2-batch-ramp": ((*jobs.SHARDED, *RAMP), 2),
}


def main() -> int:
    """Every case on one release, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="may be given more than once; default: all")
    parser.add_argument("--release", choices=("0.19.2", "0.18.2"), default="0.19.2")
    parser.add_argument("--out", type=Path, default=Path("tests/drills/rewind_matrix.json"))
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    pool = Pool(jobs.patched if options.release == "0.19.2" else jobs.older_patched)
    try:
        for name in options.case or CASES:
            flags, world = CASES[name]
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    flags = flags if "--train-samples" in flags else (*flags, *iterations(12))
                    equal = len(assert_as_by_hand(pool, flags, world, Path(folder), **BACK.get(name, {})))
                    result: dict[str, Any] = {"equal_entries": equal}
                except Exception as error:  # the drill's finding; the other cases go on
                    result = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            result["seconds"] = round(time.monotonic() - began)
            results[f"{options.release} {name}"] = result
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(options.release, name, result, flush=True)
    finally:
        pool.close()
    return 1 if any("failed" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
