"""`megatron-stability incident` and `sample`: what happened at a step, and what stands in a sample."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rich.markup import escape as literal
from rich.table import Table

from megatron_stability import terminal
from megatron_stability.data import attribution
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.explain import batch, incident
from megatron_stability.explain.batch import Decoder
from megatron_stability.explain.incident import Page, Section
from megatron_stability.ledger import bundle
from megatron_stability.ledger.entries import FILE, LedgerView, read
from megatron_stability.ledger.incidents import incidents
from megatron_stability.report import pages


def run(argv: Sequence[str]) -> int:
    """The command `incident`.

    Args:
        argv: its arguments.

    Returns:
        1 where there is an incident, 0 where `--list` has none.

    Raises:
        UsageError: no ledger there, no such step, no incident, or a file that can't be written.
    """
    options = _parser().parse_args(argv)
    if options.list and (options.step is not None or options.html):
        raise UsageError("--list: is of the whole run; leave out STEP and --html")
    view, folder, step = opened(options.run, options.step)
    if options.list:
        return _list(view, options.json)
    decoder = Decoder(options.tokenizer) if options.text or options.tokenizer else None
    found = incident.page(view, folder, str(options.run), step, decoder)
    if options.html:
        pages.write("--html", options.html, html(found))
    if options.json:
        json.dump(found.to_json(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    elif not options.html:
        _show(found)
    return EXIT_FINDING


def sample(argv: Sequence[str]) -> int:
    """The command `sample`.

    Args:
        argv: its arguments.

    Returns:
        0.

    Raises:
        UsageError: no ledger there, or the samples can't be traced.
    """
    options = _sample_parser().parse_args(argv)
    view, _, _ = opened(options.run, None)
    generation = view.runs[-1].generation if view.runs else 1
    decoder = Decoder(options.tokenizer) if options.text or options.tokenizer else None
    found = batch.of_step(view, generation, options.sample, options.sample + 1, decoder)
    readings = attribution.readings(view, (options.sample,))
    if options.json:
        said = [vars(each) | {"samples": list(each.samples)} for each in readings]
        json.dump({**found.to_json(), "steps": said}, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return EXIT_FINE
    console = terminal.console()
    if found.told:
        console.print(found.told, markup=False, soft_wrap=True)
    for each in found.reads:
        line = f"{each.prefix}, document {each.document}: {each.tokens:,} tokens, {each.place}"
        console.print(line, markup=False, soft_wrap=True)
        if each.text:
            console.print(f"  {each.text}", markup=False, soft_wrap=True)
    for reading in readings:
        undone = ", undone later" if reading.undone else ""
        saved = f", in the checkpoint of step {reading.saved_in}" if reading.saved_in else ""
        console.print(f"step {reading.step}: {reading.fate}{undone}{saved}", markup=False)
    if not readings:
        console.print("no step of the ledger has read it", markup=False)
    return EXIT_FINE


def opened(path: Path, step: int | None) -> tuple[LedgerView, Path, int | None]:
    """The ledger of a run's folder, or the one that a bundle lies in, its folder, and the step.

    Args:
        path: of a run or a bundle.
        step: as asked for; None: a bundle's own.

    Raises:
        UsageError: no readable ledger there.
    """
    if (path / bundle.JSON).exists():
        there = bundle.read_bundle(path).incident
        return read(path.parent), path.parent, there.step if step is None else step
    nested = path / "stability"
    folder = nested if not (path / FILE).exists() and (nested / FILE).exists() else path
    return read(folder), folder, step


def html(found: Page) -> str:
    """The page as HTML without a script; it loads nothing."""
    css = resources.files("megatron_stability.report").joinpath("report.css").read_text(encoding="utf-8")
    parts = "".join(_html_section(section) for section in found.sections())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(found.title)}</title><style>{css}</style><header><h1>{escape(found.title)}</h1>"
        f"<p class=quiet>{escape(found.step.reason)}</p></header>{parts}</html>\n"
    )


def _html_section(section: Section) -> str:
    tag = "code" if section.title in ("Next", "Evidence") else "span"
    lines = "".join(f"<p><{tag}>{escape(line)}</{tag}></p>" for line in section.lines)
    table = ""
    if section.rows:
        head = "".join(f"<th>{escape(each)}</th>" for each in section.head)
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in section.rows)
        table = f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    return f"<section id={section.title.split()[0].lower()}><h2>{escape(section.title)}</h2>{table}{lines}</section>"


def _show(found: Page) -> None:
    console = terminal.console()
    console.print(f"[bold]{literal(found.title)}[/bold]")
    for section in found.sections():
        console.print(f"\n[bold]{section.title}[/bold]")
        if section.rows:
            table = Table(show_edge=False, pad_edge=False)
            for head in section.head:
                table.add_column(head, overflow="fold")
            for row in section.rows:
                table.add_row(*map(literal, row))
            console.print(table)
        for line in section.lines:
            console.print(f"  {line}", markup=False, soft_wrap=True, highlight=False)


def _list(view: LedgerView, as_json: bool) -> int:
    known = incidents(view.entries)
    rows: list[dict[str, Any]] = [
        {
            "incident": each.number,
            "last_step": each.last_step,
            "tier": each.tier.value,
            "detectors": sorted({detector for detector, _ in each.episodes}),
            "actions": [action.value for action in each.actions],
            "page": each.page is not None,
        }
        for each in known
    ]
    if as_json:
        json.dump(rows, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        table = Table(show_edge=False, pad_edge=False)
        for head in ("incident", "to step", "tier", "detectors", "done", "page"):
            table.add_column(head, overflow="fold")
        for row in rows:
            page = "yes" if row["page"] else ""
            cells = str(row["incident"]), str(row["last_step"]), row["tier"]
            table.add_row(*cells, ", ".join(row["detectors"]), ", ".join(row["actions"]), page)
        terminal.console().print(table if rows else "no incident in this ledger")
    return EXIT_FINDING if rows else EXIT_FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability incident",
        description="What happened at a step, on one page: what was seen and done, where, with which data, what came "
        "before, the likely cause, and what to run next.",
        epilog="example: megatron-stability incident runs/a --last",
    )
    parser.add_argument("run", type=Path, metavar="RUN|BUNDLE", help="a run's folder, or one of its incident-* folders")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("step", type=int, nargs="?", help="a step (default: the last incident)")
    which.add_argument("--last", action="store_true", help="the last incident, which is the default")
    which.add_argument("--list", action="store_true", help="every incident of the run, a line each")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page, which loads nothing")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    _add_text(parser)
    return parser


def _sample_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability sample",
        description="What stands in a sample: documents, files and places; and the steps that read it.",
        epilog="example: megatron-stability sample runs/a 81920",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("sample", type=int, help="global sample index, as the ledger counts (consumed samples)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    _add_text(parser)
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", action="store_true", help="how each document begins; training text, so only if asked")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="for --text, where the data are not bytes")
