"""What a step, a save and a load cost a rank at 8 to 131,072 ranks: bytes, host time, calls to the file system.

python -m benchmarks.scale [--out benchmarks/data/scale.json]

The reduction is measured on one process: packing, and unpacking what the collectives would bring. Its named peer is the
gather that it replaced: every rank's row of float64 to every rank, combined in rank order in Python. The network's time
is a model with stated constants. Checkpoint folders are real, of empty files; calls are counted, not timed, since a
local disk says nothing about a parallel file system's metadata server.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import results
from benchmarks.results import PURE
from megatron_stability.checkpoints import manifest, parts
from megatron_stability.checkpoints.manifest import FileEntry
from megatron_stability.observe.reduction import LocalSignals, Reduction, Sent
from megatron_stability.observe.wide import Layers, Replicas

WORLDS = (8, 1_024, 16_384, 131_072)
STAGES, LAYERS, SCALARS = 64, 64, 40  # model-parallel ranks (TP 8 x PP 8), decoder layers, further signals
ALPHA_S, BYTES_PER_S = 10e-6, 25e9  # of one hop, and of one rank's link: 200 Gbit/s
CALLS = ("stat", "lstat", "open", "scandir", "listdir")


def _seconds(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def _reduction(world: int) -> dict[str, float]:
    stages = min(STAGES, world)
    groups = tuple(tuple(range(stage, world, stages)) for stage in range(stages))
    ways = {f"signal/{at}": ("max", "min", "sum", "norm")[at % 4] for at in range(SCALARS)}
    reduction = Reduction(None, torch.device("cpu"), {**ways, "weights": Replicas(groups, 3), "norm": Layers(LAYERS)})
    local = LocalSignals(
        step=5,
        first_sample=0,
        samples=8,
        loss_sums_n2=torch.tensor([[8.0, 4.0]] * 4),
        grad_norm=torch.tensor(1.0),
        grad_amax=torch.tensor(0.1),
        extra={name: torch.tensor(0.5) for name in ways} | {"norm": torch.ones(LAYERS, dtype=torch.float64)},
    )
    sent = reduction.sent(local)
    bytes_ = 8 * (sent.sums_s.numel() + sent.keys_k.numel())
    hops = math.ceil(math.log2(world))
    row = 12 + SCALARS + 1 + LAYERS
    gathered = torch.rand(world, row, dtype=torch.float64)
    return {
        "bytes": bytes_,
        "host_ms": 1e3 * _seconds(lambda: _step(reduction, local, sent), 9),
        "network_ms": 1e3 * 2 * (2 * hops * ALPHA_S + bytes_ / BYTES_PER_S),
        "gather_bytes": 8 * world * row,
        "gather_host_ms": 1e3 * _seconds(lambda: _combined(gathered), 3 if world > 10_000 else 9),
        "gather_network_ms": 1e3 * (hops * ALPHA_S + 8 * world * row / BYTES_PER_S),
    }


def _step(reduction: Reduction, local: LocalSignals, sent: Sent) -> None:
    reduction.sent(local)
    reduction.record(sent, lambda: torch.zeros(0))


def _combined(rows: torch.Tensor) -> float:
    """What a rank did with everyone's rows."""
    columns = list(zip(*rows.tolist(), strict=True))
    sums = [math.fsum(column) for column in columns[:4]]
    cursors = [tuple(column) for column in zip(*columns[:4], strict=True)]
    different = [rank for rank, cursor in enumerate(cursors) if cursor != cursors[0]]
    return sum(sums) + len(different) + sum(max(v for v in column if not math.isnan(v)) for column in columns[4:])


@contextmanager
def _counted() -> Iterator[dict[str, int]]:
    calls = dict.fromkeys(CALLS, 0)
    stock = {name: getattr(os, name) for name in CALLS}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return stock[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counting(name))
    try:
        yield calls
    finally:
        for name in CALLS:
            setattr(os, name, stock[name])


def _checkpoint(world: int, root: Path) -> dict[str, float]:
    folder = root / "iter_0000010"
    folder.mkdir(parents=True)
    for rank in range(world):
        for name in (f"__{rank}_0.distcp", f"__{rank}_1.distcp", manifest.fingerprints_name(rank)):
            (folder / name).touch()
    empty = manifest.hash_files(folder, ["__0_0.distcp"])["__0_0.distcp"]
    found = {}
    with _counted() as calls:
        names = parts.own_names(folder, 5)
        manifest.hash_files(folder, names, threads=1)
    found["save_calls_a_rank"] = sum(calls.values())
    with _counted() as calls:
        mine = dict.fromkeys(names, empty)
        assert not manifest.verify_files(folder, mine, threads=1)
    found["load_calls_a_rank"] = sum(calls.values())
    claimed = [name for rank in range(world) for name in (f"__{rank}_0.distcp", f"__{rank}_1.distcp")]
    claimed += [manifest.fingerprints_name(rank) for rank in range(world)]
    found["rank_0_list_s"] = _seconds(lambda: parts.left_over(folder, claimed), 1)
    entries: dict[str, FileEntry] = dict.fromkeys(claimed, empty)
    whole = manifest.Manifest(step=10, samples=80, tokens=80, layout={"world_size": world}, files=entries)
    found["rank_0_write_s"] = _seconds(lambda: manifest.write(folder, whole), 1)
    found["manifest_mb"] = (folder / manifest.MANIFEST).stat().st_size / 1e6
    found["rank_0_read_and_share_s"] = _seconds(lambda: _shared(folder, world), 1)
    gc.collect()
    return found


def _shared(folder: Path, world: int) -> None:
    known, problems = manifest.believed(folder)
    assert known is not None, problems
    parts.parts(known.files, world)


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table here, as JSON")
    out = parser.parse_args().out
    of = results.stamp((*PURE, "benchmarks/scale.py"))
    table: dict[str, dict[str, float]] = {}
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            table[str(world)] = {**_reduction(world), **_checkpoint(world, Path(folder))}
        print(world, json.dumps(table[str(world)]), flush=True)
    if out:
        settings = {
            "stages": STAGES,
            "layers": LAYERS,
            "scalars": SCALARS,
            "alpha_s": ALPHA_S,
            "bytes_per_s": BYTES_PER_S,
        }
        results.write(out, {"settings": settings, "worlds": table}, of)


if __name__ == "__main__":
    main()
