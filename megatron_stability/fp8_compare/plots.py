"""The comparison's page: verdict, findings and gates first, then curves with their limits. Needs the [report] extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import jinja2
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_stability.fp8_compare.figures import RunFigures, relative_errors
from megatron_stability.fp8_compare.gates import layer_name
from megatron_stability.fp8_compare.table import headline, rows
from megatron_stability.records import decode_float
from megatron_stability.report import pages
from megatron_stability.report.charts import RUN_COLOURS

LOSS, ERROR, GRADIENTS, UPDATES, BINADES, UNDERFLOW, SATURATION = range(1, 8)
_TITLES: Final = {
    LOSS: "loss (nats per token)",
    ERROR: "relative loss error, smoothed (%)",
    GRADIENTS: "cosine of gradients, FP8 and BF16",
    UPDATES: "cosine of weight updates since the first sketch",
    BINADES: "binades of normal values (fewest over tensors)",
    UNDERFLOW: "elements that became zero (%, worst tensor of a sampled step)",
    SATURATION: "elements that were cut off (%, worst tensor of a sampled step)",
}
_HEIGHT: Final = 310  # pixels a plot
_TONES: Final = {"pass": "good", "FAIL": "bad", "NOT MEASURED": "bad"}
_WITHHELD: Final = "#e63946"


def write(result: dict[str, Any], runs: Sequence[RunFigures], path: Path) -> None:
    """One self-contained HTML file.

    Args:
        result: from `criteria.compare`.
        runs: FP8, control, and the second seed if there is one.
        path: the file.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader("megatron_stability", room) for room in ("fp8_compare", "report")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("compare.html").render(
        title=f"{result['fp8']} against {result['control']}",
        css=environment.get_template("report.css").render(),
        headline=headline(result),
        verdict=result["verdict"],
        findings=result["findings"],
        rows=rows(result),
        tones=_TONES,
        curves=figure(result, runs).to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False}),
    )
    pages.write("--html", path, page)


def figure(result: dict[str, Any], runs: Sequence[RunFigures]) -> go.Figure:
    """The curves: a legend of its own beside each plot, each limit with its name, withheld steps marked.

    Args:
        result: from `criteria.compare`.
        runs: as for `write`.
    """
    drawn = make_subplots(rows=len(_TITLES), cols=1, shared_xaxes=True, vertical_spacing=0.035,
                          subplot_titles=list(_TITLES.values()))  # fmt: skip

    def line(row: int, name: str, points: Sequence[tuple[int, float]], colour: str, **more: Any) -> None:
        x, y = [step for step, _ in points], [value for _, value in points]
        legend = "legend" if row == 1 else f"legend{row}"
        trace = go.Scatter(x=x, y=y, name=escape(name), legend=legend, line_color=colour, showlegend=True, **more)
        drawn.add_trace(trace, row=row, col=1)

    for run, colour in zip(runs, cycle(RUN_COLOURS)):
        line(LOSS, run.name, [(step.step, step.loss) for step in run.steps], colour)
        withheld = [(step.step, step.loss) for step in run.steps if step.fate != "trained"]
        if withheld:
            marks = {"mode": "markers", "marker": {"symbol": "x", "size": 9, "color": _WITHHELD, "line": {"width": 0}}}
            line(LOSS, f"withheld by {run.name}", withheld, _WITHHELD, **marks)
            for step, _ in withheld:
                drawn.add_vline(x=step, line_dash="dot", line_color=_WITHHELD, row=ERROR, col=1)
    _errors(result, runs, line)
    for row, key in ((GRADIENTS, "gradient_cosine"), (UPDATES, "update_cosine")):
        measured = [each for each in result["updates"] if each[key]]
        for layer in range(len(measured[0][key]) if measured else 0):
            points = [(each["step"], decode_float(each[key][layer])) for each in measured]
            line(row, layer_name(layer), points, RUN_COLOURS[layer % len(RUN_COLOURS)])
    for row, name, factor in ((BINADES, "binades", 1), (UNDERFLOW, "underflow", 100), (SATURATION, "saturation", 100)):
        seen = [(s.step, factor * s.signals[f"fp8/{name}"]) for s in runs[0].steps if f"fp8/{name}" in s.signals]
        line(row, runs[0].name, seen, RUN_COLOURS[0])
    _limits(drawn, result)
    drawn.update_xaxes(title_text="step", row=len(_TITLES), col=1)
    for row in _TITLES:  # each legend stands beside its plot
        top = drawn.layout["yaxis" if row == 1 else f"yaxis{row}"].domain[1]
        drawn.update_layout({"legend" if row == 1 else f"legend{row}": {"y": top, "yanchor": "top", "x": 1.01}})
    drawn.update_layout(height=_HEIGHT * len(_TITLES))
    return drawn


def _errors(result: dict[str, Any], runs: Sequence[RunFigures], line: Callable[..., None]) -> None:
    errors = [(step, 100 * decode_float(error)) for step, error in result["errors"]]
    line(ERROR, "FP8 - BF16", errors, RUN_COLOURS[0])
    if len(runs) > 2:
        spread = relative_errors(runs[2], runs[1])
        line(ERROR, "second seed - BF16", [(s, 100 * e) for s, e in spread], RUN_COLOURS[2], opacity=0.5)


def _limits(drawn: go.Figure, result: dict[str, Any]) -> None:
    for row, level, text in _levels(result):
        drawn.add_hline(y=level, line_dash="dash", annotation_text=text, annotation_position="top left", row=row, col=1)
    drawn.add_vline(x=result["warmup"], line_dash="dot", annotation_text="end of warmup", row=ERROR, col=1)


def _levels(result: dict[str, Any]) -> Iterator[tuple[int, float, str]]:
    """(plot, value, label) of every limit."""
    gates, limit = result["gates"], 100 * result["loss_error_limit"]
    yield ERROR, limit, f"gate {limit:.3g} % (mean of a window)"
    yield ERROR, -limit, f"gate -{limit:.3g} %"
    for row, name, factor, unit in (
        (GRADIENTS, "cosine", 1, ", judged in step 2"),
        (BINADES, "binades", 1, ""),
        (UNDERFLOW, "underflow", 100, " %"),
        (SATURATION, "saturation", 100, " %"),
    ):
        if gates[name] is not None:
            yield row, factor * gates[name], f"gate {factor * gates[name]:g}{unit}"
