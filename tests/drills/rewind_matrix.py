"""REWIND and window skip against the same by hand, to the bit, over layouts, optimizers and ways to run.

    python -m tests.drills.rewind_matrix --out tests/drills/rewind_matrix.json

Each case trains eleven steps, meets a NaN in the last, rewinds to step 8 in the running job, leaves steps 10 and 11 out
and goes on to step 12. Its checkpoint there is compared, entry by entry, with that of a fresh process which starts from
step 8 with `--iterations-to-skip 10 11`. One case kills the job after its rewind. Some of them are in CI:
`tests/e2e/incidents/test_rewind.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.results import PLUGIN, Results
from megatron_stability.records import Decision, StepRecord
from tests.dist.pool import Pool, RankDied
from tests.e2e import artifacts, jobs
from tests.e2e.incidents.test_resume_and_halt import Actions
from tests.e2e.incidents.test_rewind import OVERLAP, SAVES, assert_as_by_hand, faults, iterations, rules, run

MUON = ("--optimizer", "muon")
ASYNC = ("--async-save", "--async-strategy", "mcore")
# Ten steps of 2 samples, then 4; Megatron saves where it changes, so that step 8 is two checkpoints back from step 11.
RAMP = (
    *("--step-batch-size-schedule", "0:2 1280:4", "--micro-batch-size", "1", "--train-samples", "28"),  # in tokens
    *("--lr-decay-samples", "240", "--lr-warmup-iters", "0", "--lr-warmup-samples", "4"),
)
BACK: dict[str, Any] = {
    "dp2-batch-ramp": {"left_out": (11,), "generations_back": 2},
    "moe-dp2-snapshot": {"back_to": 9},
    "muon-tp2-pp2-snapshot": {"back_to": 9},
}
KILLED = "dp2-killed-after-the-rewind"
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


class KillAfterwards(Actions):
    """Probe: every rank is killed when a step is finished for the second time, so after a rewind."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def write(self, record: StepRecord, decision: Decision) -> None:
        again = any(row[0] == self._step for row in self.seen)
        super().write(record, decision)
        if again and record.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(pool: Pool, folder: Path) -> int:
    """A job that dies after a rewind, before its next save, ends as one that does not.

    Returns:
        The number of entries in the checkpoint, all equal.
    """
    flags = (*jobs.SHARDED, *iterations(12), *rules(2, factor=0.5, steps=4), *faults(11))
    run(pool, flags, 2, folder / "lives")
    where = ("--save", str(folder / "dies"), "--stability-record-dir", str(folder / "dies" / "stability"))
    mortal = (*SAVES, *where, "--stability-mode", "act", *flags)
    try:
        pool.run(jobs.train, mortal, KillAfterwards(9), world=2, timeout=300)
    except RankDied:
        pass
    else:
        raise AssertionError("the job was not killed")
    seen = run(pool, (*flags, "--load", str(folder / "dies")), 2, folder / "dies")
    assert seen == [(9, "apply"), (10, "skip"), (11, "skip"), (12, "apply")], seen
    lives, dies = (jobs.read_checkpoint(pool, folder / name, 12) for name in ("lives", "dies"))
    assert artifacts.differences(lives, dies) == []
    return len(lives)


def _run(pool: Pool, name: str, folder: Path) -> int:
    if name == KILLED:
        return killed(pool, folder)
    flags, world = CASES[name]
    flags = flags if "--train-samples" in flags else (*flags, *iterations(12))
    return len(assert_as_by_hand(pool, flags, world, folder, **BACK.get(name, {})))


def main() -> int:
    """Every case on one release, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*CASES, KILLED], help="one of them; default: all")
    parser.add_argument("--release", choices=("0.19.2", "0.18.2"), default="0.19.2")
    parser.add_argument("--out", type=Path, default=Path("tests/drills/rewind_matrix.json"))
    options = parser.parse_args()
    results = Results(options.out, (*PLUGIN, "tests/e2e", "tests/drills/rewind_matrix.py"))
    pool = Pool(jobs.patched if options.release == "0.19.2" else jobs.older_patched)
    try:
        for name in options.case or [*CASES, KILLED]:
            if "equal_entries" in results.rows.get(f"{options.release} {name}", {}):
                continue
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    equal = _run(pool, name, Path(folder))
                    result: dict[str, Any] = {"equal_entries": equal}
                except Exception:  # the drill's finding; the other cases go on
                    result = {"failed": traceback.format_exc()[-2000:]}
            result["seconds"] = round(time.monotonic() - began)
            results.put(f"{options.release} {name}", result)
            print(options.release, name, result, flush=True)
    finally:
        pool.close()
    return 1 if any("failed" in result for result in results.rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
