"""docs/proof.md and its picture, from the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks.proof.experiments import EXPERIMENTS, Claim, Experiment, Rows, of, sensitivity
from benchmarks.results import ROOT, commit_of

PAGE, FIGURE = ROOT / "docs/proof.md", ROOT / "docs/proof.svg"
HEAD = """# Small-scale proof

Published instabilities, rerun through the product on a byte-level GPT of three layers and width 64 on the sources of
Python's standard library: 160 steps of 8 x 64 tokens, Megatron's own loop on a CPU. Figures are means over seeds ±
their standard deviation; `benchmarks/data/proof.json` has every loss. A claim that does not hold stands here as well.

`python -m benchmarks.proof --quick` makes this page; {commit}.
"""


def write(found: Mapping[str, Rows], claims: Mapping[str, Sequence[Claim]], results: Path) -> None:
    """The page with its tables, and the picture of the first experiment."""
    parts = [HEAD.format(commit=f"the results are of {commit_of(results)}")]
    for name, rows in found.items():
        experiment = EXPERIMENTS[name]
        parts += [f"\n## {experiment.question}\n", f"After {experiment.source}.\n", _table(experiment, rows), ""]
        parts += [f"- {'holds' if claim.holds else '**does not hold**'}: {claim.says}" for claim in claims[name]]
        if name == "attention-logits":
            parts += ["\n![Final loss and largest logit against the learning rate](proof.svg)\n", _sensitivities(rows)]
            FIGURE.write_text(_picture(rows), encoding="utf-8")
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _table(experiment: Experiment, rows: Rows) -> str:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    values = sorted({row["value"] for row in rows}, key=float)
    lines = [
        f"| Arm | {experiment.flag} | " + " | ".join(experiment.shows.values()) + " |",
        "|---|---|" + "---|" * len(experiment.shows),
    ]
    for arm in arms:
        for value in values:
            cells = [_cell(rows, arm, key, value) for key in experiment.shows]
            lines.append(f"| {arm} | {value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: Rows, arm: str, key: str, value: str) -> str:
    raw = [row[key] for row in rows if row["arm"] == arm and row["value"] == value]
    known = [float(each) for each in raw if each is not None]
    if not known:
        return "–"
    missing = f", {len(raw) - len(known)} without" if len(known) < len(raw) else ""
    spread = f" ± {stdev(known):.2g}" if len(known) > 1 else ""
    return f"{mean(known):.4g}{spread}{missing}"


def _sensitivities(rows: Rows) -> str:
    seeds, values = sorted({row["seed"] for row in rows}), sorted({row["value"] for row in rows}, key=float)
    first = mean(row["first_loss"] for row in rows)
    lines = [
        f"LR sensitivity, the mean of min(loss, {first:.2f}) over {', '.join(values)} less the best of them:\n",
        "| Arm | Sensitivity | Loss at the best rate |",
        "|---|---|---|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        each = [sensitivity(rows, arm, seed) for seed in seeds]
        best = min(mean(of(rows, arm, "final_loss", value)) for value in values)
        lines.append(f"| {arm} | {mean(each):.3f} ± {stdev(each):.2g} | {best:.3f} |")
    return "\n".join(lines)


COLOURS = ("#e63946", "#2a9d8f", "#e07b39", "#457b9d")
WIDTH, HEIGHT = 420, 240


def _picture(rows: Rows) -> str:
    """Two panels over the learning rate, both axes logarithmic for logits."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    body = "".join(
        f'<g transform="translate({70 + at * (WIDTH + 90)} 50)">{_panel(rows, arms, key, title)}</g>'
        for at, (key, title) in enumerate(
            (("final_loss", "final loss (nats)"), ("max_logit", "largest attention logit"))
        )
    )
    legend = "".join(
        f'<text x="{70 + 120 * at}" y="20" fill="{COLOURS[at]}">{arm}</text>' for at, arm in enumerate(arms)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 {HEIGHT + 110}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{legend}{body}</svg>\n'
    )


def _panel(rows: Rows, arms: Sequence[str], key: str, title: str) -> str:
    values = sorted({row["value"] for row in rows}, key=float)
    points = {
        arm: [
            (float(v), mean(known)) for v in values if (known := [x for x in of(rows, arm, key, v) if math.isfinite(x)])
        ]
        for arm in arms
    }
    log = key == "max_logit"
    heights = [math.log10(max(y, 1e-3)) if log else y for each in points.values() for _, y in each]
    low, high = min(heights), max(heights) + 1e-9
    left, right = math.log10(float(values[0])), math.log10(float(values[-1])) + 1e-9

    def at(x: float, y: float) -> str:
        y = math.log10(max(y, 1e-3)) if log else y
        return f"{WIDTH * (math.log10(x) - left) / (right - left):.1f},{HEIGHT * (1 - (y - low) / (high - low)):.1f}"

    parts = [f'<text y="-8">{title}</text><rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#8d99ae"/>']
    for share in (0.0, 0.5, 1.0):
        level = low + share * (high - low)
        shown = 10**level if log else level
        parts.append(f'<text x="-6" y="{HEIGHT * (1 - share) + 4:.1f}" text-anchor="end">{shown:.3g}</text>')
    for value in values:
        x = at(float(value), 1.0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT + 16}" text-anchor="middle">{value}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 34}" text-anchor="middle">learning rate</text>')
    for colour, arm in zip(COLOURS, arms, strict=False):
        line = " ".join(at(*point) for point in points[arm])
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return "".join(parts)
