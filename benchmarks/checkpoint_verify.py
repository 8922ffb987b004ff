"""Claim: proving a checkpoint costs what reading it costs, and a save at most 5 % more (async: 1 % of a step).

    python -m benchmarks.checkpoint_verify [--mb 1024] [--save] [--json FILE]

Throughput: `manifest.hash_files` over one to N threads, against one thread of xxh3-128 and of SHA-256 over the same
bytes in memory, `sha256sum` and (where installed) `xxhsum`, and bare reading, all on the same files in the page cache.
Each figure is the best of five rounds. --save: real runs of Megatron on one rank of the CPU backend, three saves each.
Synchronous: our calls' share of `save_checkpoint`. Asynchronous: our calls on the training thread (fingerprints, and
the start of the thread that completes) as a share of one step of 4096 tokens. Medians; the thread's own time is beside.
"""

from __future__ import annotations

import argparse
import hashlib
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
OURS = {"sync": ("add_state", "saved"), "async": ("add_state", "saved", "_complete")}  # sync: `saved` calls the third
IN_A_THREAD = "_complete_in_thread"
FEW_TOKENS = ("--seq-length", "128", "--global-batch-size", "1")
TOKENS_4096 = ("--seq-length", "1024", "--global-batch-size", "4")
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


def best(readings: dict[str, tuple[Callable[[], object], float]]) -> dict[str, float]:
    """MB/s of each reading (work, MB), the best of `ROUNDS`; in turns, so that a busy moment hurts all alike."""
    result = dict.fromkeys(readings, 0.0)
    for _ in range(ROUNDS):
        for name, (work, megabytes) in readings.items():
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


def throughput(megabytes: int, folder: Path) -> dict[str, float]:
    """MB/s by reading."""
    block = os.urandom(1 << 20)
    paths = [folder / f"__{number}_0.distcp" for number in range(FILES)]
    for path in paths:
        with path.open("wb") as stream:
            for _ in range(megabytes // FILES):
                stream.write(block)
    size = megabytes // FILES * FILES * (1 << 20) / 1e6
    names = [path.name for path in paths]
    memory = block * 256
    readings: dict[str, tuple[Callable[[], object], float]] = {
        "read, 1 thread": (lambda: read_all(paths), size),
        "xxh3-128 in memory, 1 thread": (lambda: xxhash.xxh3_128_digest(memory), len(memory) / 1e6),
        "SHA-256 in memory, 1 thread": (lambda: hashlib.sha256(memory).digest(), len(memory) / 1e6),
    }
    for tool in (("sha256sum",), ("xxhsum", "-H2")):
        if shutil.which(tool[0]):
            command = [*tool, *map(str, paths)]
            readings[tool[0]] = (partial(subprocess.run, command, check=True, capture_output=True), size)
    for threads in sorted({1, 2, 4, os.cpu_count() or 1}):
        readings[f"verify, {threads} threads"] = (
            partial(manifest.hash_files, folder, names, threads=threads),
            size,
        )
    return best(readings)


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
        *("--vocab-size", "8191", "--eval-iters", "0", "--bf16", "--mock-data"),
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
    fastest = max(result["MB/s"]["xxh3-128 in memory, 1 thread"], result["MB/s"].get("xxhsum", 0.0))
    best_ours = max(value for name, value in result["MB/s"].items() if name.startswith("verify"))
    result["verify / read"] = best_ours / result["MB/s"]["read, 1 thread"]
    result["verify / (fastest hash x cpus)"] = best_ours / (fastest * (os.cpu_count() or 1))
    if options.save:
        result["save"] = shares(options.hidden_size)
    table = Table(show_edge=False)
    table.add_column("reading")
    table.add_column("", justify="right")
    for name, value in (result["MB/s"] | result.get("save", {})).items():
        table.add_row(name, f"{value:,.2f}" if value < 10 else f"{value:,.0f}")
    for name in ("verify / read", "verify / (fastest hash x cpus)"):
        table.add_row(name, f"{result[name]:.2f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
