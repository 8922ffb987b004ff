"""The report's two figures, in plotly. Every text that goes in is escaped: plotly reads a subset of HTML."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from html import escape
from itertools import cycle
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_stability.ledger.entries import StepEntry
from megatron_stability.records import Action
from megatron_stability.report.runview import RunView

RUN_COLOURS = ("#e07b39", "#3b82f6", "#10b981", "#a855f7", "#ec4899", "#84cc16")
FATE_COLOURS = {
    "trained": "#2a9d8f",
    "skipped": "#e63946",
    "undone": "#8d99ae",
    "lost": "#d946ef",
    "repeated": "#eab308",
}
ACTION_MARKS = {  # colour, symbol
    Action.APPLY: ("#8d99ae", "circle"),
    Action.SCALE_WEIGHT_DECAY: ("#eab308", "hexagon"),
    Action.SCALE_LR: ("#eab308", "diamond"),
    Action.SKIP: ("#e63946", "triangle-down"),
    Action.REWIND: ("#d946ef", "triangle-left"),
    Action.HALT: ("#e63946", "square"),
}
POINTS = 4000  # drawn points a curve; beyond, each bucket of steps keeps its lowest and highest
LOSS, NORM, RATE, TIMELINE = 1, 2, 3, 4


def curves(runs: Sequence[RunView]) -> go.Figure:
    """Loss, gradient norm, learning rate and decisions over the steps, all runs on the same axes."""
    rows = TIMELINE if any(run.decisions or run.resumes for run in runs) else RATE  # no box without anything in it
    titles = ["Loss (nats per token)", "Gradient norm before clipping (log)", "Learning rate", "Decisions"]
    figure = make_subplots(
        rows=rows,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.055,
        row_heights=[0.38, 0.34, 0.14, 0.14][:rows],
        subplot_titles=titles[:rows],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=15)
    for index, (run, colour) in enumerate(zip(runs, cycle(RUN_COLOURS))):
        for row, values in ((LOSS, run.loss), (NORM, run.grad_norm), (RATE, run.learning_rate)):
            # where curves coincide, the earlier and wider one still shows beneath
            _curve(figure, row, run, values, colour, width=1.8 + 1.7 * (len(runs) - 1 - index))
            if row != RATE:  # a stock run does not say its first
                _nonfinite(figure, row, run, values, colour, index)
    _resumes(figure, runs)
    for action, advised in _decided(runs):
        _marks(figure, runs, action, advised)
    figure.update_yaxes(type="log", exponentformat="power", row=NORM, col=1)
    figure.update_yaxes(exponentformat="e", rangemode="tozero", row=RATE, col=1)
    if rows == TIMELINE:
        names = [escape(run.name) for run in reversed(runs)]
        figure.update_yaxes(type="category", categoryorder="array", categoryarray=names, row=TIMELINE, col=1)
        figure.update_yaxes(range=[-0.6, len(runs) - 0.4], row=TIMELINE, col=1)
    figure.update_xaxes(title_text="step", showticklabels=True, row=rows, col=1)
    span = [step for run in runs for step in (*run.steps[:1], *run.steps[-1:])] or [0, 1]
    figure.update_xaxes(range=[min(span) - 1, max(span) + 1])
    figure.update_layout(meta="steps", height=(820 if rows == TIMELINE else 700) + 24 * len(runs), hovermode="closest")
    return styled(figure)


def samples(runs: Sequence[RunView]) -> go.Figure | None:
    """The fate of every sample: one row a run, one more for what was undone; None if no run recorded any."""
    known = [run for run in runs if run.intervals is not None]
    if not known:
        return None
    figure = go.Figure()
    shown: set[str] = set()
    for run in known:
        for fate, row, items in _fate_rows(run):
            figure.add_bar(
                orientation="h",
                base=[first for first, _, _ in items],
                x=[last - first for first, last, _ in items],
                y=[row] * len(items),
                name=fate,
                legendgroup=fate,
                showlegend=fate not in shown,
                marker={"color": FATE_COLOURS[fate], "line": {"width": 0}},
                hovertext=[text for *_, text in items],
                hoverinfo="text",
                width=0.62,
            )
            if fate in ("skipped", "lost", "repeated"):  # a few samples among millions are thinner than a pixel
                figure.add_scatter(
                    x=[(first + last) / 2 for first, last, _ in items],
                    y=[row] * len(items),
                    mode="markers",
                    marker=_marker("triangle-down", FATE_COLOURS[fate], len(items)),
                    legendgroup=fate,
                    showlegend=False,
                    hovertext=[text for *_, text in items],
                    hoverinfo="text",
                )
            shown.add(fate)
    rows = {trace.y[0] for trace in figure.data if len(trace.y)}
    figure.update_layout(barmode="overlay", height=150 + 52 * len(rows), hovermode="closest")
    figure.update_xaxes(title_text="sample index in the global order", exponentformat="none", separatethousands=True)
    figure.update_yaxes(type="category", autorange="reversed")
    return styled(figure)


def thin(steps: Sequence[int], values: Sequence[float], limit: int = POINTS) -> Iterator[tuple[int, float | None]]:
    """At most about `limit` points of a curve, the lowest and highest of each bucket; None at a non-finite value.

    Args:
        steps: x values, ascending.
        values: y values; NaN and Inf end a bucket, so a gap is never bridged.
        limit: points wanted.

    Yields:
        (step, value or None), in order.
    """
    size = max(1, math.ceil(2 * len(steps) / limit)) if len(steps) > limit else 1
    bucket: list[tuple[int, float]] = []
    gap = False
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            bucket.append((step, value))
            gap = False
        if bucket and (len(bucket) >= size or not math.isfinite(value)):
            yield from _extremes(bucket)
            bucket = []
        if not math.isfinite(value) and not gap:
            yield step, None
            gap = True
    yield from _extremes(bucket)


def _extremes(bucket: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    if not bucket:
        return []
    return sorted({min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])})


def stretches(steps: Sequence[int], values: Sequence[float]) -> list[tuple[int, int, str]]:
    """Runs of non-finite values: (first step, last step, "NaN" or "Inf"), in order.

    Args:
        steps: x values, ascending.
        values: y values.

    Returns:
        Maximal stretches of neighbouring points; "NaN" if it holds any NaN.
    """
    found: list[tuple[int, int, str]] = []
    open_ = False
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            open_ = False
            continue
        what = "NaN" if math.isnan(value) else "Inf"
        if open_:
            first, _, before = found[-1]
            found[-1] = (first, step, "NaN" if "NaN" in (what, before) else what)
        else:
            found.append((step, step, what))
        open_ = True
    return found


def _curve(figure: go.Figure, row: int, run: RunView, values: Sequence[float], colour: str, width: float) -> None:
    points = list(thin(run.steps, values))
    drawn = [value for _, value in points if value is not None and (row != NORM or value > 0)]
    floor = min(drawn, default=1.0) / 2
    figure.add_scatter(
        x=[step for step, _ in points],
        # a log axis has no place for 0: it is drawn below the lowest positive value, and its hover says 0
        y=[max(value, floor) if value is not None and row == NORM else value for _, value in points],
        customdata=["" if value is None else f"{value:.6g}" for _, value in points],
        hovertemplate="step %{x}: %{customdata}<extra>" + escape(run.name) + "</extra>",
        mode="lines" if len(points) > 1 else "markers",
        line={"color": colour, "width": width},
        name=escape(run.name),
        legendgroup=f"run {run.name}",
        showlegend=row == LOSS,
        row=row,
        col=1,
    )


def _nonfinite(figure: go.Figure, row: int, run: RunView, values: Sequence[float], colour: str, index: int) -> None:
    """Shade every stretch of NaN or Inf over the panel's height, and label it at the top where there is room."""
    number = "" if row == 1 else str(row)
    axes = {"xref": f"x{number}", "yref": f"y{number} domain"}
    found = stretches(run.steps, values)
    if not found:
        return
    begin, end = run.steps[0], run.steps[-1]
    look = {
        "type": "rect",
        "fillcolor": colour,
        "opacity": 0.2,
        "line": {"width": 1, "color": colour},
        "layer": "below",
    }
    shapes = [{**axes, **look, "x0": a - 0.5, "x1": b + 0.5, "y0": 0, "y1": 1} for a, b, _ in found]
    labels = []
    for first, last, what in found:
        if len(found) > 12 and last - first < 0.1 * (end - begin):
            continue
        where = f", steps {first} to {last}" if last < end else f" from step {first} on"
        labels.append(
            {
                **axes,
                "x": first,
                "y": 1 - 0.11 * index,
                "text": f"<b>✕ {what}</b>" + (where if last > first else ""),
                "hovertext": f"{escape(run.name)}: {what} at step {first}" + (f" to {last}" if last > first else ""),
                "showarrow": False,
                "xanchor": "left" if first < begin + 0.7 * (end - begin) else "right",
                "yanchor": "top",
                "font": {"color": colour, "size": 12},
            }
        )
    # one assignment a panel: plotly validates the whole list at each
    figure.layout.shapes = (*figure.layout.shapes, *shapes)
    figure.layout.annotations = (*figure.layout.annotations, *labels)


def _resumes(figure: go.Figure, runs: Sequence[RunView]) -> None:
    """A bar on the timeline after each step at which a resume or rewind went on."""
    marks = [(step + 0.5, run) for run in runs for step in run.resumes]
    if marks:
        figure.add_scatter(
            x=[step for step, _ in marks],
            y=[escape(run.name) for _, run in marks],
            mode="markers",
            marker={"symbol": "line-ns", "size": 18, "line": {"width": 3, "color": "#64748b"}},
            hovertext=[f"<b>{escape(run.name)}</b>: went on after step {step - 0.5:.0f}" for step, run in marks],
            hoverinfo="text",
            name="resume",
            row=TIMELINE,
            col=1,
        )


def _decided(runs: Sequence[RunView]) -> list[tuple[Action, bool]]:
    kinds = {_kind(step) for run in runs for step in run.decisions}
    return sorted(kinds, key=lambda kind: (kind[0].precedence, kind[1]))


def _kind(step: StepEntry) -> tuple[Action, bool]:
    """(action to show, whether it was only advised)."""
    return (step.advised, True) if step.action is not step.advised else (step.action, False)


def _marks(figure: go.Figure, runs: Sequence[RunView], action: Action, advised: bool) -> None:
    """One legend entry an action: its marks on the loss, on the gradient norm and on the timeline."""
    colour, symbol = ACTION_MARKS[action]
    for row in (LOSS, NORM, TIMELINE):
        x: list[int] = []
        y: list[float | str] = []
        text: list[str] = []
        for run in runs:
            points = _drawable(run, row)
            for step in run.decisions:
                if _kind(step) != (action, advised):
                    continue
                place = escape(run.name) if row == TIMELINE else _place(step, row, points)
                if place is not None:
                    x.append(step.step)
                    y.append(place)
                    text.append(_hover(run, step))
        name = f"{'would ' if advised else ''}{action.value.replace('_', ' ')}"
        figure.add_scatter(
            x=x,
            y=y,
            mode="markers",
            marker=_marker(symbol + ("-open" if advised else ""), colour, len(x)),
            hovertext=text,
            hoverinfo="text",
            name=name,
            legendgroup=name,
            showlegend=row == TIMELINE,
            row=row,
            col=1,
        )


def _marker(symbol: str, colour: str, number: int) -> dict[str, Any]:
    """A mark with a white rim; the more there are, the smaller, and without a rim where they would cover each other."""
    crowded = number > 60
    outline = colour if symbol.endswith("-open") or crowded else "#ffffff"
    size = 12 if not crowded else 7 if number <= 400 else 4
    return {"symbol": symbol, "size": size, "color": colour, "line": {"width": 0 if crowded else 1.5, "color": outline}}


def _drawable(run: RunView, row: int) -> tuple[list[int], list[float]]:
    """The points of a curve that its axis can show."""
    curve = zip(run.steps, run.loss if row == LOSS else run.grad_norm, strict=True)
    points = [(step, value) for step, value in curve if math.isfinite(value) and (row == LOSS or value > 0)]
    return [step for step, _ in points], [value for _, value in points]


def _place(step: StepEntry, row: int, points: tuple[list[int], list[float]]) -> float | None:
    """Where a decision stands on a curve: its own value, or the nearest one before it, or after, that can be drawn."""
    value = step.loss if row == LOSS else step.grad_norm
    if math.isfinite(value) and (row == LOSS or value > 0):
        return value
    steps, values = points
    return values[max(0, bisect_left(steps, step.step) - 1)] if values else None


def _hover(run: RunView, step: StepEntry) -> str:
    fate = "" if step.fate == "trained" else f", {step.fate}"
    head = f"<b>{escape(run.name)}, step {step.step}</b> (generation {step.generation}{fate})"
    numbers = f"loss {step.loss:.4g}, gradient norm {step.grad_norm:.4g}"
    return f"{head}<br>{escape(wrapped(step.reason)).replace(chr(10), '<br>')}<br>{numbers}"


def wrapped(text: str, width: int = 70) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _fate_rows(run: RunView) -> Iterator[tuple[str, str, list[tuple[int, int, str]]]]:
    """(fate, row, [(first, last, hover)]) for each kind that occurs."""
    intervals = run.intervals or ()
    name = escape(run.name)
    for fate in ("trained", "skipped", "undone"):
        items = [
            (i.first, i.last, _interval_hover(i.first, i.last, "undone" if i.undone else i.fate, i))
            for i in intervals
            if i.samples and (i.undone if fate == "undone" else not i.undone and i.fate == fate)
        ]
        if items:
            yield fate, f"{name}, undone" if fate == "undone" else name, items
    for kind in ("lost", "repeated"):
        found = [(f.first, f.last, f"<b>{kind}</b><br>{escape(f.message)}") for f in run.findings if f.kind == kind]
        if found:
            yield kind, name, found


def _interval_hover(first: int, last: int, fate: str, interval: Any) -> str:
    steps = f"steps {interval.first_step} to {interval.last_step}, generation {interval.generation}"
    reason = f"<br>{escape(wrapped(interval.reason)).replace(chr(10), '<br>')}" if interval.reason else ""
    return f"<b>{fate}</b>: {last - first:,} samples, {first:,} to {last - 1:,}<br>{steps}{reason}"


def styled(figure: go.Figure) -> go.Figure:
    """Transparent, so that the page's light or dark colours show; the page's script sets text and grid colours."""
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 76, "r": 16, "t": 64, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.03, "x": 0},
        hoverlabel={"align": "left"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#8d99ae", "activecolor": "#64748b"},
    )
    figure.update_xaxes(zeroline=False, automargin=True)
    figure.update_yaxes(zeroline=False, automargin=True)
    return figure
