"""Curves of `run.sh` from the runs' ledgers: largest attention logit, loss, heads clipped a step; as SVG and as JSON.

    python examples/muonclip/plot.py DIR [--tau 10] [--out DIR]

Prints, for each layout, the largest logit of any step's forward, without and with the clip; the exit code is 1 where
one with the clip is above τ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import StepEntry, read

Steps = tuple[StepEntry, ...]
LAYOUTS = {"dp2": "DP 2, distributed optimizer", "tp2pp2": "TP 2 × PP 2"}
COLOURS = {"without": "#e07b39", "with": "#3b82f6"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 420, 170, 60, 50, 40


def main() -> int:
    """Read four ledgers, draw, print."""
    parser = argparse.ArgumentParser(description="Draw what run.sh trained.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tau", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=None, help="where muonclip.svg and muonclip.json go; default: DIR")
    options = parser.parse_args()
    try:
        runs = {
            (layout, way): read(options.folder / f"{layout}-{way}").surviving for layout in LAYOUTS for way in COLOURS
        }
    except UsageError as error:
        print(f"muonclip: {error}", file=sys.stderr)
        return error.exit_code
    out = options.out or options.folder
    (out / "muonclip.svg").write_text(picture(runs, options.tau), encoding="utf-8")
    (out / "muonclip.json").write_text(figures(runs, options.tau), encoding="utf-8")
    held = True
    for layout, title in LAYOUTS.items():
        without, clipped = (max(map(logit, runs[layout, way])) for way in COLOURS)
        held &= clipped <= options.tau
        print(f"{title}: largest logit {without:.4g} without, {clipped:.4g} with QK-clip at τ = {options.tau:g}")
    print(out / "muonclip.svg")
    return 0 if held else 1


def figures(runs: dict[tuple[str, str], Steps], tau: float) -> str:
    """What the picture shows, step by step from step 1; withheld steps' numbers too."""
    curves = {
        f"{layout}-{way}": {
            "withheld_steps": [step.step for step in steps if step.action != "apply"],
            "max_logit": [logit(step) for step in steps],
            "loss": [float(f"{step.loss:.4g}") for step in steps],
            "heads_clipped": [int(heads(step)) for step in steps],
        }
        for (layout, way), steps in runs.items()
    }
    body = ",\n".join(
        f' "{name}": {{\n' + ",\n".join(f'  "{key}": {json.dumps(values)}' for key, values in run.items()) + "\n }"
        for name, run in curves.items()
    )
    return f'{{\n "tau": {tau:g},\n{body}\n}}\n'


def logit(step: StepEntry) -> float:
    """The largest attention logit of a step's forward, over all layers, heads and ranks."""
    return step.signals["attention/max_logit"]


def heads(step: StepEntry) -> float:
    """Heads that the step's clip scaled."""
    return step.signals.get("qk_clip/heads", 0.0)


def picture(runs: dict[tuple[str, str], Steps], tau: float) -> str:
    """Three rows, one column a layout; the scale of a row is common to its panels."""
    rows: list[tuple[str, Callable[[StepEntry], float]]] = [
        ("largest attention logit", logit),
        ("log10 loss (nats a token)", lambda step: math.log10(step.loss) if step.loss > 0 else math.nan),
        ("heads clipped in the step", heads),
    ]
    parts = []
    for row, (title, value) in enumerate(rows):
        values = [value(step) for steps in runs.values() for step in steps]
        low, high = (pick(v for v in values if math.isfinite(v)) for pick in (min, max))
        for column, layout in enumerate(LAYOUTS):
            x, y = LEFT + column * (WIDTH + GAP + 20), TOP + row * (HEIGHT + GAP)
            inner = [_curve(runs[layout, way], value, low, high, colour) for way, colour in COLOURS.items()]
            if row == 0:
                level = HEIGHT * (1 - (tau - low) / (high - low))
                inner.append(f'<path d="M0 {level:.1f}H{WIDTH}" stroke="black" stroke-dasharray="4 3"/>')
                inner.append(f'<text x="4" y="{level - 4:.1f}">τ = {tau:g}</text>')
                inner.append(f'<text x="{WIDTH / 2}" y="-22" text-anchor="middle">{LAYOUTS[layout]}</text>')
            inner.append(f'<text x="0" y="-6">{title}</text>')
            inner += [
                f'<text x="-6" y="{at}" text-anchor="end">{number:.3g}</text>'
                for at, number in ((10, high), (HEIGHT, low))
            ]
            last = max(step.step for way in COLOURS for step in runs[layout, way])
            inner.append(f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">step {last}</text>')
            box = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#8d99ae"/>'
            parts.append(f'<g transform="translate({x} {y})">{box}{"".join(inner)}</g>')
    width, height = LEFT + 2 * (WIDTH + GAP + 20), TOP + len(rows) * (HEIGHT + GAP)
    legend = "".join(
        f'<text x="{LEFT + at * 140}" y="16" fill="{colour}">{way} QK-clip</text>'
        for at, (way, colour) in enumerate(COLOURS.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>{legend}{"".join(parts)}</svg>\n'
    )


def _curve(steps: Steps, value: Callable[[StepEntry], float], low: float, high: float, colour: str) -> str:
    last, span = max(step.step for step in steps), (high - low) or 1.0
    points = [(WIDTH * step.step / last, HEIGHT * (1 - (value(step) - low) / span)) for step in steps]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points if math.isfinite(y))
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


if __name__ == "__main__":
    sys.exit(main())
