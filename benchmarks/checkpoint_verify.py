"""Claim: proving a checkpoint costs what reading it costs, and a save at most 5 % more (async: 1 % of a step).

    python -m benchmarks.checkpoint_verify [--mb 1024] [--save] [--json FILE]

Throughput: `manifest.hash_files` over one to N threads, against xxh3-128 in a plain loop over the files (what `xxhsum`
does), `sha256sum`, `xxhsum` where installed, and bare reading, all on the same files in the page cache; then verifying
and bare reading of files that the page cache has let go of. Each figure is the best of five rounds. --save: real runs
of Megatron on one rank of the CPU backend, three saves each.
Synchronous: our calls' share of `save_checkpoint`. Asynchronous: our calls on the training thread (fingerprints, and
the start of the thread that completes) as a share of one step of 4096 tokens. Medians; the thread's own time is beside.
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

import xxhash
from rich.console import Console
from rich.table import Table

from megatron_stability.record import manifest

FILES = 16
ROUNDS = 5
READ, HASH, VERIFY, FROM_DISK = "read, 1 thread", "xxh3-128 in a plain loop, 1 thread", "verify", ", from disk"
OURS = {"sync": ("add_state", "saved"), "async": ("add_state", "saved", "_complete")}  # sync: `saved` calls the third
IN_A_THREAD = "_complete_in_thread"
FEW_TOKENS = ("--seq-length", "128", "--global-batch-size", "1")
TOKENS_4096 = ("--seq-length", "1024", "--global-batch-size", "4")
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


def save_shares(hidden_size: int, how: tuple[str, ...], pipe: Any) -> None:
    """In a process of its own: train, and send the seconds of each save, of our part in it, and of each step."""
    from megatron_stability.megatron.launch import Job

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    Job((), None, cpu=True, patched=True).prepare()
    from megatron.training import training

    from megatron_stability.megatron import cpu, seams
    from megatron_stability.megatron import pretrain as gpt

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

    def watch(args: Any) -> None:
        runtime = seams.installed()
        assert runtime is not None
        ours = runtime.checkpoints
        for method in (*OURS["async"], IN_A_THREAD):
            setattr(ours, method, timed(getattr(ours, method), method))

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["benchmark", *cpu.FLAGS, *flags(hidden_size, folder), *how]
        for name in ("save_checkpoint", "train_step"):
            setattr(training, name, timed(getattr(training, name), name))
        gpt.main(on_arguments=watch)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.distcp")) / 1e6
        seams.uninstall()
    pipe.send(spent | {"mb": size})


def flags(hidden_size: int, folder: str) -> list[str]:
    """Megatron's flags of the measured run."""
    return [
        *(
            "--num-layers",
            "4",
            "--hidden-size",
            str(hidden_size),
            "--num-attention-heads",
            "8",
            "--micro-batch-size",
            "1",
        ),
        *("--max-position-embeddings", "1024", "--micro-batch-size", "1", "--lr", "1e-4", "--train-iters", "6"),
        *("--vocab-size", "8191", "--eval-iters", "0", "--mock-data"),
        *("--eval-interval", "1000", "--log-interval", "1000", "--num-workers", "0", "--seed", "7"),
        *("--save", folder, "--save-interval", "2", "--ckpt-format", "torch_dist", "--position-embedding-type", "rope"),
    ]


def shares(hidden_size: int) -> dict[str, float]:
    """Our share of a synchronous save, and our part on the training thread of an asynchronous one."""
    result = {}
    for name, how in (("sync", FEW_TOKENS), ("async", (*TOKENS_4096, *ASYNC))):
        ours, theirs = mp.get_context("spawn").Pipe()
        process = mp.get_context("spawn").Process(target=save_shares, args=(hidden_size, how, theirs))
        process.start()
        theirs.close()
        seen = ours.recv()
        process.join(60)
        parts = list(map(sum, zip(*(seen[method] for method in OURS[name]), strict=True)))
        result[f"{name}: checkpoint, MB"] = seen["mb"] / len(parts)
        result[f"{name}: save_checkpoint, s"] = statistics.median(seen["save_checkpoint"])
        result[f"{name}: of it ours, ms"] = 1e3 * statistics.median(parts)
        result[f"{name}: ours in a thread, ms"] = 1e3 * statistics.median(seen[IN_A_THREAD])
        result[f"{name}: a step, s"] = step = statistics.median(seen["train_step"])
        if name == "sync":
            pairs = zip(parts, seen["save_checkpoint"], strict=True)
            result["sync: ours, % of a save"] = statistics.median(100 * part / whole for part, whole in pairs)
        else:
            result["async: ours, % of a step"] = 100 * statistics.median(parts) / step
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
        table.add_row(name, f"{value:,.2f}" if value < 10 else f"{value:,.0f}")
    for name in ("verify / (fastest hash x cpus)", "verify / read, from disk"):
        table.add_row(name, f"{result[name]:.2f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
