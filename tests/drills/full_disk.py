"""A disk that fills up between two saves of a real run: training goes on, and what was saved before stays usable.

    python -m tests.drills.full_disk        # as root: mounts a small tmpfs in a mount namespace of its own

The run saves at steps 3, 6 and 9. After step 4 a ballast file takes all but `LEFT` bytes of the file system, and goes
after step 7. The tests do the same without root: after step 4 no rank, nor its checkpoint worker, may write a file
beyond `LEFT` bytes (RLIMIT_FSIZE), which fails the same writes with EFBIG.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from megatron_stability.act import fates
from megatron_stability.record import generations, ledger
from megatron_stability.records import Decision, StepRecord
from tests.dist.pool import Pool
from tests.drills.resume_runs import ASYNC
from tests.e2e import jobs

LEFT = 40_000  # bytes; enough for ledger lines, too few for a shard
SIZE = "64m"  # of the tmpfs
FULL_AFTER, FREE_AFTER = 4, 7
FLAGS = (*jobs.SHARDED, "--train-iters", "9", "--save-interval", "3", "--stability-mode", "act")
Limit = Literal["file size", "ballast"]


class FullDisk:
    """Probe: fills the disk after one step and frees it after another."""

    def __init__(self, folder: str, limit: Limit) -> None:
        self.seen: list[Any] = []
        self._folder, self._limit = Path(folder), limit

    def begin(self, runtime: Any) -> None:
        if self._limit == "file size":  # which would hit a log as well
            for descriptor in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    def write(self, record: StepRecord, decision: Decision) -> None:
        full = {FULL_AFTER: True, FREE_AFTER: False}.get(record.step)
        if full is None:
            return
        if self._limit == "file size":
            _limit_file_size(LEFT if full else resource.RLIM_INFINITY)
        elif os.environ["RANK"] == "0":
            _ballast(self._folder / "ballast", full)


def _limit_file_size(size: int) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    worker = PersistentAsyncCaller._persistent_process
    for pid in [0] if worker is None else [0, worker.pid]:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _ballast(file: Path, full: bool) -> None:
    if not full:
        file.unlink()
        return
    state = os.statvfs(file.parent)
    file.write_bytes(bytes(state.f_bavail * state.f_frsize - LEFT))


def run(pool: Pool, folder: Path, limit: Limit, how: tuple[str, ...] = ()) -> dict[str, Any]:
    """The run, and what it left.

    Args:
        pool: patched ranks.
        folder: on the file system that fills up.
        limit: how it fills up.
        how: more flags.

    Returns:
        Exit codes, the state of each generation by step, the tracker, and what the ledger says of the samples.
    """
    save = folder / "run"
    flags = (*FLAGS, *how, "--save", str(save))
    answers = pool.run(jobs.train, flags, FullDisk(str(folder), limit), world=2, timeout=200)
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
    "generations": {9: "complete", 3: "complete"},
    "tracker": 9,
    "steps": list(range(1, 10)),
    "saves": [3, 6, 9],
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
                result = run(pool, Path(folder) / name, "ballast", how)
                right = right and result == GOES_ON
                print(name, result, flush=True)
        finally:
            pool.close()
            subprocess.run(["umount", folder], check=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
