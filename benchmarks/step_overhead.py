"""Claim: at its defaults the layer costs at most 1 % of a step, and nothing when off.

    python -m benchmarks.step_overhead [--hidden-size 512] [--steps 60] [--json FILE]

Two readings on one rank of a real Megatron run on the CPU backend:

    inside   time spent in our calls / step time, summed over the steps with the layer on
    paired   neighbouring steps of one run, the layer on in one and off in the other: median of on/off, with a 95 %
             interval from a seeded bootstrap. It also holds what the calls slow down elsewhere, and noise.

Collectives are counted, not timed, on two data-parallel ranks: stock Megatron, patched with the layer off, and on.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WARM_UP = 8  # steps before the first reading


def flags(hidden_size: int, steps: int, folder: str) -> list[str]:
    """Megatron's flags of the measured run."""
    return [
        *("--num-layers", "4", "--hidden-size", str(hidden_size), "--num-attention-heads", "8", "--seq-length", "256"),
        *("--max-position-embeddings", "256", "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-4"),
        *("--train-iters", str(steps), "--mock-data", "--vocab-size", "8191", "--eval-iters", "0", "--bf16"),
        *("--eval-interval", "1000", "--log-interval", "1000", "--num-workers", "0", "--seed", "7"),
        *("--stability-record-dir", folder),
    ]


def measure(hidden_size: int, steps: int, folder: str, pipe: Any) -> None:
    """In a process of its own: train, and send ([(on, step seconds, seconds inside our calls)], parameters)."""
    from megatron_stability.megatron.launch import Job

    job = Job((), None, cpu=True, patched=True)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    job.prepare()
    from megatron_stability import config as tree
    from megatron_stability.megatron import cpu, seams
    from megatron_stability.megatron import pretrain as gpt
    from megatron_stability.megatron.runtime import Runtime

    class Alternating(Runtime):
        """On in every second step; keeps the time of each step, and of our calls in it."""

        rows: list[tuple[bool, float, float]] = []  # noqa: RUF012
        on, began, inside = False, 0.0, 0.0

        def step_begins(self) -> None:
            now = time.perf_counter()
            if self.began:
                self.rows.append((self.on, now - self.began, self.inside))
            self.began, self.inside, self.on = now, 0.0, not self.on
            self._timed(super().step_begins)

        def losses_ready(self, losses_reduced: Any) -> None:
            self._timed(super().losses_ready, losses_reduced)

        def update_allowed(self, optimizer: Any, grad_norm: Any) -> bool:
            return bool(self._timed(super().update_allowed, optimizer, grad_norm)) if self.on else True

        def update_done(self, update_successful: bool) -> None:
            self._timed(super().update_done, update_successful)

        def _note_samples_that_megatron_passed_over(self) -> None:
            self._next_sample = self._args.consumed_train_samples  # steps that were off are not in the ledger

        def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
            if not self.on:
                return None
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.inside += time.perf_counter() - began

    sys.argv = ["step_overhead", *cpu.FLAGS, *flags(hidden_size, steps, folder), "--stability-mode", "off"]
    made: list[Alternating] = []
    count = 0

    def on_arguments(args: Any) -> None:
        made.append(Alternating(tree.load(overrides={"stability_record_dir": folder}), args))
        seams.install(made[0])

    def provider(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        model = gpt.model_provider(*arguments, **keywords)
        count = sum(p.numel() for p in model.parameters())
        return model

    gpt.main(model_provider=provider, on_arguments=on_arguments)
    pipe.send((made[0].rows[WARM_UP:], count))


def count_collectives(mode: str, rank: int, port: int, folder: str, pipe: Any) -> None:
    """One of two data-parallel ranks: send {collective: calls} of ten steps."""
    from megatron_stability.megatron.launch import Job

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    Job((), None, cpu=True, patched=mode != "stock").prepare()
    import torch

    from megatron_stability.megatron import cpu, seams
    from megatron_stability.megatron import pretrain as gpt

    setting = "act" if mode == "on" else "off"
    sys.argv = ["step_overhead", *cpu.FLAGS, *flags(64, 10, folder), "--stability-mode", setting]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gpt.main()
    seams.uninstall()
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


def run(hidden_size: int, steps: int) -> dict[str, Any]:
    """All figures of the claim."""
    with tempfile.TemporaryDirectory() as folder:
        process, pipe = _in_process(measure, hidden_size, steps, folder)
        rows, parameters = pipe.recv()
        process.join()
    on = [row for row in rows if row[0]]
    pairs = zip(rows[::2], rows[1::2], strict=False)
    ratios = [(b[1] / a[1]) if b[0] else (a[1] / b[1]) for a, b in pairs]
    low, high = interval(ratios)
    collectives = {}
    for mode in ("stock", "off", "on"):
        with tempfile.TemporaryDirectory() as folder:
            from megatron_stability.megatron.ranks import _rendezvous

            port = int(_rendezvous()["MASTER_PORT"])
            ranks = [_in_process(count_collectives, mode, rank, port, f"{folder}/{rank}") for rank in range(2)]
            collectives[mode] = [pipe.recv() for _, pipe in ranks].pop()
            for process, _ in ranks:
                process.join()
    return {
        "parameters": parameters,
        "steps_on": len(on),
        "step_seconds_off_median": statistics.median(row[1] for row in rows if not row[0]),
        "inside_share": math.fsum(row[2] for row in on) / math.fsum(row[1] for row in on),
        "paired_ratio_median": statistics.median(ratios),
        "paired_ratio_95": [low, high],
        "collectives_in_10_steps": collectives,
    }


def main() -> int:
    """Print the table; exit 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    result = run(options.hidden_size, options.steps)
    counts = result["collectives_in_10_steps"]
    total = {mode: sum(calls.values()) for mode, calls in counts.items()}
    low, high = result["paired_ratio_95"]
    table = Table("claim", "seen", title=f"Step overhead, {result['parameters']:,} parameters, one CPU rank")
    table.add_row("time inside our calls / step time (at most 1 %)", f"{result['inside_share']:.3%}")
    table.add_row("paired step time, on / off", f"{result['paired_ratio_median']:.4f} (95 %: {low:.4f} to {high:.4f})")
    table.add_row("step time, off", f"{result['step_seconds_off_median'] * 1e3:.0f} ms")
    table.add_row("collectives in 10 steps: stock, off, on", f"{total['stock']}, {total['off']}, {total['on']}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["inside_share"] <= 0.01 and counts["stock"] == counts["off"] else 1


if __name__ == "__main__":
    sys.exit(main())
