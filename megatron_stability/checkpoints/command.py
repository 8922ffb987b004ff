"""`megatron-stability checkpoint list|verify|drill|repair-tracker|suspect`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from megatron_stability import terminal
from megatron_stability.checkpoints import drill, generations, manifest
from megatron_stability.checkpoints.generations import TRACKER, Generation
from megatron_stability.echo import said
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError

EXAMPLE = """examples:
  megatron-stability checkpoint list runs/a
  megatron-stability checkpoint verify runs/a/iter_0000100 --threads 16
  megatron-stability checkpoint drill runs/a -- pretrain --nproc 2 --cpu FLAGS OF THE RUN
  megatron-stability checkpoint repair-tracker runs/a"""


def run(argv: Sequence[str]) -> int:
    """`megatron-stability checkpoint`.

    Args:
        argv: the arguments after it.

    Returns:
        0; 1 where a checkpoint is corrupt or incomplete, `list` finds a wrong tracker or a drill failed.

    Raises:
        UsageError: a folder that isn't there, holds no checkpoint, or can't be read or written.
    """
    argv, command = _split(list(argv))
    options = _parser().parse_args(argv)
    options.command = command[1:] if command[:1] == ["megatron-stability"] else command
    if options.threads < 1:
        raise UsageError(f"--threads {options.threads}: must be at least 1")
    try:
        options.folder = options.folder.absolute()  # `.` has no name
        if not options.folder.is_dir():
            raise UsageError(f"{options.folder}: there is no such folder; name the one that holds iter_*")
        return int(options.function(options))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{error.filename2 or error.filename or options.folder}: {error.strerror or error}") from error


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability checkpoint",
        description="Look at, prove and rehearse the loss of checkpoints. Nothing here needs Megatron or a GPU.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="list|verify|drill|repair-tracker|suspect")
    for name, function, text in (
        ("list", _list, "every checkpoint with its state; sizes are checked, bytes are not read"),
        ("verify", _verify, "read and hash every byte of a folder of checkpoints, or of one"),
        (
            "drill",
            _drill,
            "damage copies and see what a resume would do; with -- COMMAND also resume and compare",
        ),
        ("repair-tracker", _repair, f"let {TRACKER} name the newest complete, verified checkpoint"),
        ("suspect", _suspect, "keep one checkpoint as evidence and out of every resume"),
    ):
        verb = verbs.add_parser(
            name, help=text, description=text, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        verb.add_argument("folder", type=Path)
        verb.add_argument("--json", action="store_true", help="print JSON instead of a table")
        verb.add_argument("--threads", type=int, default=manifest.THREADS, help="files hashed at once (default: 4)")
        verb.set_defaults(function=function)
        if name == "drill":
            verb.add_argument("--nproc", type=int, help="also resume with so many ranks (needs -- COMMAND)")
            verb.add_argument("--work", type=Path, help="where copies are made (default: beside the checkpoints)")
            verb.add_argument("--timeout", type=float, default=3600.0, help="seconds for each resumed run")
        if name == "suspect":
            verb.add_argument("--reason", required=True, help="one sentence, kept with the checkpoint")
    return parser


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Any]:
    """A bar on standard error, gone when that is no terminal; yields the callback for bytes."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def _list(options: argparse.Namespace) -> int:
    return _show(options, _found(options.folder, full=False, threads=options.threads))


def _verify(options: argparse.Namespace) -> int:
    return _show(options, _found(options.folder, full=True, threads=options.threads))


def _found(folder: Path, *, full: bool, threads: int) -> list[Generation]:
    one = generations.is_folder_name(folder.name)
    listed = [generations.generation(folder)] if one else generations.generations(folder)
    if not listed:
        raise UsageError(f"{folder}: holds no checkpoint (iter_*); name the folder that a run saved to")
    if not full:
        return listed
    total = sum(each.manifest.size for each in listed if each.manifest is not None and not each.problems)
    with _progress("verifying", total) as advance:
        read = [generations.generation(g.folder, full=True, threads=threads, on_bytes=advance) for g in listed]
    return [each for each in read if each.folder.is_dir()]  # a run may have deleted one meanwhile


def _show(options: argparse.Namespace, found: list[Generation]) -> int:
    one = generations.is_folder_name(options.folder.name)
    tracker = None if one else generations.read_tracker(options.folder)
    newest = next((each.step for each in found if each.state == "complete"), None)
    findings = [str(each) for each in found if each.state in ("corrupt", "incomplete")]
    if not one and tracker not in (newest, "release"):
        findings.append(f"{TRACKER} says {tracker}, and the newest complete checkpoint is {newest}")
    if options.json:
        _dump({"tracker": tracker, "newest": newest, "checkpoints": [_record(g) for g in found], "findings": findings})
    else:
        table = Table(show_edge=False, pad_edge=False)
        for name in ("checkpoint", "state", "samples", "MB", "ranks", "why"):
            table.add_column(name, justify="right" if name in ("samples", "MB", "ranks") else "left")
        for each in found:
            table.add_row(*_cells(each, tracker))
        terminal.console().print(table)
        for finding in findings[: 0 if one else None]:
            terminal.console().print(finding, markup=False)
    return EXIT_FINDING if findings else EXIT_FINE


def _cells(each: Generation, tracker: Any) -> list[str]:
    held = each.manifest
    checked = " (verified)" if each.verified and each.state == "complete" else ""
    return [
        each.folder.name + (" <- tracker" if tracker == each.step else ""),
        each.state + checked,
        f"{held.samples:,}" if held else "–",
        f"{generations.size_on_disk(each.folder) / 1e6:,.1f}",
        str(held.layout.get("world_size", "–")) if held else "–",
        escape(each.reason or "; ".join(map(str, each.problems[:3]))),
    ]


def _record(each: Generation) -> dict[str, Any]:
    held = each.manifest.model_dump(mode="json", exclude={"files"}) if each.manifest else None
    return {
        "folder": each.folder.name,
        "step": each.step,
        "state": each.state,
        "verified": each.verified,
        "reason": each.reason,
        "problems": [dataclasses.asdict(problem) for problem in each.problems],
        "manifest": held,
    }


def _drill(options: argparse.Namespace) -> int:
    if options.nproc is not None and not options.command:
        raise UsageError("--nproc: a resume with other ranks needs the run's command after `--`")
    if options.work is not None and not options.work.is_dir():
        raise UsageError(f"--work {options.work}: is not a folder; make it, or name another")
    if not options.timeout > 0:
        raise UsageError(f"--timeout {options.timeout:g}: must be more than 0 seconds")
    command = options.command
    if command and command[0] not in ("pretrain", "run"):
        raise UsageError(
            f"{command[0]}: after `--` comes the run's command as it follows `megatron-stability`: pretrain or run"
        )
    with (
        tempfile.TemporaryDirectory(prefix=".drill-", dir=options.work or options.folder) as work,
        Console(stderr=True).status("damaging copies") as doing,
    ):
        outcomes = list(drill.file_drills(options.folder, Path(work) / "files"))
        for number, nproc in enumerate((None, options.nproc) if command else ()):
            if number and nproc is None:
                continue
            doing.update(f"a resumed run on {'as many' if nproc is None else nproc} ranks")
            place = Path(work) / f"run-{number}"
            place.mkdir()
            outcomes.append(drill.resume_drill(options.folder, place, command, nproc=nproc, timeout_s=options.timeout))
    if options.json:
        _dump({"drills": [dataclasses.asdict(outcome) for outcome in outcomes]})
    else:
        table = Table(show_edge=False, pad_edge=False)
        for name in ("drill", "expected", "got", "", "detail"):
            table.add_column(name)
        for outcome in outcomes:
            verdict = "passed" if outcome.passed else "FAILED"
            table.add_row(outcome.drill, outcome.expected, outcome.got, verdict, escape(outcome.detail))
        terminal.console().print(table)
        if not options.command:
            terminal.console().print("not rehearsed: a resumed run; give the run's command after --", markup=False)
    return EXIT_FINE if all(outcome.passed for outcome in outcomes) else EXIT_FINDING


def _repair(options: argparse.Namespace) -> int:
    total = sum(each.manifest.size for each in generations.candidates(options.folder) if each.manifest)
    with _progress("verifying", total) as advance:
        before, now = generations.repair_tracker(options.folder, threads=options.threads, on_bytes=advance)
    changed = before != str(now)
    if options.json:
        _dump({"before": before, "now": now, "changed": changed})
    else:
        was = f"said {before!r} and names" if changed else "names"
        terminal.console().print(f"{TRACKER} {was} step {now}, the newest complete, verified checkpoint", markup=False)
    return EXIT_FINE


def _suspect(options: argparse.Namespace) -> int:
    each = generations.generation(options.folder)
    generations.mark_suspect(each.folder, options.reason)
    if options.json:
        _dump(_record(generations.generation(options.folder)))
        return EXIT_FINE
    good = generations.newest_good(each.folder.parent)
    then = "no other is complete: a resume is refused" if good is None else f"a resume takes step {good.step} now"
    text = said(f"{each.folder.name} is kept as evidence, suspect: {options.reason}; {then}")
    terminal.console().print(text, markup=False)
    return EXIT_FINE


def _dump(document: Any) -> None:
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
