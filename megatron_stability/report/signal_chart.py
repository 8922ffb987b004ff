"""The report's figures of measured signals: a row a family, and attention as layer × step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_stability.ledger.entries import AttentionEntry
from megatron_stability.report.charts import RUN_COLOURS, styled, thin
from megatron_stability.report.episode_chart import TIER_COLOURS
from megatron_stability.report.runview import Curve, RunView
from megatron_stability.report.tags import DERIVED, HIDDEN
from megatron_stability.signals import SETS, SIGNALS
from megatron_stability.signals import row as row_of

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
POINTS = 1500  # drawn points a curve; each bucket of steps keeps its lowest and highest
STRIPES = 300  # episodes shown, the gravest
ROW = 170.0  # pixels
COLUMNS = 600  # steps of a heat map, at most; each column has the worst of what it stands for
MEANS = {"log_z/mean": "log_z/sum", "log_z/mean_square": "log_z/square_sum"}
#: A table's field, its title, and what stands for a layer or for neighbouring steps.
MAPS: tuple[tuple[str, str, Callable[[Sequence[float]], float]], ...] = (
    ("max_logit_lh", "Largest attention logit", max),
    ("entropy_lh", "Least attention entropy (nats)", min),
)


def signals(runs: Sequence[RunView]) -> go.Figure | None:
    """A row for each family and unit that a run measured; None where none did."""
    curves = [_curves(run) for run in runs]
    rows: dict[str, list[str]] = {}
    for name in [name for name in _order(curves) if not name.endswith("/at")]:
        rows.setdefault(_row(name), []).append(name)
    if not rows:
        return None
    figure = make_subplots(
        rows=len(rows),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.3 / len(rows) if len(rows) > 1 else 0.0,
        subplot_titles=[
            escape(f"{title}: {', '.join(names)}" if len(names) < 7 else title) for title, names in rows.items()
        ],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    for run, known, colour in zip(runs, curves, cycle(RUN_COLOURS)):
        for row, names in enumerate(rows.values(), 1):
            for name, dash in zip(names, cycle(DASHES)):
                if name in known:
                    _draw(figure, row, run, known[name], colour, dash)
    _stripes(figure, runs)
    figure.update_xaxes(title_text="step", showticklabels=True, row=len(rows), col=1)
    figure.update_layout(meta="steps", height=ROW * len(rows) + 120, hovermode="closest", showlegend=False)
    return styled(figure)


def layers(runs: Sequence[RunView]) -> go.Figure | None:
    """Layer × step of the largest logit and the least entropy, of each run with tables; None where none has any."""
    known = [run for run in runs if run.attention]
    if not known:
        return None
    panels = [(run, *each) for run in known for each in MAPS]
    titles = [escape(f"{title} ({run.name})") for run, _, title, _ in panels]
    figure = make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.3 / len(panels), subplot_titles=titles
    )
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    for row, (run, field, title, worst) in enumerate(panels, 1):
        tables = run.attention
        size = math.ceil(len(tables) / COLUMNS)
        groups = [tables[first : first + size] for first in range(0, len(tables), size)]
        names = list(dict.fromkeys(layer for table in tables for layer in table.layers))
        values = [
            [_worst(worst, [v for table in group for v in _heads(table, field, layer)]) for group in groups]
            for layer in names
        ]
        figure.add_heatmap(
            x=[group[-1].step for group in groups],
            y=names,
            z=values,
            colorscale="Viridis",
            reversescale=worst is min,
            colorbar={"len": 1 / len(panels), "y": 1 - (row - 0.5) / len(panels), "thickness": 12},
            hovertemplate="step %{x}, %{y}: %{z:.4g}<extra>" + title + "</extra>",
            row=row,
            col=1,
        )
    figure.update_xaxes(title_text="step", showticklabels=True, row=len(panels), col=1)
    deepest = max(len(table.layers) for run in known for table in run.attention[-1:])
    figure.update_layout(meta="steps", height=len(panels) * (120 + 12 * min(deepest, 40)) + 80)
    return styled(figure)


def _curves(run: RunView) -> dict[str, Curve]:
    """What is drawn of a run: its signals, with means in the place of sums."""
    found = {name: curve for name, curve in run.signals.items() if name not in HIDDEN}
    weight = run.signals.get("log_z/weight")
    if weight is not None:
        weights = dict(zip(weight.steps, weight.values, strict=True))
        for mean, total in MEANS.items():
            sums = run.signals.get(total, Curve(total, [], []))
            points = [(s, v / weights[s]) for s, v in zip(sums.steps, sums.values, strict=True) if weights.get(s)]
            found[mean] = Curve(mean, [step for step, _ in points], [value for _, value in points])
    return found


def _order(curves: Sequence[dict[str, Curve]]) -> list[str]:
    """Names in the order of the table of signals, then others."""
    place = {name: at for at, name in enumerate(SIGNALS)}
    place |= {mean: place[total] for mean, total in MEANS.items()}
    names = {name for known in curves for name in known}
    return sorted(names, key=lambda name: (place.get(name, len(place)), name))


def _row(name: str) -> str:
    """Signals of a family share a row where they share a unit."""
    family = name.partition("/")[0] if "/" in name else name
    if name in DERIVED:
        unit = DERIVED[name].unit
    else:
        unit = row_of(name).unit if name in SIGNALS or name.startswith(SETS) else ""
    return f"{family} ({unit})" if unit else family


def _draw(figure: go.Figure, row: int, run: RunView, curve: Curve, colour: str, dash: str) -> None:
    points = list(thin(curve.steps, curve.values, POINTS))
    figure.add_scatter(
        x=[step for step, _ in points],
        y=[value for _, value in points],
        mode="lines" if len(points) > 1 else "markers",
        line={"color": colour, "width": 1.6, "dash": dash},
        name=escape(curve.name),
        hovertemplate="step %{x}: %{y:.6g}<extra>" + escape(f"{run.name}, {curve.name}") + "</extra>",
        row=row,
        col=1,
    )


def _stripes(figure: go.Figure, runs: Sequence[RunView]) -> None:
    """Episodes, over all rows."""
    found = [episode for run in runs for episode in run.episodes]
    gravest = sorted(found, key=lambda episode: -episode.tier.severity)[:STRIPES]
    look = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0}}
    figure.layout.shapes = [
        {
            **look,
            "x0": episode.first_step - 0.5,
            "x1": episode.last_step + 0.5,
            "fillcolor": TIER_COLOURS[episode.tier],
            "opacity": 0.2,
        }
        for episode in gravest
    ]


def _heads(table: AttentionEntry, field: str, layer: str) -> Sequence[float]:
    values: Sequence[Sequence[float]] = getattr(table, field)
    return values[table.layers.index(layer)] if layer in table.layers else ()


def _worst(worst: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return float(worst(finite)) if finite else None
