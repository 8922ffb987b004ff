"""Claim: tier 1 of FP8 telemetry costs at most 0.5 % of a step of the CPU model.

    python -m benchmarks.fp8_tier1 [--hidden-size 512] [--steps 60] [--json FILE]

One real Megatron run with emulated delayed scaling, whose telemetry is on in every second step: the comparison of each
amax with its past, the age of scales, the counts, and what is learnt of an accepted step. The upkeep of the scales
themselves is training and runs in both. Two readings, as in `step_overhead`: the time inside the calls over the step
time, and the median ratio of neighbouring steps with a 95 % interval from a seeded bootstrap.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.step_overhead import WARM_UP, flags, interval
from megatron_stability.megatron.start.ranks import rendezvous

LIMIT = 0.005


def measure(hidden_size: int, steps: int, folder: str) -> list[tuple[bool, float, float]]:
    """(telemetry on, step seconds, seconds inside its calls) of each step after the warm-up."""
    from megatron_stability.megatron.start.job import Job

    job = Job((), None, cpu=True, patched=True)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | rendezvous()
    job.prepare()
    from megatron_stability import config as tree
    from megatron_stability.megatron import cpu
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.fp8.hook import Fp8Hook
    from megatron_stability.megatron.runtime import Runtime
    from megatron_stability.megatron.start import pretrain_gpt as gpt

    marks: list[tuple[bool, float, list[float]]] = []

    class Alternating(Runtime):
        """Notes the beginning of each step; the FP8 hook speaks in every second one."""

        def train_begins(self, *live: Any) -> None:
            super().train_begins(*live)
            (hook,) = (each for each in self._hooks if isinstance(each, Fp8Hook))
            vars(hook)["observe"] = timed(hook.observe, dict)
            vars(hook)["update_done"] = timed(hook.update_done, lambda: None)

        def step_begins(self) -> None:
            marks.append((len(marks) % 2 == 1, time.perf_counter(), []))
            super().step_begins()

    def timed(call: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
        def when_on(*arguments: Any) -> Any:
            on, _, inside = marks[-1]
            if not on:
                return otherwise()
            began = time.perf_counter()
            result = call(*arguments)
            inside.append(time.perf_counter() - began)
            return result

        return when_on

    def on_arguments(args: Any) -> None:
        overrides = {
            "stability_record_dir": folder,
            "stability_fp8_emulate": "delayed",
            "stability_fp8_sample_every": "1000000",  # no tier 2
        }
        handle.install(Alternating(tree.load(overrides=overrides), args))

    sys.argv = ["fp8_tier1", *cpu.FLAGS, *flags(hidden_size, steps, folder), "--stability-mode", "off"]
    gpt.main(on_arguments=on_arguments)
    starts = [began for _, began, _ in marks]
    rows = zip(marks, starts[1:], strict=False)
    return [(on, end - began, math.fsum(inside)) for (on, began, inside), end in rows][WARM_UP:]


def main() -> int:
    """Print both readings; exit 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.hidden_size, options.steps, folder)
    on = [row for row in rows if row[0]]
    ratios = [b[1] / a[1] if b[0] else a[1] / b[1] for a, b in zip(rows[::2], rows[1::2], strict=False)]
    low, high = interval(ratios)
    result = {
        "steps_on": len(on),
        "step_seconds_off_median": statistics.median(row[1] for row in rows if not row[0]),
        "inside_seconds_median": statistics.median(row[2] for row in on),
        "inside_share": math.fsum(row[2] for row in on) / math.fsum(row[1] for row in on),
        "paired_ratio_median": statistics.median(ratios),
        "paired_ratio_95": [low, high],
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["inside_share"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
