"""What presets do on healthy curves: steps withheld, rewinds, halts, a lowered rate, episodes, pages.

    python -m benchmarks.healthy_runs [--runs 8] [--seed 200] [--out benchmarks/data/healthy_runs.json]

Curves of 20 000 steps with heavy-tailed noise that hangs together from step to step (`detect/curves.py`), its size in
turn that of large, usual and small batches. Thresholds were chosen on other seeds. Peers' rules see the same curves.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.policy_corners import PEERS
from benchmarks.results import PURE
from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.decide.urgency import pages
from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.detect.curves import Curve, synthesize
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Change, Decision, Episode, StepRecord

STEPS = 20_000
SIGMAS = 0.01, 0.02, 0.05, 0.1  # nats


class Heard:
    """A sink that counts what is told."""

    def __init__(self, grouping: Episodes) -> None:
        self.count: Counter[str] = Counter()
        self.events: list[tuple[int, Episode | Decision]] = []
        self._grouping, self._lowered = grouping, -1

    def write(self, record: StepRecord, decision: Decision) -> None:
        """A step."""
        self.count["lowered"] += record.step <= self._lowered
        if decision.action is Action.APPLY:
            return
        self.count[str(decision.action)] += 1
        if "factor" in decision.parameters:
            self._lowered = record.step + int(decision.parameters["steps"])
        self.events.append((min((each.incident for each in self._grouping.open), default=record.step), decision))

    def write_episode(self, change: Change, episode: Episode) -> None:
        """An episode."""
        self.count["episodes"] += change is Change.OPENED
        self.events.append((episode.incident, episode))


def run(curve: Curve, preset: str) -> tuple[Counter[str], int]:
    """Counts of one curve, and its pages; a rewind goes on with the next step, for the curve knows no other."""
    detectors, decide = build(Detect()), Decide(preset=preset)
    grouping = Episodes(detectors, decide.quiet_steps)
    heard = Heard(grouping)
    of = Pipeline(lambda record: record, detectors, TablePolicy(decide, "act"), (heard,), grouping)
    for record in curve.records:
        of.finish(*of.decide(record))
    return heard.count, len(list(pages(heard.events)))


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8, help="curves")
    parser.add_argument("--seed", type=int, default=200, help="of the first curve; tune on others than the table's")
    parser.add_argument("--out", type=Path, help="write the table here, as JSON")
    args = parser.parse_args()
    of = results.stamp((*PURE, "benchmarks/healthy_runs.py", "benchmarks/policy_corners.py"))
    table: dict[str, Any] = {"seed": args.seed, "steps": STEPS * args.runs}
    total: dict[str, Counter[str]] = {preset: Counter() for preset in ("safe", "field")}
    most, peers = 0, Counter[str]()
    for number in range(args.runs):
        curve = synthesize(args.seed + number, STEPS, False, SIGMAS[number % len(SIGMAS)])
        for preset, sums in total.items():
            count, paged = run(curve, preset)
            sums += count + Counter(pages=paged)
            most = max(most, count["episodes"])
        for rule, make in PEERS.items():
            acts = make()
            peers[rule] += sum(acts(record) for record in curve.records)
        print(args.seed + number, {preset: dict(sums) for preset, sums in total.items()}, dict(peers), flush=True)
    kinds = ("skip", "rewind", "halt", "scale_lr", "scale_weight_decay", "lowered", "episodes", "pages")
    counts = {preset: {kind: sums[kind] for kind in kinds} for preset, sums in total.items()}
    table |= {"most episodes of a run": most, **counts, "steps acted on by peers": peers}
    if args.out:
        results.write(args.out, table, of)


if __name__ == "__main__":
    main()
