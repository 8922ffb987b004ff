"""How well spikes are found: precision, recall, F1 and delay on labelled synthetic curves.

    python -m benchmarks.detection_quality [--runs 12] [--steps 9000] [--healthy 3] [--json FILE]

A fault is found if a rule alerts between its start and its end; its delay is the steps to the first alert there. Alerts
elsewhere, not within GRACE steps after a fault, are false; those within GAP steps of each other count once. Precision
is found faults over found faults and false alarms. A rule that alerts often finds a long fault by chance: the rows
"chance" say what it finds in the healthy stretch of equal length before each slow burn. Every rule sees every step
applied (`observe`), and, but for stock's and ZClip's, loss and gradient norm alike. The rules:

    ours           every detector at its defaults, any verdict from WATCH up
    mu + 3 sigma   loss or norm above mean + 3 standard deviations of its last 100 values
    mu + 6 sigma   the same with fewer false alarms
    OLMo-core      loss or norm above mean + 6 standard deviations of the last 128 steps, whatever they were
    10 x max       stock Megatron's check for spiky losses: loss of at least 10 x the largest of the first 100 steps
    ZClip          norm with z > 2.5 against exponential moving averages (alpha 0.97, 25 steps of warm-up); a flagged
                   norm enters the averages clipped
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.peers import Rule, olmo_core, sigmas, ten_times_max, zclip
from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.detect.curves import KINDS, Curve, Fault, synthesize
from megatron_stability.records import StepRecord

GRACE, GAP = 100, 20
SIGMAS = 0.01, 0.02, 0.05  # nats; loss noise of the curves in turn: large, usual and small batches


def ours() -> Rule:
    """Every detector at its defaults."""
    detectors = build(Detect())

    def alert(record: StepRecord) -> bool:
        found = {d.name: verdict for d in detectors if (verdict := d.inspect(record)) is not None}
        for detector in detectors:
            detector.learn(record, True)
        return bool(found)

    return alert


RULES: dict[str, Callable[[], Rule]] = {
    "ours": ours,
    "mu + 3 sigma": partial(sigmas, 3.0),
    "mu + 6 sigma": partial(sigmas, 6.0),
    "OLMo-core": olmo_core,
    "10 x max": ten_times_max,
    "ZClip": zclip,
}


def clusters(steps: Iterable[int]) -> int:
    """Alerts that are not within GAP steps of the one before."""
    count, last = 0, -GAP - 1
    for step in steps:
        count += step - last > GAP
        last = step
    return count


CHANCE = "chance"  # key of the healthy stretches beside the kinds of faults


def score(rule: Rule, curve: Curve) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """Delays of the found faults and number of faults by kind, and false alarms."""
    alerts = [record.step for record in curve.records if rule(record)]
    delays: dict[str, list[int]] = {kind: [] for kind in (*KINDS, CHANCE)}
    total = dict.fromkeys(delays, 0)
    before = [Fault(CHANCE, 2 * f.start - f.end - 1, f.start - 1) for f in curve.faults if f.kind == "slow burn"]
    for fault in (*curve.faults, *before):
        total[fault.kind] += 1
        first = next((step for step in alerts if fault.start <= step <= fault.end), None)
        if first is not None:
            delays[fault.kind].append(first - fault.start)
    false = [step for step in alerts if not any(f.start <= step <= f.end + GRACE for f in curve.faults)]
    return delays, total, clusters(false)


def median(values: list[int]) -> float:
    """Median; NaN of nothing."""
    return float(sorted(values)[len(values) // 2]) if values else math.nan


RECORDED = Path(__file__).parent / "data" / "recorded.json"  # by tests/drills/record_curves.py


def recorded() -> list[Curve]:
    """Curves of real runs with faults put in on purpose; none where the file is missing."""
    curves = []
    for run in json.loads(RECORDED.read_text())["curves"] if RECORDED.is_file() else ():
        columns = zip(run["loss"], run["grad_norm"], run["learning_rate"], strict=True)
        records = [
            StepRecord(
                step=step,
                first_sample=4 * (step - 1),
                samples=4,
                tokens=256.0,
                loss=loss,
                grad_norm=norm,
                learning_rate=lr,
            )
            for step, (loss, norm, lr) in enumerate(columns, start=1)
        ]
        curves.append(Curve(records, [Fault(*fault) for fault in run["faults"]]))
    return curves


def evaluate(name: str, runs: int, steps: int, healthy: int, first_seed: int) -> dict[str, float]:
    """One row of the table."""
    curves = [synthesize(first_seed + seed, steps, True, SIGMAS[seed % 3]) for seed in range(runs)]
    row = table_row(RULES[name], curves)
    quiet = sum(
        score(RULES[name](), synthesize(first_seed + 1000 + seed, 20000, False, SIGMAS[seed % 3]))[2]
        for seed in range(healthy)
    )
    row["false alarms per 20k healthy steps"] = quiet / healthy if healthy else math.nan
    real = recorded()
    return row | {f"recorded: {key}": value for key, value in (table_row(RULES[name], real) if real else {}).items()}


def table_row(rule: Callable[[], Rule], curves: Iterable[Curve]) -> dict[str, float]:
    """Precision, recall, F1, and recall and median delay by kind, over curves with faults."""
    delays: dict[str, list[int]] = {kind: [] for kind in (*KINDS, CHANCE)}
    total, false = dict.fromkeys(delays, 0), 0
    for curve in curves:
        found, faults, alarms = score(rule(), curve)
        false += alarms
        for kind in delays:
            delays[kind] += found[kind]
            total[kind] += faults[kind]
    hits, faults_in_all = sum(len(delays[kind]) for kind in KINDS), sum(total[kind] for kind in KINDS)
    precision, recall = hits / (hits + false) if hits + false else 0.0, hits / faults_in_all
    row = {"precision": precision, "recall": recall}
    row["f1"] = 2 * precision * recall / (precision + recall) if hits else 0.0
    for kind in delays:
        row[f"{kind}: recall"] = len(delays[kind]) / total[kind]
        row[f"{kind}: median delay"] = median(delays[kind])
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=12, help="curves with faults")
    parser.add_argument("--steps", type=int, default=9000, help="steps of each")
    parser.add_argument("--healthy", type=int, default=3, help="healthy curves of 20000 steps")
    parser.add_argument("--seed", type=int, default=5000, help="of the first curve; tune on others than the table's")
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    rows = {}
    for name in RULES:
        print(f"measuring {name} ...", file=sys.stderr)
        rows[name] = evaluate(name, args.runs, args.steps, args.healthy, args.seed)
    print(f"{'':40}" + "".join(f"{name:>14}" for name in rows))
    for key in rows["ours"]:
        print(f"{key:40}" + "".join(f"{row[key]:14.3f}" for row in rows.values()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1).replace("NaN", '"nan"'), encoding="utf-8")


if __name__ == "__main__":
    main()
