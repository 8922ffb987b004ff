"""Claim: proving a checkpoint costs what reading it costs, and a save at most 5 % more (async: 1 % of a step).

    python -m benchmarks.checkpoint_verify [--mb 1024] [--save] [--json FILE]

Throughput: `manifest.hash_files` over one to N threads, against xxh3-128 in a plain loop over the files (what `xxhsum`
does), `sha256sum`, `xxhsum` where installed, and bare reading, all on the same files in the page cache; then verifying
and bare reading of files that the page cache has let go of. Each figure is the best of five rounds. --save: real runs
of Megatron on one rank of the CPU backend. Synchronous: `save_checkpoint` with the manifest on and off in turns, the
median of the ratios of neighbours and its 95 % interval; our calls' share of the saves with it on; and likewise the
step after a save, beside which threads take fingerprints and hash. Asynchronous: our calls on the training thread (and
what the next update waits for fingerprints) as a share of one step of 4096 tokens. Medians; with the threads' time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from benchmarks.step_overhead import interval
from megatron_stability.checkpoints import manifest

FILES = 16
ROUNDS = 5
READ, HASH, VERIFY, FROM_DISK = "read, 1 thread", "xxh3-128 in a plain loop, 1 thread", "verify", ", from disk"
AT_SAVE, AT_UPDATE, AT_END = ("add_state", "saved"), "weights_will_change", "_complete"  # sync: `saved` calls the last
IN_A_THREAD = "_complete_in_thread"
WARM_UP, PAIRS = 2, 64  # saves: the first ones also plan; pairs of the manifest on and off
FEW_TOKENS = ("--seq-length", "128", "--global-batch-size", "1", "--train-iters", str(WARM_UP + 2 * PAIRS))
TOKENS_4096 = ("--seq-length", "1024", "--global-batch-size", "4", "--train-iters", "6", "--save-interval", "2")
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


def best(work_of: dict[str, Callable[[], object]], megabytes: float, paths: list[Path]) -> dict[str, float]:
    """MB/s of each reading, the best of `ROUNDS`; in turns, so that a busy moment hurts all alike."""
    result = dict.fromkeys(work_of, 0.0)
    for _ in range(ROUNDS):
        for name, work in work_of.items():
            if name.endswith(FROM_DISK):
                forget(paths)
            began = time.perf_counter()
            work()
            result[name] = max(result[name], megabytes / (time.perf_counter() - began))
    return result


def read_all(paths: list[Path]) -> None:
    """Bare reading, in the same chunks."""
    buffer = bytearray(manifest.CHUNK)
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def hash_all(paths: list[Path]) -> None:
    """xxh3-128 of each file, one after the other."""
    buffer = memoryview(bytearray(1 << 16))
    for path in paths:
        digest = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
        digest.digest()


def forget(paths: list[Path]) -> None:
    """Empty the page cache of these files."""
    for path in paths:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def throughput(megabytes: int, folder: Path) -> dict[str, float]:
    """MB/s by reading."""
    paths = [folder / f"__{number}_0.distcp" for number in range(FILES)]
    for path in paths:
        with path.open("wb") as stream:
            for _ in range(megabytes // FILES):
                stream.write(os.urandom(1 << 20))
    names, threads = [path.name for path in paths], os.cpu_count() or 1
    readings: dict[str, Callable[[], object]] = {
        READ: partial(read_all, paths),
        HASH: partial(hash_all, paths),
        **{f"verify, {n} threads": partial(manifest.hash_files, folder, names, threads=n) for n in {1, threads}},
        READ + FROM_DISK: partial(read_all, paths),
        VERIFY + FROM_DISK: partial(manifest.hash_files, folder, names, threads=threads),
    }
    for tool in (("sha256sum",), ("xxhsum", "-H2")):
        if shutil.which(tool[0]):
            readings[tool[0]] = partial(subprocess.run, [*tool, *map(str, paths)], check=True, capture_output=True)
    return best(readings, megabytes // FILES * FILES * (1 << 20) / 1e6, paths)


def save_shares(hidden_size: int, how: tuple[str, ...], in_turns: bool, pipe: Any) -> None:
    """In a process of its own: train, and send the seconds of each save, of our part in it, and of each step.

    in_turns: the manifest is off in every second save, and an earlier save's threads have ended when one begins.
    """
    from megatron_stability.megatron.start.job import Job

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    Job((), None, cpu=True, patched=True).prepare()
    from megatron.training import training

    from megatron_stability.megatron import cpu
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.start import pretrain_gpt as gpt

    spent: dict[str, list[float]] = {}

    def timed(work: Callable[..., Any], name: str) -> Callable[..., Any]:
        seen = spent.setdefault(name, [])

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                seen.append(time.perf_counter() - began)

        return call

    def in_turn(save: Callable[..., Any], folder: Path) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            runtime = handle.installed()
            assert runtime is not None
            ours = runtime.checkpoints
            ours.close()
            for each in folder.glob("iter_*"):
                shutil.rmtree(each)
            on = len(spent["save_checkpoint"]) % 2 == 0
            checkpoint = ours._config.checkpoint.model_copy(update={"manifest": on})
            ours._config = ours._config.model_copy(update={"checkpoint": checkpoint})
            save(*args, **kwargs)
            spent.setdefault("mb", []).append(size_of(folder))

        return call

    def watch(args: Any) -> None:
        runtime = handle.installed()
        assert runtime is not None
        ours = runtime.checkpoints
        for method in (*AT_SAVE, AT_UPDATE, AT_END, IN_A_THREAD):
            setattr(ours, method, timed(getattr(ours, method), method))

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["benchmark", *cpu.FLAGS, *flags(hidden_size, folder), *how]
        for name in ("save_checkpoint", "train_step"):
            setattr(training, name, timed(getattr(training, name), name))
        if in_turns:
            training.save_checkpoint = in_turn(training.save_checkpoint, Path(folder))
        gpt.main(on_arguments=watch)
        spent.setdefault("mb", []).extend(map(size_of, Path(folder).glob("iter_*")))
        handle.uninstall()
    pipe.send(spent)


def size_of(folder: Path) -> float:
    """MB of a checkpoint's shards."""
    return sum(path.stat().st_size for path in folder.rglob("*.distcp")) / 1e6


def flags(hidden_size: int, folder: str) -> list[str]:
    """Megatron's flags of the measured run."""
    return [
        *("--num-layers", "4", "--hidden-size", str(hidden_size), "--num-attention-heads", "8", "--lr", "1e-4"),
        *("--max-position-embeddings", "1024", "--position-embedding-type", "rope", "--micro-batch-size", "1"),
        *("--vocab-size", "8191", "--eval-iters", "0", "--mock-data", "--num-workers", "0", "--seed", "7"),
        *("--eval-interval", "1000", "--log-interval", "1000", "--save", folder, "--save-interval", "1"),
        *("--ckpt-format", "torch_dist"),
    ]


def shares(hidden_size: int) -> dict[str, Any]:
    """Added time and our share of a synchronous save, and our part on the training thread of an asynchronous one."""
    result: dict[str, Any] = {}
    for name, how in (("sync", FEW_TOKENS), ("async", (*TOKENS_4096, *ASYNC))):
        ours, theirs = mp.get_context("spawn").Pipe()
        process = mp.get_context("spawn").Process(target=save_shares, args=(hidden_size, how, name == "sync", theirs))
        process.start()
        theirs.close()
        seen = ours.recv()
        process.join(60)
        saves, steps, updates = seen["save_checkpoint"], seen["train_step"], seen[AT_UPDATE]
        step = statistics.median(steps)
        parts = list(map(sum, zip(*(seen[method] for method in AT_SAVE), strict=True)))
        if name == "sync":  # step, save, step, ...: the next update waits for fingerprints
            parts = [part + wait for part, wait in zip(parts, updates[1:], strict=False)][WARM_UP::2]
            of_a_save = [100 * part / whole for part, whole in zip(parts, saves[WARM_UP::2], strict=False)]
            result["sync: on the training thread, % of a save"] = statistics.median(of_a_save)
            for what, times in (("save", saves[WARM_UP:]), ("next step", steps[WARM_UP + 1 :])):
                added = [100 * (on / off - 1) for on, off in zip(times[::2], times[1::2], strict=False)]
                result[f"sync: {what} longer by, %"] = statistics.median(added)
                result[f"sync: {what}, 95 % interval"] = interval(added)
            saves = saves[WARM_UP::2]
        else:
            parts = [(sum(parts) + sum(seen[AT_END]) + sum(updates)) / len(parts)]
            result["async: on the training thread, % of a step"] = 100 * parts[0] / step
        result[f"{name}: checkpoint, MB"] = statistics.median(seen["mb"])
        result[f"{name}: save_checkpoint, ms"] = 1e3 * statistics.median(saves)
        result[f"{name}: on the training thread, ms"] = 1e3 * statistics.median(parts)
        result[f"{name}: in a thread, ms"] = 1e3 * statistics.median(seen[IN_A_THREAD])
        result[f"{name}: a step, ms"] = 1e3 * step
    return result


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="MiB of files")
    parser.add_argument("--folder", type=Path, default=None, help="where they are made")
    parser.add_argument("--save", action="store_true", help="also measure real saves")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result: dict[str, Any] = {"MB/s": throughput(options.mb, Path(folder)), "cpus": os.cpu_count()}
    speed = result["MB/s"]
    fastest = max(speed[name] for name in (HASH, "sha256sum", "xxhsum") if name in speed)
    verify = max(value for name, value in speed.items() if name.startswith(VERIFY) and not name.endswith(FROM_DISK))
    result["verify / (fastest hash x cpus)"] = verify / (fastest * (os.cpu_count() or 1))
    result["verify / read, from disk"] = speed[VERIFY + FROM_DISK] / speed[READ + FROM_DISK]
    if options.save:
        result["save"] = shares(options.hidden_size)
    table = Table(show_edge=False)
    table.add_column("reading")
    table.add_column("", justify="right")
    for name, value in (result["MB/s"] | result.get("save", {})).items():
        table.add_row(name, ", ".join(f"{v:,.2f}" if v < 10 else f"{v:,.0f}" for v in np.atleast_1d(value)))
    for name in ("verify / (fastest hash x cpus)", "verify / read, from disk"):
        table.add_row(name, f"{result[name]:.2f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
