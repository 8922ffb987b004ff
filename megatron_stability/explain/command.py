"""`megatron-stability triage`: ranked hypotheses about an incident, with the evidence for and against each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from megatron_stability import files, terminal
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.explain.post_mortem import post_mortem
from megatron_stability.explain.replay import RESULT
from megatron_stability.explain.rules import Class
from megatron_stability.explain.scene import Scene
from megatron_stability.explain.triage import SHOWN, Hypothesis, Triage, triage
from megatron_stability.ledger import bundle
from megatron_stability.ledger.entries import LedgerView, read
from megatron_stability.report.runview import ledger_of


def run(argv: Sequence[str]) -> int:
    """The command `triage`.

    Args:
        argv: its arguments.

    Returns:
        0 where nothing seems wrong, 1 where a cause is named or asked for.

    Raises:
        UsageError: no ledger there, no such step, or a file that can't be written.
    """
    options = _parser().parse_args(argv)
    view, number = _opened(options.run, options.step)
    replayed = None if options.replay is None else _replayed(options.replay)
    if replayed is not None:
        number = int(replayed["step"]) if number is None else number
        if number != replayed["step"]:
            raise UsageError(
                f"--replay {options.replay}: is of step {replayed['step']}, not {number}; leave out the step"
            )
    found = triage(Scene.at(view, number, replayed))
    name = str(options.run)
    if options.post_mortem:
        _write(options.post_mortem, post_mortem(found, name))
    if options.json:
        json.dump(found.to_json() | {"next": found.commands(name)}, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        _show(found, name)
    return EXIT_FINE if found.first.cause.kind is Class.NONE else EXIT_FINDING


def _opened(path: Path, step: int | None) -> tuple[LedgerView, int | None]:
    """The ledger of a run's folder, or the one that a bundle lies in, with the bundle's step."""
    if (path / bundle.JSON).exists():
        incident = bundle.read_bundle(path).incident
        return read(path.parent), incident.step if step is None else step
    return ledger_of(path), step


def _replayed(folder: Path) -> dict[str, Any]:
    """The result in a replay's folder."""
    path = folder / RESULT if folder.is_dir() else folder
    try:
        found = files.read_json(path)
        fields = {"name": str, "failure": str, "present": bool, "equal": bool, "meaning": str}
        if isinstance(found["step"], int) and all(
            isinstance(each[field], kind) for each in found["branches"] for field, kind in fields.items()
        ):
            return dict(found)
    except OSError as error:
        raise UsageError(f"--replay {path}: can't be read ({error.strerror}); name the --out of a replay") from None
    except (KeyError, TypeError, ValueError):
        pass
    raise UsageError(f"--replay {path}: is not the result of a replay; name the --out of one")


def _show(found: Triage, run: str) -> None:
    console = terminal.console()
    step = found.scene.step
    what = found.facts["found"]
    console.print(f"step {step.step}, generation {step.generation}: {what.says if what else ''}", markup=False)
    table = Table(show_edge=False, pad_edge=False)
    for head in ("", "class", "cause", "for", "against"):
        table.add_column(head, overflow="fold")
    for hypothesis in found.hypotheses[:SHOWN]:
        if hypothesis.probability >= 0.01:
            table.add_row(*_cells(hypothesis))
    console.print(table)
    console.print(f"confidence: {found.confidence}", markup=False)
    if found.enable and found.confidence != "high":
        for each in found.enable:
            console.print(f"not measured: {each.fact}; it takes {each.flag}", markup=False, soft_wrap=True)
    for command in found.commands(run):
        console.print(f"next: {command}", markup=False, soft_wrap=True)


def _cells(hypothesis: Hypothesis) -> tuple[str, str, str, str, str]:
    def lines(evidence: Sequence[object]) -> str:
        return escape("\n".join(f"{e.weight:+g} {e.says}" for e in evidence[:3]))  # type: ignore[attr-defined]

    return (
        f"{hypothesis.probability:.0%}",
        hypothesis.cause.kind.value,
        escape(hypothesis.cause.says),
        lines(hypothesis.speaks_for),
        lines(hypothesis.against),
    )


def _write(path: Path, text: str) -> None:
    try:
        files.write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(f"--post-mortem {path}: can't be written ({error.strerror}); name a writable file") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability triage",
        description="Ranked hypotheses about an incident: data, optimization, numerics or systems, with what speaks "
        "for and against each, what was not measured, and what to run next.",
        epilog="example: megatron-stability triage runs/a 1200 --post-mortem step-1200.md",
    )
    parser.add_argument("run", type=Path, metavar="RUN|BUNDLE", help="a run's folder, or one of its incident-* folders")
    parser.add_argument("step", type=int, nargs="?", help="the incident's step (default: the last incident's first)")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="what a replay of this step showed counts too")
    parser.add_argument(
        "--post-mortem", type=Path, metavar="FILE", help="write a template with what is known, Markdown"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser
