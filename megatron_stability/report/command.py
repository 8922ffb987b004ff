"""`megatron-stability report`: a self-contained HTML page of one run, or of several on the same axes.

The page needs no network: plotly's script is inlined, and its Content-Security-Policy forbids every request.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_stability import extras, terminal
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.report import pages, summary
from megatron_stability.report.runview import RunView

ROWS = 500  # incidents and findings shown a run


def build_report(runs: Sequence[RunView], path: str | Path, title: str = "Training stability report") -> Path:
    """Write the report.

    Args:
        runs: one or more, drawn on the same axes in this order.
        path: the HTML file; replaced as a whole if it exists.
        title: the page's heading.

    Returns:
        The file's path.

    Raises:
        UsageError: plotly or jinja2 is missing, or the file can't be written.
    """
    missing = [name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"needs {' and '.join(missing)}; {extras.command('report')}")
    path = Path(path)
    pages.check("--out", path)
    pages.write("--out", path, _page(runs, title))
    return path


def run(argv: Sequence[str]) -> int:
    """The command `report`.

    Args:
        argv: its arguments.

    Returns:
        0; or 1 if the audit found lost or repeated samples.

    Raises:
        UsageError: an unreadable ledger, an unwritable file, or as many names as folders not given.
    """
    options = _parser().parse_args(argv)
    if options.names and len(options.names) != len(options.folders):
        raise UsageError(
            f"--names: {len(options.names)} given for {len(options.folders)} run folders; give one name a folder"
        )
    names = options.names or [None] * len(options.folders)
    runs = [RunView.from_ledger(folder, name) for folder, name in zip(options.folders, names, strict=True)]
    build_report(runs, options.out)
    findings = [f"{run.name}: {finding.message}" for run in runs for finding in run.findings]
    if options.json:
        document = {"report": str(options.out), "runs": [run.summary() for run in runs]}
        json.dump(document, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        console = terminal.console()
        console.print(summary.table(runs))
        for finding in findings[:ROWS]:
            console.print(finding, markup=False)
        console.print(f"report: {options.out}", markup=False, soft_wrap=True)
    return EXIT_FINDING if findings else EXIT_FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability report",
        description="Draw a run's ledger, or several on the same axes, as one self-contained HTML page.",
        epilog="example: megatron-stability report runs/a runs/b --names before after --out report.html",
    )
    parser.add_argument("folders", nargs="+", metavar="RUN_FOLDER", help="holds ledger.jsonl or stability/ledger.jsonl")
    parser.add_argument("--names", nargs="+", help="one name a folder (default: the folders' names)")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead of a table")
    return parser


def _page(runs: Sequence[RunView], title: str) -> str:
    # Imported here: the extra [report] brings them, and reading a ledger needs neither.
    import jinja2
    import plotly.offline

    from megatron_stability.report import charts, episode_chart, signal_chart

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_stability", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=summary.number, tone=_tone, brief=_brief)
    samples, episodes = charts.samples(runs), episode_chart.episodes(runs)
    signals, layers = signal_chart.signals(runs), signal_chart.layers(runs)
    script = f"<script>{plotly.offline.get_plotlyjs()}</script>"
    return environment.get_template("report.html").render(
        title=title,
        made=f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Nothing on this page is loaded from elsewhere.",
        css=environment.get_template("report.css").render(),
        runs=runs,
        summaries=[run.summary() for run in runs],
        colours=charts.RUN_COLOURS,
        limit=ROWS,
        curves=script + _div(charts.curves(runs)),
        signals=_div(signals) if signals else "",
        layers=_div(layers) if layers else "",
        episodes=_div(episodes) if episodes else "",
        samples=_div(samples) if samples else "",
    )


def _div(figure: Any) -> str:
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})


def _brief(value: str) -> str:
    """A digest by its beginning, as git has it; the page's tooltip has all of it."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1…", value)


def _tone(value: Any) -> str:
    return "" if value is None or math.isfinite(float(value)) else "bad"
