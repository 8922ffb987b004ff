"""The comparison's page: losses of the runs, and the relative loss error with its gate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_stability.compare.figures import RunFigures
from megatron_stability.record import pages
from megatron_stability.records import decode_float


def write(result: dict[str, Any], runs: Sequence[RunFigures], path: Path) -> None:
    """One self-contained HTML file.

    Args:
        result: from `figures.compare`.
        runs: FP8, control, and the second seed if there is one.
        path: the file.
    """
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, subplot_titles=("loss (nats per token)", "relative loss error, smoothed (%)")
    )
    for run in runs:
        steps = [step.step for step in run.steps]
        figure.add_trace(go.Scatter(x=steps, y=[step.loss for step in run.steps], name=run.name), row=1, col=1)
    errors = [(step, 100 * decode_float(error)) for step, error in result["errors"]]
    figure.add_trace(go.Scatter(x=[s for s, _ in errors], y=[e for _, e in errors], name="FP8 - BF16"), row=2, col=1)
    gate = 100 * result["gates"]["loss_error"]
    for level in (gate, -gate):
        figure.add_hline(y=level, line_dash="dash", row=2, col=1)
    figure.add_vline(x=result["warmup"], line_dash="dot", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2, col=1)
    pages.write("--html", path, figure.to_html(include_plotlyjs=True))
