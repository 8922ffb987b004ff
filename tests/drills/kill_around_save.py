"""kill -9 of every rank at random moments around saves of a real run, which then resumes, again and again.

    python -m tests.drills.kill_around_save --kills 50 --out tests/drills/kill_around_save.json

One chain of runs shares a folder: each resumes, saves every step, and is killed at a random moment after a save began.
The last one goes on to its end. Then: each resumed from the newest whole generation, no sample is lost or repeated on
the surviving trajectory, the ledger agrees, and the end equals that of a run that was never killed, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stability.act import fates
from megatron_stability.record import compare_checkpoints, generations, ledger
from tests.dist import small_gpt
from tests.dist.conftest import patched_megatron_on_cpu
from tests.dist.pool import Context, Pool, RankDied

ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
RUN = (
    *("--train-iters", "1000", "--ckpt-format", "torch_dist", "--save-interval", "1", "--global-batch-size", "4"),
    *("--use-distributed-optimizer", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    *("--stability-checkpoint-allow-fresh-start", "true"),
)
WINDOW_S = 0.5  # a kill comes so long, at most, after a save began: during it, at its marker, or steps later


def train(context: Context, folder: str, kill: tuple[int, float] | None, flags: Sequence[str]) -> None:
    """One run of the chain; `kill`: all ranks die `kill[1]` seconds after the `kill[0]`-th save began."""
    import torch.distributed as dist

    from megatron_stability.megatron import seams

    if kill is not None:
        pids: list[Any] = [None] * context.world
        dist.all_gather_object(pids, os.getpid())
        if context.rank == 0 and os.fork() == 0:
            _kill_later(Path(folder), pids, *kill)
    try:
        small_gpt.train(context, *RUN, "--save", folder, "--load", folder, *flags)
    finally:
        seams.uninstall()


def _kill_later(folder: Path, pids: list[int], saves: int, delay_s: float) -> None:
    """In a child of rank 0."""
    known, deadline = {path.name for path in folder.glob("iter_*")}, time.monotonic() + 300
    while len({path.name for path in folder.glob("iter_*")} - known) < saves and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay_s)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def chain(pool: Pool, folder: Path, kills: int, seed: int, how: Sequence[str] = (), world: int = 2) -> dict[str, Any]:
    """Kill and resume `kills` times, go on to an end, and judge.

    Returns:
        Each death with what it left and where the next run resumed, and the end's verdicts.
    """
    chosen, deaths = random.Random(seed), []
    for number in range(kills):
        kill = (chosen.choice((1, 1, 2)), chosen.uniform(0, WINDOW_S))
        try:
            pool.run(train, str(folder), kill, tuple(how), world=world, timeout=400)
        except RankDied:
            deaths.append(_left_behind(folder, kill))
        else:
            raise AssertionError(f"run {number} was not killed")
        print(f"{number + 1}/{kills} {deaths[-1]}", file=sys.stderr, flush=True)
    resumed_from = generations.newest_good(folder)
    end = (resumed_from.step if resumed_from is not None else 0) + 2
    last = ("--exit-interval", str(end), "--save-interval", "1000")
    pool.run(train, str(folder), None, (*how, *last), world=world, timeout=400)
    straight = folder.with_name(folder.name + "-straight")
    pool.run(train, str(straight), None, last, world=world, timeout=900)
    view = ledger.read(folder / "stability")
    resumes = [run.resumed_step for run in view.runs]
    for death, step in zip(deaths, resumes[1:], strict=True):
        death["resumed_from"] = step
    last_folders = [generations.folder_of(root, end) for root in (folder, straight)]
    said, equal = compare_checkpoints.compare(*last_folders, bitwise=True)
    return {
        "kills": kills,
        "from_newest_whole": all(death["newest_whole"] == death["resumed_from"] for death in deaths),
        "newest_was": dict(Counter(death["newest_was"] for death in deaths)),
        "audit": [finding.message for finding in fates.audit(view)],
        "steps_in_order": [step.step for step in view.surviving] == list(range(1, end + 1)),
        "end": end,
        "end_equals_uninterrupted": equal,
        "compared": said,
        "deaths": deaths,
    }


def _left_behind(folder: Path, kill: tuple[int, float]) -> dict[str, Any]:
    found = generations.generations(folder, full=True)
    good = next((each for each in found if each.state == "complete"), None)
    bad = [str(each) for each in found if each.state not in ("complete", "incomplete")]
    assert not bad, bad
    return {
        "saves": kill[0],
        "after_s": round(kill[1], 4),
        "newest_was": found[0].state if found else "none",
        "newest_whole": good.step if good is not None else 0,
        "tracker": generations.read_tracker(folder),
    }


def passed(result: dict[str, Any]) -> bool:
    """Whether a chain's result is as it must be."""
    right = result["from_newest_whole"] and result["steps_in_order"] and result["end_equals_uninterrupted"]
    return bool(right and not result["audit"])


def main() -> int:
    """Two chains, of synchronous and asynchronous saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("tests/drills/kill_around_save.json"))
    options = parser.parse_args()
    pool, results = Pool(patched_megatron_on_cpu), {}
    try:
        for name, how in (("sync", ()), ("async", ASYNC)):
            with tempfile.TemporaryDirectory() as folder:
                results[name] = chain(pool, Path(folder) / name, (options.kills + 1) // 2, options.seed, how)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        pool.close()
    for name, result in results.items():
        print(name, {key: value for key, value in result.items() if key != "deaths"})
    return 0 if all(passed(result) for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
