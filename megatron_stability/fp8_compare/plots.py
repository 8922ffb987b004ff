"""The comparison's page: losses, relative loss error with its gate, cosines of gradients and updates, telemetry."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_stability.fp8_compare.criteria import layer_name
from megatron_stability.fp8_compare.figures import RunFigures, relative_errors
from megatron_stability.records import decode_float
from megatron_stability.report import pages
from megatron_stability.report.charts import RUN_COLOURS

_TITLES = (
    *("loss (nats per token)", "relative loss error, smoothed (%)", "cosine of gradients, FP8 and BF16"),
    *("cosine of weight updates since the first sketch", "binades of normal values (fewest over tensors)"),
)


def write(result: dict[str, Any], runs: Sequence[RunFigures], path: Path) -> None:
    """One self-contained HTML file.

    Args:
        result: from `gate.compare`.
        runs: FP8, control, and the second seed if there is one.
        path: the file.
    """
    figure = make_subplots(rows=5, cols=1, shared_xaxes=True, vertical_spacing=0.05, subplot_titles=_TITLES)

    def line(row: int, name: str, points: Sequence[tuple[int, float]], **more: Any) -> None:
        x, y = [step for step, _ in points], [value for _, value in points]
        figure.add_trace(go.Scatter(x=x, y=y, name=escape(name), **more), row=row, col=1)

    for run in runs:
        line(1, run.name, [(step.step, step.loss) for step in run.steps])
    line(2, "FP8 - BF16", [(step, 100 * decode_float(error)) for step, error in result["errors"]])
    if len(runs) > 2:
        spread = relative_errors(runs[2], runs[1])
        line(2, "second seed - BF16", [(s, 100 * e) for s, e in spread], opacity=0.5)
    for level in (100 * result["loss_error_limit"], -100 * result["loss_error_limit"]):
        figure.add_hline(y=level, line_dash="dash", row=2, col=1)
    figure.add_vline(x=result["warmup"], line_dash="dot", row=2, col=1)
    for row, key in ((3, "gradient_cosine"), (4, "update_cosine")):
        measured = [each for each in result["updates"] if each[key]]
        for layer in range(len(measured[0][key]) if measured else 0):
            points = [(each["step"], decode_float(each[key][layer])) for each in measured]
            colour = {"color": RUN_COLOURS[layer % len(RUN_COLOURS)]}
            line(row, layer_name(layer), points, legendgroup=f"layer {layer}", showlegend=row == 3, line=colour)
    used = [(step.step, step.signals["fp8/binades"]) for step in runs[0].steps if "fp8/binades" in step.signals]
    line(5, "binades", used, showlegend=False)
    for row, name in ((3, "cosine"), (5, "binades")):
        if result["gates"][name] is not None:
            figure.add_hline(y=result["gates"][name], line_dash="dash", row=row, col=1)
    figure.update_xaxes(title_text="step", row=5, col=1)
    figure.update_layout(height=1500)
    pages.write("--html", path, figure.to_html(include_plotlyjs=True))
