"""What all detectors together cost: CPU microseconds a step and bytes of saved state.

    python benchmarks/detector_cost.py [--steps 20000]

In the rows of single detectors every optional signal is present on every step, which no real run does. "all, no
optional signal" is a run that measures none: detectors without their signals are idle there, as in training. The state
is measured as JSON at its largest, with every window full. us/step is the first decile over chunks of steps, which a
busy machine disturbs least; the median stands beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from typing import Any

from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect.base import Detector, Stateless, silent
from megatron_stability.detect.config import Detect
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Decision, StepRecord, Verdict

CHUNK = 250
NORMAL = {
    "grad_norm/layer_max": 0.3,
    "grad_norm/layer_median": 0.1,
    "param_norm": 100.0,
    "embedding_norm": 30.0,
    "attention/max_logit": 12.0,
    "attention/min_entropy": 1.0,
    "fp8/saturation": 0.0,
    "fp8/underflow": 0.01,
    "fp8/scale_age": 3.0,
    "moe/max_load": 1.4,
    "moe/dropped": 0.01,
    "moe/router_z": 5.0,
    "data/repeated": 0.1,
    "data/entropy": 5.0,
    "fp8/amax_rise": 1.5,
    "fp8/amax_fall": 1.5,
    "fp8/gemms": 100.0,
    "fp8/fallbacks": 0.0,
    "attention/nonpositive_heads": 0.0,
}


def records(steps: int, signals: bool) -> list[StepRecord]:
    """Healthy steps with noise."""
    rng = random.Random(1)
    return [
        StepRecord(
            step=i,
            first_sample=i,
            samples=1,
            tokens=4096.0,
            loss=2.0 + 8.0 * i**-0.5 + rng.gauss(0, 0.02),
            grad_norm=math.exp(rng.gauss(-1, 0.2)),
            learning_rate=min(i / 1000, 1.0) * 3e-4,
            signals={"clip_grad": 1.0, "step_seconds": rng.uniform(0.9, 1.1), **(NORMAL if signals else {})},
        )
        for i in range(1, steps + 1)
    ]


class Unmoved:
    """A policy that always applies: its cost has a row of its own."""

    applied = Decision(step=0, action=Action.APPLY, advised=Action.APPLY, reason="")

    def decide(self, record: StepRecord, verdicts: Sequence[Verdict]) -> Decision:
        """Apply."""
        return self.applied

    def settle(self, decision: Decision) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def seconds(detectors: Sequence[Detector], steps: Sequence[StepRecord]) -> float:
    """Seconds a step for inspect and learn, as the pipeline calls them."""
    pipeline: Pipeline[StepRecord] = Pipeline(lambda record: record, detectors, Unmoved(), (), Episodes(detectors, 50))
    pipeline = pipeline.without(silent(detectors, steps[0].signals))
    start = time.process_time()
    for record in steps:
        pipeline.finish(*pipeline.decide(record))
    return (time.process_time() - start) / len(steps)


def policy_cost(steps: Sequence[StepRecord]) -> tuple[list[float], int]:
    """Microseconds a step of the policy without a verdict, by chunk, and bytes of its state."""
    policy, cost = TablePolicy(Decide(), "act"), []
    for at in range(0, len(steps), CHUNK):
        start = time.process_time()
        for record in steps[at : at + CHUNK]:
            policy.settle(policy.decide(record, ()))
        cost.append((time.process_time() - start) / CHUNK * 1e6)
    return sorted(cost), len(json.dumps(policy.state_dict()))


def empty_call() -> float:
    """Seconds of a call of a method that does nothing: a yardstick for how busy and how fast the machine is."""
    detector, calls = Stateless(), 100_000
    start = time.process_time()
    for _ in range(calls):
        detector.reset()
    return (time.process_time() - start) / calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    steps = parser.parse_args().steps
    bare, full = records(steps, signals=False), records(steps, signals=True)
    print(f"an empty method call takes {empty_call() * 1e9:.0f} ns here and now")
    print(f"{'detector':26} {'us/step':>9} {'median':>9} {'state bytes':>12}")
    rows: list[tuple[str, list[StepRecord], list[Detector]]] = [
        (detector.name, full, [detector]) for detector in build(Detect())
    ]
    rows += [("all, no optional signal", bare, build(Detect())), ("all, every signal", full, build(Detect()))]
    for label, run, detectors in rows:
        cost, largest = [], 0
        for at in range(0, len(run), CHUNK):
            cost.append(seconds(detectors, run[at : at + CHUNK]) * 1e6)
            largest = max(largest, len(json.dumps({d.name: d.state_dict() for d in detectors})))
        cost.sort()
        print(f"{label:26} {cost[len(cost) // 10]:9.2f} {cost[len(cost) // 2]:9.2f} {largest:12d}")
    cost, largest = policy_cost(full)
    print(f"{'policy':26} {cost[len(cost) // 10]:9.2f} {cost[len(cost) // 2]:9.2f} {largest:12d}")


if __name__ == "__main__":
    main()
