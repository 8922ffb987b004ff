"""One pass over a tensor against separate passes (amax, saturation, underflow, SNR), time and memory.

usage: PYTHONPATH=. python benchmarks/fp8_stats.py [--values 100000000] [--repeat 3]
On a GPU the kernel's share of the memory bandwidth is printed as well, against a plain device-to-device copy.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from megatron_stability.numerics.fp8.formats import E4M3
from megatron_stability.numerics.fp8.stats import CHUNK, read, tensor_stats


def separate_passes(x: torch.Tensor, scale: torch.Tensor) -> list[float]:
    """What four independent statistics cost that each look at the tensor themselves, in plain torch."""
    amax = float(x.abs().amax())
    saturated = float(((x * scale).abs() > E4M3.max).float().mean())
    codes = (x * scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    underflow = float(((x != 0) & ((codes.view(torch.uint8) & 0x7F) == 0)).sum() / torch.count_nonzero(x))
    back = (x * scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).float() / scale
    snr = float(10 * torch.log10((x * x).sum() / ((back - x) ** 2).sum()))
    return [amax, saturated, underflow, snr]


def one_pass(x: torch.Tensor, scale: torch.Tensor) -> list[float]:
    """The same four figures from the one pass."""
    stats = read(tensor_stats(x, scale, E4M3))
    return [stats.amax, stats.saturation, stats.underflow, stats.snr_db]


def measure(name: str, values: int, repeat: int) -> dict[str, object]:
    """Seconds (best of `repeat`) and extra memory of one way, in this fresh process."""
    way: Callable[[torch.Tensor, torch.Tensor], list[float]] = {"one": one_pass, "separate": separate_passes}[name]
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(0)
    x = torch.randn(values, device=device)
    scale = torch.tensor([150.0], device=device)
    way(x[: 4 * CHUNK], scale)
    before = torch.cuda.memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        figures = way(x, scale)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"seconds": min(seconds), "extra_mb": (peak - before) / 1e6, "figures": figures, "device": device}
    if gpu and name == "one":
        result["bandwidth_share"] = bandwidth_share(x, min(seconds))
    return result


def bandwidth_share(x: torch.Tensor, seconds: float) -> float:
    """Bytes read per second by the pass, over those that a copy of the same tensor moves (it reads and writes)."""
    copy = torch.empty_like(x)
    copy.copy_(x)
    torch.cuda.synchronize()
    began = time.perf_counter()
    copy.copy_(x)
    torch.cuda.synchronize()
    moved = 2 * x.numel() * x.element_size() / (time.perf_counter() - began)
    return x.numel() * x.element_size() / seconds / moved


def main() -> None:
    """Each way in a process of its own, so that peak memory is its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=100_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--way", choices=("one", "separate"))
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.values, options.repeat)))
        return
    results = {}
    for way in ("separate", "one"):
        command = [sys.executable, __file__, "--values", str(options.values), "--repeat", str(options.repeat)]
        done = subprocess.run([*command, "--way", way], capture_output=True, text=True, check=True)
        results[way] = json.loads(done.stdout)
        print(f"{way:>9}: {results[way]}")
    print(f"ratio: {results['separate']['seconds'] / results['one']['seconds']:.2f}x; a chunk is {CHUNK * 4 / 1e6} MB")


if __name__ == "__main__":
    main()
