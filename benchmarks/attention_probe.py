"""The exact attention probe against the full S×S matrix, at 4096 tokens: memory and time of one causal pass.

    python benchmarks/attention_probe.py [--tokens 4096] [--heads 8] [--groups 2] [--head-size 64] [--json FILE]

Both give the largest logit of every head, with and without its mean entropy, in fp32 on this machine's CPU with one
thread. Each measurement is a process of its own: memory is the growth of the process's peak resident size over that
with q and k in place, time the median of `--repeats` passes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_stability.numerics.attention_probe import Mask, of_queries_and_keys

Statistics = tuple[torch.Tensor, torch.Tensor | None]


def full(query: torch.Tensor, key: torch.Tensor, scale: float, entropy: bool) -> Statistics:
    """All pairs at once; what is not needed any more is freed or overwritten."""
    heads, size = query.shape[2], query.shape[0]
    key_bhdk = key.permute(1, 2, 3, 0).repeat_interleave(heads // key.shape[2], dim=1)
    logits = (query.permute(1, 2, 0, 3) * scale) @ key_bhdk
    logits.masked_fill_(torch.ones(size, size, dtype=torch.bool).triu_(1), -torch.inf)
    largest = logits.amax(dim=(0, 2, 3))
    if not entropy:
        return largest, None
    probabilities = torch.softmax(logits, dim=-1)
    del logits
    return largest, torch.special.entr(probabilities).sum(dim=-1).mean(dim=(0, 2))


def probe(query: torch.Tensor, key: torch.Tensor, scale: float, entropy: bool) -> Statistics:
    """Tile by tile."""
    found = of_queries_and_keys(query, key, Mask(), scale=scale, entropy=entropy)
    return found.max_h, found.mean_entropy_h if entropy else None


WAYS: dict[str, Callable[..., Statistics]] = {"full": full, "probe": probe}


def measure(way: str, entropy: bool, options: argparse.Namespace) -> dict[str, object]:
    """Memory (MiB over q and k), seconds, and the result, in this process."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(options.tokens, 1, options.heads, options.head_size, generator=generator)
    key = torch.randn(options.tokens, 1, options.groups, options.head_size, generator=generator)
    scale = options.head_size**-0.5
    WAYS[way](query[:64], key[:64], scale, entropy)  # libraries load their own pages
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        largest, mean_entropy = WAYS[way](query, key, scale, entropy)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "mib": (peak - before) / 1024,
        "seconds": statistics.median(seconds),
        "max_logit": largest.tolist(),
        "entropy": None if mean_entropy is None else mean_entropy.tolist(),
    }


def main() -> int:
    """Measure, print a table, and say by exit code whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, value in (("tokens", 4096), ("heads", 8), ("groups", 2), ("head-size", 64), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    results = {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for entropy in (False, True):
            for way in WAYS:
                results[way, entropy] = pool.apply(measure, (way, entropy, options))
    holds = True
    sizes = f"{options.tokens} tokens, {options.heads}/{options.groups} heads of {options.head_size}"
    print(f"{sizes}, causal, fp32, 1 thread")
    for entropy in (False, True):
        of_full, of_probe = results["full", entropy], results["probe", entropy]
        torch.testing.assert_close(torch.tensor(of_full["max_logit"]), torch.tensor(of_probe["max_logit"]))
        memory = of_probe["mib"] / of_full["mib"]
        seconds = of_probe["seconds"] / of_full["seconds"]
        holds &= memory <= 1 / 8 and seconds <= 1.5
        line = f"  {'max and entropy' if entropy else 'max':16}"
        for way in WAYS:
            found = results[way, entropy]
            line += f"{way} {found['mib']:7.0f} MiB {found['seconds']:6.2f} s   "
        print(f"{line}probe/full: memory {memory:.3f}, time {seconds:.2f}")
    if options.json:
        names = {False: "max", True: "max and entropy"}
        options.json.write_text(json.dumps({f"{way}, {names[e]}": found for (way, e), found in results.items()}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
