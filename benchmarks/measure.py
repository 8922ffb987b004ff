"""Time and peak memory of callables, side by side: rounds are interleaved, so that a busy machine slows all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Cost:
    """Median seconds of a call, and bytes that it held at most beyond what stood before it."""

    seconds: float
    peak_bytes: int


def measure(candidates: Mapping[str, Callable[[], None]], rounds: int = 9) -> dict[str, Cost]:
    """Warm each candidate once, then time `rounds` interleaved calls of each, then measure one call's memory."""
    for run in candidates.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            _wait()
            start = time.perf_counter()
            run()
            _wait()
            times[name].append(time.perf_counter() - start)
    return {name: Cost(median(times[name]), _peak(run)) for name, run in candidates.items()}


def table(title: str, costs: Mapping[str, Cost]) -> str:
    """A table whose last two columns are ratios to the first candidate."""
    base = next(iter(costs.values()))
    lines = [f"{title} ({DEVICE.type}, torch {torch.__version__}, {torch.get_num_threads()} threads)"]
    lines.append(f"{'':44}{'ms':>9}{'peak MiB':>10}{'time ×':>8}{'peak ×':>8}")
    for name, cost in costs.items():
        ratios = f"{cost.seconds / base.seconds:8.2f}{cost.peak_bytes / base.peak_bytes:8.2f}"
        lines.append(f"{name:44}{cost.seconds * 1e3:9.2f}{cost.peak_bytes / 2**20:10.1f}{ratios}")
    return "\n".join(lines)


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _peak(run: Callable[[], None]) -> int:
    gc.collect()
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    # every allocation and release of torch's CPU allocator, temporaries inside operators included
    results = profile.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in results if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
