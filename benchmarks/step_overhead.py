"""Claim: at its defaults the layer costs at most 1 % of a step, and nothing when off.

    python -m benchmarks.step_overhead [--hidden-size 512] [--steps 60] [--device cpu] [--json FILE]

Two readings on one rank of a real Megatron run, on the CPU backend or (`--device cuda`, timed by CUDA events, with the
host synchronisations inside our calls counted) on a GPU:

    inside   time spent in our calls / step time, summed over the steps with the layer on
    paired   neighbouring steps of one run, the layer on in one and off in the other: median of on/off, with a 95 %
             interval from a seeded bootstrap. It also holds what the calls slow down elsewhere, and noise.

Collectives are counted, not timed, on two data-parallel ranks: stock Megatron, patched with the layer off, and on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing as mp
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stability.megatron.start.ranks import rendezvous

WARM_UP = 8  # steps before the first reading
GPU_FLAGS = (  # one GPU without Transformer Engine and Apex
    *("--transformer-impl", "local", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-rope-fusion"),
)


def flags(hidden_size: int, steps: int, folder: str) -> list[str]:
    """Megatron's flags of the measured run."""
    return [
        *("--num-layers", "4", "--hidden-size", str(hidden_size), "--num-attention-heads", "8", "--seq-length", "256"),
        *("--max-position-embeddings", "256", "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-4"),
        *("--train-iters", str(steps), "--mock-data", "--vocab-size", "8191", "--eval-iters", "0"),
        *("--eval-interval", "1000", "--log-interval", "1000", "--num-workers", "0", "--seed", "7"),
        *("--stability-record-dir", folder),
    ]


class HostClock:
    """Seconds between marks; a mark is a reading of the host's clock."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        return second - first

    @contextlib.contextmanager
    def synchronisations(self) -> Iterator[list[Any]]:
        """What `torch.cuda` would warn of; nothing on a CPU."""
        yield []


class DeviceClock:
    """Seconds between marks; a mark is an event in the device's stream, so that nothing waits for it."""

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def between(self, first: Any, second: Any) -> float:
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    @contextlib.contextmanager
    def synchronisations(self) -> Iterator[list[Any]]:
        """The host synchronisations that torch saw inside the block."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self._torch.cuda.set_sync_debug_mode("warn")
            try:
                yield seen
            finally:
                self._torch.cuda.set_sync_debug_mode("default")


def measure(device: str, hidden_size: int, steps: int, folder: str, pipe: Any) -> None:
    """In a process of its own: train, and send the steps and the number of parameters.

    A step is (on, step seconds, seconds inside our calls, host synchronisations inside our calls).
    """
    from megatron_stability.megatron.start.job import Job

    job = Job((), None, cpu=device == "cpu", patched=True)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | rendezvous()
    job.prepare()
    clock = HostClock() if device == "cpu" else DeviceClock()
    from megatron_stability import config as tree
    from megatron_stability.megatron import cpu
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.runtime import Runtime
    from megatron_stability.megatron.start import pretrain_gpt as gpt

    class Alternating(Runtime):
        """On in every second step; keeps the time of each step, and of our calls in it."""

        marks: list[tuple[bool, Any, list[tuple[Any, Any]], int]] = []  # noqa: RUF012
        on, inside, syncs = False, [], 0

        def step_begins(self) -> None:
            self.on, self.inside, self.syncs = not self.on, [], 0
            self.marks.append((self.on, clock.mark(), self.inside, 0))
            self._timed(super().step_begins)

        def rows(self) -> list[tuple[bool, float, float, int]]:
            starts = [mark for _, mark, _, _ in self.marks]
            return [
                (on, clock.between(mark, end), sum(clock.between(*pair) for pair in inside), syncs)
                for (on, mark, inside, syncs), end in zip(self.marks, starts[1:], strict=False)
            ]

        def losses_ready(self, losses_reduced: Any) -> None:
            self._timed(super().losses_ready, losses_reduced)

        def update_allowed(self, optimizer: Any, grad_norm: Any) -> bool:
            return bool(self._timed(super().update_allowed, optimizer, grad_norm)) if self.on else True

        def update_done(self, update_successful: bool) -> None:
            self._timed(super().update_done, update_successful)

        def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
            if not self.on:
                return None
            began = clock.mark()
            with clock.synchronisations() as seen:
                result = call(*arguments)
            self.inside.append((began, clock.mark()))
            on, mark, inside, syncs = self.marks[-1]
            self.marks[-1] = (on, mark, inside, syncs + len(seen))
            return result

    backend = cpu.FLAGS if device == "cpu" else GPU_FLAGS
    sys.argv = ["step_overhead", *backend, *flags(hidden_size, steps, folder), "--stability-mode", "off"]
    made: list[Alternating] = []
    count = 0

    def on_arguments(args: Any) -> None:
        made.append(Alternating(tree.load(overrides={"stability_record_dir": folder}), args))
        handle.install(made[0])

    def provider(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        model = gpt.model_provider(*arguments, **keywords)
        count = sum(p.numel() for p in model.parameters())
        return model

    gpt.main(model_provider=provider, on_arguments=on_arguments)
    pipe.send((made[0].rows()[WARM_UP:], count))


def count_collectives(mode: str, rank: int, port: int, folder: str, pipe: Any) -> None:
    """One of two data-parallel ranks: send {collective: calls} of ten steps."""
    from megatron_stability.megatron.start.job import Job

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    Job((), None, cpu=True, patched=mode != "stock").prepare()
    import torch

    from megatron_stability.megatron import cpu
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.start import pretrain_gpt as gpt

    setting = "act" if mode == "on" else "off"
    sys.argv = ["step_overhead", *cpu.FLAGS, *flags(64, 10, folder), "--stability-mode", setting]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gpt.main()
    handle.uninstall()
    pipe.send({event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")})


def interval(ratios: list[float], draws: int = 4000) -> tuple[float, float]:
    """95 % interval of the median, by a seeded bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def _in_process(target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    return process, mine


def run(device: str, hidden_size: int, steps: int) -> dict[str, Any]:
    """All figures of the claim."""
    with tempfile.TemporaryDirectory() as folder:
        process, pipe = _in_process(measure, device, hidden_size, steps, folder)
        rows, parameters = pipe.recv()
        process.join()
    on = [row for row in rows if row[0]]
    pairs = zip(rows[::2], rows[1::2], strict=False)
    ratios = [(b[1] / a[1]) if b[0] else (a[1] / b[1]) for a, b in pairs]
    low, high = interval(ratios)
    collectives = {}
    for mode in ("stock", "off", "on") if device == "cpu" else ():
        with tempfile.TemporaryDirectory() as folder:
            port = int(rendezvous()["MASTER_PORT"])
            ranks = [_in_process(count_collectives, mode, rank, port, folder) for rank in range(2)]
            collectives[mode] = [pipe.recv() for _, pipe in ranks].pop()
            for process, _ in ranks:
                process.join()
    return {
        "parameters": parameters,
        "steps_on": len(on),
        "step_seconds_off_median": statistics.median(row[1] for row in rows if not row[0]),
        "inside_share": math.fsum(row[2] for row in on) / math.fsum(row[1] for row in on),
        "host_synchronisations_a_step": max(row[3] for row in on),
        "paired_ratio_median": statistics.median(ratios),
        "paired_ratio_95": [low, high],
        "collectives_in_10_steps": collectives,
    }


def main() -> int:
    """Print the table; exit 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    result = run(options.device, options.hidden_size, options.steps)
    counts = result["collectives_in_10_steps"]
    low, high = result["paired_ratio_95"]
    table = Table(
        "claim", "seen", title=f"Step overhead, {result['parameters']:,} parameters, one rank, {options.device}"
    )
    table.add_row("time inside our calls / step time (at most 1 %)", f"{result['inside_share']:.3%}")
    table.add_row("paired step time, on / off", f"{result['paired_ratio_median']:.4f} (95 %: {low:.4f} to {high:.4f})")
    table.add_row("step time, off", f"{result['step_seconds_off_median'] * 1e3:.0f} ms")
    if options.device == "cuda":
        table.add_row("host synchronisations in our calls, a step", str(result["host_synchronisations_a_step"]))
    for mode, calls in counts.items():
        table.add_row(f"collectives in 10 steps, {mode}", str(sum(calls.values())))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["inside_share"] <= 0.01 and counts.get("stock") == counts.get("off") else 1


if __name__ == "__main__":
    sys.exit(main())
