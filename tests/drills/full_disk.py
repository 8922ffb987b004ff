"""A disk that fills up between two saves of a real run: training goes on, and what was saved before stays usable.

    python -m tests.drills.full_disk        # as root: mounts a small tmpfs in a mount namespace of its own

The run saves at steps 6, 12 and 18. After step 10 a ballast file takes all but `LEFT` bytes of the file system, and
goes after step 16. Python 3.12.0 and 3.12.1 crash in step 18's save (CPython gh-111049): use a later one. The tests do
without a mount: where one rank's shard of step 12 should be there is a folder, so that its writer fails as it does on
a full disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_stability.checkpoints import generations
from megatron_stability.ledger import fates, ledger
from megatron_stability.records import Decision, StepRecord
from tests.dist.pool import Pool
from tests.drills.resume_runs import ASYNC
from tests.e2e import jobs

LEFT = 40_000  # bytes; enough for ledger lines, too few for a shard
SIZE = "64m"  # of the tmpfs
FULL_AFTER, FREE_AFTER = 10, 16
FLAGS = (*jobs.SHARDED, "--train-iters", "18", "--save-interval", "6", "--stability-mode", "act")


class FullDisk:
    """Probe: on rank 0, fills the folder's disk after one step and frees it after another."""

    def __init__(self, folder: str) -> None:
        self.seen: list[Any] = []
        self._folder = Path(folder)

    def begin(self, runtime: Any) -> None:
        pass

    def write(self, record: StepRecord, decision: Decision) -> None:
        full = {FULL_AFTER: True, FREE_AFTER: False}.get(record.step)
        if FULL_AFTER - 4 < record.step <= FULL_AFTER:
            time.sleep(0.5)  # an asynchronous save is finalized between steps
        if full is not None and os.environ["RANK"] == "0":
            _ballast(self._folder / "ballast", full)


def _ballast(file: Path, full: bool) -> None:
    if not full:
        file.unlink()
        return
    state = os.statvfs(file.parent)
    file.write_bytes(bytes(state.f_bavail * state.f_frsize - LEFT))


def run(pool: Pool, folder: Path, how: tuple[str, ...] = (), *, fill: bool = False) -> dict[str, Any]:
    """The run, and what it left.

    Args:
        pool: patched ranks.
        folder: empty.
        how: more flags.
        fill: fill the folder's file system, which is small; else one shard can't be written.

    Returns:
        Exit codes, the state of each generation by step, the tracker, and what the ledger says of the samples.
    """
    save = folder / "run"
    flags = (*FLAGS, *how, "--save", str(save))
    if not fill:
        (generations.folder_of(save, 12) / "__1_0.distcp").mkdir(parents=True)
    answers = pool.run(jobs.train, flags, FullDisk(str(folder)) if fill else None, world=2, timeout=200)
    view = ledger.read(save / "stability")
    return {
        "codes": [code for code, _ in answers],
        "generations": {each.step: each.state for each in generations.generations(save, full=True)},
        "tracker": generations.read_tracker(save),
        "steps": [step.step for step in view.surviving],
        "saves": [entry.step for entry in view.entries if isinstance(entry, ledger.SaveEntry)],
        "audit": [finding.message for finding in fates.audit(view)],
    }


GOES_ON = {
    "codes": [0, 0],
    "generations": {18: "complete", 6: "complete"},
    "tracker": 18,
    "steps": list(range(1, 19)),
    "saves": [6, 12, 18],
    "audit": [],
}


def main() -> int:
    """Both kinds of save on a tmpfs of `SIZE`."""
    os.unshare(os.CLONE_NEWNS)
    pool, right = Pool(jobs.patched), True
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", folder], check=True)
        try:
            for name, how in (("sync", ()), ("async", ASYNC)):
                (Path(folder) / name).mkdir()
                result = run(pool, Path(folder) / name, how, fill=True)
                right = right and result == GOES_ON
                print(name, result, flush=True)
        finally:
            pool.close()
            subprocess.run(["umount", folder], check=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
