"""`megatron-stability cadence`: the interval between saves that loses least, and the curve around it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_stability import terminal
from megatron_stability.checkpoints.cadence import formulas, measured
from megatron_stability.checkpoints.cadence.formulas import Costs
from megatron_stability.checkpoints.cadence.measured import Measured
from megatron_stability.errors import EXIT_FINE, UsageError
from megatron_stability.ledger import ledger
from megatron_stability.report import pages

EXAMPLE = """examples:
  megatron-stability cadence --save-seconds 40 --restart-seconds 600 --mtbf-hours 8
  megatron-stability cadence --ledger runs/a --out cadence.html
  megatron-stability cadence --ledger runs/a --mtbf-hours 8      # a run that has not failed yet"""

LEAST, MOST = 1e-6, 1e9  # seconds or hours; beyond them the arithmetic says nothing


def run(argv: Sequence[str]) -> int:
    """`megatron-stability cadence`.

    Args:
        argv: the arguments after it.

    Returns:
        0.

    Raises:
        UsageError: an impossible value, or no mean time between failures to be had.
    """
    options = _parser().parse_args(argv)
    if options.out is not None:
        pages.check("--out", options.out)
    costs, step_s, restart_is_known = _costs(options)
    document = study(costs, options.hours, step_s, options.seed)
    if options.out is not None:
        pages.write("--out", options.out, _page(document))
    if options.json:
        json.dump(document, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return EXIT_FINE
    _print(document, restart_is_known)
    if options.out is not None:
        terminal.console().print(f"curve: {options.out}", markup=False, soft_wrap=True)
    return EXIT_FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability cadence",
        description="How often to save, from measured costs: Young, Daly, and a simulation with detection delay.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    parser.add_argument("--ledger", type=Path, metavar="RUN", help="measure there what is not given below")
    parser.add_argument("--save-seconds", help="that a save blocks training", **number)
    parser.add_argument("--interference-seconds", help="that an async save slows it, in all (default: 0)", **number)
    parser.add_argument("--restart-seconds", help="from a failure until training goes on (default: 0)", **number)
    parser.add_argument("--mtbf-hours", help="mean time between failures of the whole job", **number)
    parser.add_argument("--step-seconds", help="duration of one step: also gives intervals in steps", **number)
    parser.add_argument("--silent-share", default=0.0, help="share of failures that are seen late, 0 to 1", **number)
    parser.add_argument("--detection-delay-seconds", default=0.0, help="how late, on average", **number)
    parser.add_argument("--hours", default=720.0, help="of the run, for lost hours (default: 720)", **number)
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    parser.add_argument("--out", type=Path, metavar="HTML", help="write the curve as one self-contained page")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _costs(options: argparse.Namespace) -> tuple[Costs, float | None, bool]:
    """What a save, a restart and the failures cost, the seconds of a step, given or measured; is a restart known?"""
    for name in ("save_seconds", "hours", "mtbf_hours", "step_seconds"):
        value = getattr(options, name)
        if value is not None and not LEAST <= value <= MOST:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be from {LEAST:g} to {MOST:g}")
    for name in ("interference_seconds", "restart_seconds", "detection_delay_seconds"):
        value = getattr(options, name)
        if value is not None and not 0 <= value <= MOST:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be from 0 to {MOST:g}")
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: must be 0 or more")
    if not 0 <= options.silent_share <= 1:
        raise UsageError(f"--silent-share {options.silent_share:g}: must be from 0 to 1")
    seen, failures_s = _measured(options)
    mtbf_s = options.mtbf_hours * 3600 if options.mtbf_hours is not None else None
    costs = Costs(
        save_s=_one(options, "--save-seconds", options.save_seconds, seen.save_s, "no save"),
        mtbf_s=_one(options, "--mtbf-hours", mtbf_s, failures_s, "no restart"),
        restart_s=_first(options.restart_seconds, seen.restart_s, 0.0),
        interference_s=_first(options.interference_seconds, seen.interference_s, 0.0),
        silent=options.silent_share,
        delay_s=options.detection_delay_seconds,
    )
    known = _first(options.restart_seconds, seen.restart_s) is not None
    return costs, _first(options.step_seconds, seen.step_s), known


def _measured(options: argparse.Namespace) -> tuple[Measured, float | None]:
    """What the ledger shows, and the mean time between failures in seconds, by --step-seconds where it is given."""
    if options.ledger is None:
        return Measured(), None
    inside = options.ledger / "stability"
    view = ledger.read(inside if inside.is_dir() else options.ledger)
    seen, failures = measured.measure(view), len(view.runs) - 1
    if options.step_seconds is None or failures < 1:
        return seen, seen.mtbf_s
    return seen, float(len(view.steps) * options.step_seconds / failures)


def _first(*values: float | None) -> Any:
    return next((value for value in values if value is not None), None)


def _one(options: argparse.Namespace, flag: str, given: float | None, seen: float | None, lacks: str) -> float:
    value = _first(given, seen)
    if not value:
        where = f"--ledger {options.ledger} tells of {lacks}" if options.ledger is not None else "no --ledger is given"
        raise UsageError(f"{flag}: {where}; give {flag}")
    return float(value)


def study(costs: Costs, hours: float, step_s: float | None, seed: int) -> dict[str, Any]:
    """Everything that is printed.

    Args:
        costs: what was measured.
        hours: of the run.
        step_s: seconds a step, or None.
        seed: of the simulation.

    Returns:
        JSON primitives: inputs, the three intervals with the hours each loses, and the curve.
    """
    grid = formulas.intervals(costs)
    lost = [share * hours for share in formulas.simulated_lost_shares(costs, grid, seed)]
    least = min(range(len(grid)), key=lost.__getitem__)
    named = {
        "young": formulas.young(costs.per_save_s, costs.mtbf_s),
        "daly": formulas.daly(costs.per_save_s, costs.mtbf_s),
        "simulated": grid[least],
    }
    shares = formulas.simulated_lost_shares(costs, list(named.values()), seed)
    return {
        "costs": {name: getattr(costs, name) for name in costs.__slots__} | {"per_save_s": costs.per_save_s},
        "hours": hours,
        "intervals": {
            name: {
                "seconds": T,
                "steps": max(1, round(T / step_s)) if step_s else None,
                "lost_hours": share * hours,
            }
            for (name, T), share in zip(named.items(), shares, strict=True)
        },
        "curve": [{"seconds": T, "lost_hours": hours_lost} for T, hours_lost in zip(grid, lost, strict=True)],
    }


def _print(document: dict[str, Any], restart_is_known: bool) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("save every", "seconds", "steps", f"lost hours of {document['hours']:g}"):
        table.add_column(name, justify="left" if name == "save every" else "right")
    for name, row in document["intervals"].items():
        steps = f"{row['steps']:,}" if row["steps"] else "–"
        table.add_row(name, f"{row['seconds']:,.0f}", steps, f"{row['lost_hours']:.1f}")
    console = terminal.console()
    console.print(table)
    costs = document["costs"]
    told = {"save": "per_save_s", "restart": "restart_s", "between failures": "mtbf_s"}
    values = [f"{name} {costs[key]:,.3g} s" for name, key in told.items()]
    if not restart_is_known:
        values[1] = "restart not measured, taken as 0"
    console.print(", ".join(values))
    if not restart_is_known:
        console.print("--restart-seconds says what a restart costs; lost hours are without it here")
    if costs["silent"] and costs["delay_s"]:
        window = costs["delay_s"] / document["intervals"]["simulated"]["seconds"]
        keep = 2 + int(3 * window)  # an exponential delay exceeds three times its mean in 5 % of cases
        console.print(f"a fault seen late spoils about {window:.1f} saves; --stability-checkpoint-keep {keep} or more")


def _page(document: dict[str, Any]) -> str:
    import plotly.graph_objects as go

    curve = document["curve"]
    figure = go.Figure(
        go.Scatter(x=[p["seconds"] for p in curve], y=[p["lost_hours"] for p in curve], name="simulated", mode="lines")
    )
    for (name, row), colour in zip(document["intervals"].items(), ("#e07b39", "#10b981", "#3b82f6"), strict=True):
        figure.add_vline(x=row["seconds"], line={"color": colour, "dash": "dot"}, annotation_text=name)
    figure.update_xaxes(type="log", title="useful seconds between saves")
    figure.update_yaxes(title=f"lost hours of {document['hours']:g}", rangemode="tozero")
    figure.update_layout(title="Checkpoint cadence", template="plotly_white")
    return str(figure.to_html(full_html=True, include_plotlyjs=True, config={"displaylogo": False}))
