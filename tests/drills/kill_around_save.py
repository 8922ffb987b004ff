"""Death of every rank at random moments around saves of a real run, and what can be resumed from.

    python -m tests.drills.kill_around_save --kills 30 --seed 1

Kills: one chain for synchronous saves and one for asynchronous ones, saving at every step. Every rank's process group
(the rank, its checkpoint worker, its fork server) gets SIGKILL at a random moment: up to `WINDOW_S` after a save began,
or up to `SOON_S` after a file of a save came into being. Then the run is started again. Each resume must be from the
newest whole checkpoint; at the end the ledger must account for every sample once, and the last checkpoint must equal
that of a run that was never killed, to the bit.

Moments: the processes of one run are stopped (SIGSTOP) again and again, its folder is copied, and they go on; each copy
is judged as what a killed run would have left. Cheaper than a kill, and only as good as that likeness.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.results import PLUGIN, Results
from megatron_stability.checkpoints import compare, generations
from megatron_stability.checkpoints.manifest import MANIFEST, MARKER, file_names
from megatron_stability.ledger import fates, ledger
from tests.dist import small_gpt
from tests.dist.conftest import patched_megatron_on_cpu
from tests.dist.pool import Context, Pool, RankDied

ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
HOW: dict[str, tuple[str, ...]] = {"sync": (), "async": ASYNC}
RUN = (
    *("--train-iters", "1000", "--ckpt-format", "torch_dist", "--save-interval", "1", "--global-batch-size", "4"),
    *("--use-distributed-optimizer", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    *("--stability-checkpoint-allow-fresh-start", "true", "--stability-checkpoint-keep", "4"),
)
WINDOW_S = 0.5  # a kill comes so long, at most, after a save began: during it, at its marker, or steps later
SOON_S = 0.01  # or so long after one of these came into being
EVENTS = ("iter_*/*.distcp", "iter_*/.metadata", f"iter_*/{MANIFEST}", f"iter_*/{MARKER}")
SMALL = ("--num-layers", "1", "--seq-length", "16", "--ffn-hidden-size", "32")

Harm = Callable[[Path, list[int]], None]  # in a child of rank 0, with every rank's process id


def train(context: Context, folder: str, harm: Harm | None, flags: Sequence[str]) -> None:
    """One run; `harm` works beside it."""
    import torch.distributed as dist

    from megatron_stability.megatron.access import handle

    pids: list[Any] = [None] * context.world
    dist.all_gather_object(pids, os.getpid())
    if harm is not None and context.rank == 0 and os.fork() == 0:
        os.setpgid(0, 0)
        harm(Path(folder), pids)
        os._exit(0)
    try:
        small_gpt.train(context, *SMALL, *RUN, "--save", folder, "--load", folder, *flags)
    except SystemExit as end:  # --exit-interval
        if end.code:
            raise RuntimeError(f"exit code {end.code}") from None
    finally:
        handle.uninstall()


def _wait_for(folder: Path, pattern: str, number: int) -> None:
    """Until `number` more files or folders that fit have come into being."""
    known, deadline = set(folder.glob(pattern)), time.monotonic() + 300
    while len(set(folder.glob(pattern)) - known) < number and time.monotonic() < deadline:
        time.sleep(0.001)


def kill(pattern: str, number: int, delay_s: float, folder: Path, pids: list[int]) -> None:
    """Every rank dies, with all that it started, `delay_s` after the `number`-th new `pattern`."""
    _wait_for(folder, pattern, number)
    time.sleep(delay_s)
    for pid in pids:
        os.killpg(pid, signal.SIGKILL)


def moment(chosen: random.Random) -> tuple[str, int, float]:
    """What a kill waits for, how many of it, and how long then."""
    if chosen.random() < 0.5:
        return "iter_*", chosen.choice((1, 1, 2)), chosen.uniform(0, WINDOW_S)
    return chosen.choice(EVENTS), chosen.choice((1, 1, 2)), chosen.uniform(0, SOON_S)


def stop_and_copy(copies: str, number: int, seed: int, folder: Path, pids: list[int]) -> None:
    """`number` times, after a save began: stop every process of every rank, copy the folder, let them go on."""
    chosen = random.Random(seed)
    for each in range(number):
        _wait_for(folder, "iter_*", 1)
        time.sleep(chosen.uniform(0, WINDOW_S))
        for pid in pids:
            os.killpg(pid, signal.SIGSTOP)
        time.sleep(0.01)
        shutil.copytree(folder, Path(copies) / f"{each:03d}")
        for pid in pids:
            os.killpg(pid, signal.SIGCONT)


def moments(
    pool: Pool, folder: Path, number: int, seed: int, how: Sequence[str] = (), world: int = 2
) -> dict[str, Any]:
    """One run, stopped and copied at `number` moments; each copy judged."""
    copies = folder.with_name(folder.name + "-copies")
    copies.mkdir()
    harm = partial(stop_and_copy, str(copies), number, seed)
    pool.run(train, str(folder), harm, (*how, "--exit-interval", str(number + 20)), world=2, timeout=1500)
    judged = [_judge(copy) for copy in sorted(copies.iterdir())]
    return {
        "moments": len(judged),
        "newest_was": dict(Counter(each["newest_was"] for each in judged)),
        "bad": [each for each in judged if each["findings"]],
        "each": judged,
    }


def _judge(copy: Path) -> dict[str, Any]:
    """As a resume would: choose, open the ledger there, and account for every sample up to it."""
    left = _left_behind(copy)
    good = generations.newest_good(copy)
    step, samples = (good.step, good.manifest.samples) if good is not None and good.manifest is not None else (0, 0)
    info = ledger.RunInfo(mode="act", versions={}, layout={})
    ledger.Ledger.open(copy / "stability", resume_step=step, resume_sample=samples, run_info=info).close()
    view = ledger.read(copy / "stability")
    findings = [finding.message for finding in fates.audit(view)]
    if [each.step for each in view.surviving] != list(range(1, step + 1)):
        findings.append(f"the ledger's steps are not 1 to {step}")
    if sum(each.samples for each in view.surviving) != samples:
        findings.append("the ledger's samples are not the checkpoint's")
    if left["tracker"] not in (None, step) and left["tracker"] != step - 1:
        findings.append(f"the tracker names {left['tracker']}, and {step} is the newest whole one")
    return left | {"findings": findings}


def chain(
    pool: Pool,
    folder: Path,
    kills: int,
    seed: int,
    how: Sequence[str] = (),
    world: int = 2,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Kill and resume `kills` times, or for so many seconds, go on to an end, and judge.

    Returns:
        Each death with what it left and where the next run resumed, and the end's verdicts.
    """
    chosen, deaths, began = random.Random(seed), [], time.monotonic()
    for number in range(kills):
        if time.monotonic() - began > seconds:
            break
        when = moment(chosen)
        try:
            pool.run(train, str(folder), partial(kill, *when), tuple(how), world=world, timeout=400)
        except RankDied:
            deaths.append({"after": when[0], "delay_s": round(when[2], 4)} | _left_behind(folder))
            print(number, deaths[-1], flush=True)
        else:
            raise AssertionError(f"run {number} was not killed")
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
    said, equal = compare.compare(*last_folders, bitwise=True)
    return {
        "kills": len(deaths),
        "seed": seed,
        "from_newest_whole": all(death["newest_whole"] == death["resumed_from"] for death in deaths),
        "newest_was": dict(Counter(death["newest_was"] for death in deaths)),
        "audit": [finding.message for finding in fates.audit(view)],
        "steps_in_order": [step.step for step in view.surviving] == list(range(1, end + 1)),
        "end": end,
        "end_equals_uninterrupted": equal,
        "compared": said,
        "deaths": deaths,
    }


def _left_behind(folder: Path) -> dict[str, Any]:
    found = generations.generations(folder, full=True)
    good = next((each for each in found if each.state == "complete"), None)
    bad = [str(each) for each in found if each.state not in ("complete", "incomplete")]
    assert not bad, bad
    return {
        "newest_was": _phase(found[0], generations.read_tracker(folder)) if found else "no save yet",
        "newest_whole": good.step if good is not None else 0,
        "tracker": generations.read_tracker(folder),
    }


def _phase(newest: generations.Generation, tracker: Any) -> str:
    """How far the newest save had come."""
    if newest.state == "complete":
        return "complete, tracker moved" if tracker == newest.step else "complete, tracker behind"
    if (newest.folder / MANIFEST).exists():
        return "manifest, no marker"
    names = file_names(newest.folder)
    if ".metadata" in names:
        return "all files, being hashed"
    return "files being written" if names else "folder made"


def passed(result: dict[str, Any]) -> bool:
    """Whether a chain's result is as it must be."""
    right = result["from_newest_whole"] and result["steps_in_order"] and result["end_equals_uninterrupted"]
    return bool(right and not result["audit"])


def main() -> int:
    """Chains of kills, and stopped moments where asked for; each result is added to what the file holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", choices=HOW, nargs="+", default=list(HOW), help="kinds of save (default: both)")
    parser.add_argument("--kills", type=int, default=30, help="in one chain, of each kind")
    parser.add_argument("--moments", type=int, default=0, help="stopped and copied, of each kind")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after so long a chain goes to its end")
    parser.add_argument("--seed", type=int, default=0, help="another one for another chain")
    parser.add_argument("--out", type=Path, default=Path("docs/drills/kill_around_save.json"))
    options = parser.parse_args()
    results = Results(options.out, (*PLUGIN, "tests/dist/small_gpt.py", "tests/drills/kill_around_save.py"))
    pool, right = Pool(patched_megatron_on_cpu), True
    try:
        for name in options.saves:
            entry = results.rows.get(name, {"killed": [], "stopped": []})
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                if options.kills:
                    killed = chain(
                        pool, root / "killed", options.kills, options.seed, HOW[name], seconds=options.seconds
                    )
                    entry["killed"].append(killed)
                    right = right and passed(killed)
                if options.moments:
                    stopped = moments(pool, root / "stopped", options.moments, options.seed, HOW[name])
                    entry["stopped"].append(stopped)
                    right = right and not stopped["bad"]
            results.put(name, entry)
    finally:
        pool.close()
    for name, entry in results.rows.items():
        for kind, parts in entry.items():
            for part in parts:
                print(name, kind, {key: value for key, value in part.items() if key not in ("each", "deaths")})
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
