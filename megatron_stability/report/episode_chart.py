"""The report's figure of episodes: when each detector had something to say, and the curve that it judged."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_stability.decide.episodes import sentence
from megatron_stability.ledger.entries import EpisodeEntry
from megatron_stability.records import Episode, Tier
from megatron_stability.report.charts import RUN_COLOURS, styled, thin, wrapped
from megatron_stability.report.runview import Curve, RunView

TIER_COLOURS = {
    Tier.WATCH: "#8d99ae",
    Tier.SMALL: "#eab308",
    Tier.MEDIUM: "#e07b39",
    Tier.LARGE: "#e63946",
    Tier.NON_FINITE: "#d946ef",
    Tier.SYSTEM: "#7c3aed",
}
JUDGED = 8  # curves drawn
ROW, PANEL = 24.0, 150.0  # pixels


def episodes(runs: Sequence[RunView]) -> go.Figure | None:
    """A row a detector with the stretch of each episode, then what each judged; None where there is no episode."""
    detectors = sorted({episode.detector for run in runs for episode in run.episodes})
    if not detectors:
        return None
    drawn = [(run, name, curve) for run in runs for name, curve in run.judged.items()][:JUDGED]
    titles = ["Episodes", *[f"{curve.name}, judged by {name} ({run.name})" for run, name, curve in drawn]]
    heights = [ROW * len(detectors) + 60, *[PANEL] * len(drawn)]
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.25 / len(heights),
        row_heights=[height / sum(heights) for height in heights],
        subplot_titles=[escape(title) for title in titles],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    for tier in Tier:
        found = [(run, episode) for run in runs for episode in run.episodes if episode.tier is tier]
        if found:
            _stretches(figure, tier, found)
    for row, (run, name, curve) in enumerate(drawn, 2):
        _judged(figure, row, curve, RUN_COLOURS[list(runs).index(run) % len(RUN_COLOURS)])
        for episode in run.episodes:
            if episode.detector == name:
                colour, begin, end = TIER_COLOURS[episode.tier], episode.first_step - 0.5, episode.last_step + 0.5
                figure.add_vrect(begin, end, fillcolor=colour, opacity=0.25, line_width=0, row=row, col=1)
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=detectors[::-1], row=1, col=1)
    figure.update_xaxes(title_text="step", showticklabels=True, row=len(heights), col=1)
    figure.update_layout(meta="steps", height=sum(heights) + 120, hovermode="closest", barmode="overlay")
    return styled(figure)


def _stretches(figure: go.Figure, tier: Tier, found: Sequence[tuple[RunView, EpisodeEntry]]) -> None:
    """Bars from the first to the last verdict of each episode of a tier."""
    colour = TIER_COLOURS[tier]
    figure.add_bar(
        orientation="h",
        base=[episode.first_step - 0.5 for _, episode in found],
        x=[episode.last_step - episode.first_step + 1 for _, episode in found],
        y=[episode.detector for _, episode in found],
        name=tier.value.replace("_", " "),
        marker={"color": colour, "line": {"width": 1, "color": colour}},
        hovertext=[
            f"<b>{escape(run.name)}</b><br>{escape(wrapped(words(episode))).replace(chr(10), '<br>')}"
            for run, episode in found
        ],
        hoverinfo="text",
        width=0.7,
        opacity=0.8,
        row=1,
        col=1,
    )


def _judged(figure: go.Figure, row: int, curve: Curve, colour: str) -> None:
    points = list(thin(curve.steps, curve.values))
    figure.add_scatter(
        x=[step for step, _ in points],
        y=[value for _, value in points],
        mode="lines" if len(points) > 1 else "markers",
        line={"color": colour, "width": 1.8},
        hovertemplate="step %{x}: %{y:.6g}<extra>" + escape(curve.name) + "</extra>",
        showlegend=False,
        row=row,
        col=1,
    )


def words(entry: EpisodeEntry) -> str:
    """An episode's sentence, as the log had it."""
    return sentence(entry.change, Episode(**{name: getattr(entry, name) for name in Episode.__dataclass_fields__}))
