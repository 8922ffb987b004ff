"""`megatron-stability audit-data`: look at training data before they train."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from megatron_stability import __version__, files
from megatron_stability.data import blends, limits, tokenizers
from megatron_stability.data import index as indexes
from megatron_stability.data.audit import findings, near, page, work
from megatron_stability.data.audit.findings import Summary, sidecar
from megatron_stability.data.audit.inputs import Task, tasks
from megatron_stability.data.audit.work import WORST, Scorer, Totals, run_task, sample
from megatron_stability.data.blends import DataSet
from megatron_stability.data.scores import Model
from megatron_stability.data.sources import DEFAULT_PATTERNS
from megatron_stability.data.tokenizer_table import byte_classes
from megatron_stability.echo import said
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.ledger.entries import strict

STATE = "audit.json"
EXCERPT = 300  # characters
FAIL_OVER = 0.001


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    flags = argparse.ArgumentParser(
        prog="megatron-stability audit-data",
        description="Scores every document of training data, and lists what should not be trained on. Resumable.",
        epilog="example: megatron-stability audit-data 0.7 data/web 0.3 data/code --tokenizer tokenizer.json "
        "--output audit/. Exit codes: 0 fine, 1 a finding, 2 unusable input.",
        allow_abbrev=False,
    )
    flags.add_argument(
        "inputs", nargs="*", metavar="[WEIGHT] INPUT", help="prefix, .jsonl, text or .parquet file, folder"
    )
    flags.add_argument("--data-args-path", metavar="FILE", help="file with the inputs, as Megatron's flag")
    flags.add_argument("--output", type=Path, required=True, metavar="DIR", help="for scores, page and skip list")
    flags.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer .json or .model that the ids are of")
    flags.add_argument("--tokenizer-bytes", action="store_true", help="ids are bytes, 256 ends a document")
    flags.add_argument("--eod-token", metavar="TOKEN", help="token that ends a document, where FILE does not say")
    flags.add_argument("--eod-id", type=int, metavar="N", help="likewise, as an id")
    flags.add_argument(
        "--vocab-size", type=int, metavar="N", help="ids from N on are outside (default: the tokenizer's)"
    )
    flags.add_argument("--preset", choices=("calibrated", "seed"), default="calibrated", help="default: calibrated")
    flags.add_argument("--force", action="store_true", help="use the seed preset where it does not fit")
    flags.add_argument(
        "--fail-over", type=float, default=FAIL_OVER, metavar="SHARE", help="of bad tokens (default 0.001)"
    )
    flags.add_argument("--near-duplicates", action="store_true", help="a second pass: documents nearly like others")
    flags.add_argument("--text", action="store_true", help="show how the worst documents begin")
    flags.add_argument("--jsonl-key", default="text", metavar="KEY", help="of the text, in JSONL and Parquet")
    flags.add_argument("--pattern", action="append", metavar="GLOB", help="files of folders")
    flags.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all)")
    flags.add_argument("--overwrite", action="store_true", help="begin anew where another audit is")
    flags.add_argument("--json", action="store_true", help="print the result as JSON")
    return flags


def run(argv: list[str]) -> int:
    """The command.

    Args:
        argv: the arguments after its name.

    Returns:
        The exit code: 1 where something was found.
    """
    args = parser().parse_args(argv)
    import pyarrow  # noqa: F401  # named at once where it is missing, not after the first pass

    if args.workers < 1 or not 0 <= args.fail_over < 1:
        raise UsageError("--workers must be at least 1, and --fail-over at least 0 and below 1")
    words = args.inputs or [str(each) for each in _words(args.data_args_path)]
    sets, todo = tasks(words, tuple(args.pattern or (*DEFAULT_PATTERNS, "*.parquet")))
    scorer, told = _scorer_of(args, sets, todo)
    try:
        totals = _audit(args, sets, todo, scorer)
    except OSError as error:
        raise UsageError(f"--output {args.output}: can't be written ({error.strerror})") from error
    together = findings.summed(totals, len(sets))
    summary = findings.judged(together, sets, args.output, args.fail_over, scorer.seed, scorer.eod)
    if args.near_duplicates:
        share, about = near.duplicates(todo, scorer, args.output)
        summary = replace(summary, notes=(*summary.notes, about))
        if share > args.fail_over:
            summary = replace(summary, findings=(*summary.findings, about))
    summary = replace(summary, notes=(*told, *summary.notes))
    skips = findings.write_skips(args.output, summary.sets)
    final = _limits_of(args.output)
    text = page.page(summary, sets, final, _excerpts(summary, scorer, todo) if args.text else {})
    files.write_atomically(args.output / "audit.html", text.encode())
    _tell(args, summary, skips)
    return EXIT_FINDING if summary.findings else EXIT_FINE


def _words(file: str | None) -> list[str]:
    if file is None:
        raise UsageError("give inputs, or --data-args-path FILE")
    named = argparse.Namespace(data_path=None, data_args_path=file)
    found: list[str] = []
    for each in blends.data_sets(named):
        found += [each.prefix] if each.weight is None else [str(each.weight), each.prefix]
    return found


def _scorer_of(args: argparse.Namespace, sets: Sequence[DataSet], todo: Sequence[Task]) -> tuple[Scorer, list[str]]:
    """What is known of the ids, by the flags or the sidecars; and what is not, to be told."""
    indexed = sorted({task.name for task in todo if task.kind == "indexed"})
    of_text = any(task.kind != "indexed" for task in todo)
    said_of = [sidecar(prefix).get("tokenizer") for prefix in indexed]
    made = [each for each in said_of if isinstance(each, dict)]
    told = []
    if args.tokenizer is not None and args.tokenizer_bytes:
        raise UsageError("--tokenizer and --tokenizer-bytes: give one of the two")
    if args.tokenizer is not None:
        _refuse_another(args.tokenizer, indexed, said_of)
        tokenizer: tokenizers.Tokenizer | None = tokenizers.load(args.tokenizer, args.eod_token)
    elif (
        args.tokenizer_bytes
        or of_text
        or (made and len(made) == len(said_of) and all(each.get("kind") == "bytes" for each in made))
    ):
        tokenizer = tokenizers.load(None, args.eod_token)
    else:
        tokenizer = None
        told.append("without --tokenizer the scores that need text are left out: ids are looked at, not bytes")
    classes = None if tokenizer is None else byte_classes(args.tokenizer)
    vocab_size = args.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    vocab_size = vocab_size or max((int(each["vocab_size"]) for each in made if "vocab_size" in each), default=None)
    eod = args.eod_id if args.eod_id is not None else (tokenizer.eod_id if tokenizer else None)
    eod = eod if eod is not None else next((int(each["eod_id"]) for each in made if "eod_id" in each), None)
    if indexed and eod is None:
        told.append("without --tokenizer or --eod-id no document's end is checked")
    if args.preset == "seed":
        shortest = min(
            (int(indexes.read("input", name).lengths().min()) for name in indexed), default=limits.SEED_LENGTH
        )
        limits.refuse_seed(vocab_size, shortest, args.force)
    used = tokenizer if of_text else None
    return Scorer(classes, used, args.jsonl_key, vocab_size, eod, args.preset == "seed"), told


def _refuse_another(file: Path, prefixes: Sequence[str], made: Sequence[Any]) -> None:
    if not file.is_file():
        raise UsageError(f"--tokenizer {file} is not a file.")
    digest = hashlib.sha256(files.read_bytes(file)).hexdigest()
    for prefix, each in zip(prefixes, made, strict=True):
        if isinstance(each, dict) and each.get("sha256", digest) != digest:
            raise UsageError(
                f"{prefix} was made with another tokenizer ({each.get('file')}, SHA-256 {str(each['sha256'])[:12]}…) "
                f"than --tokenizer {file} ({digest[:12]}…); give that one"
            )


# --- the passes -------------------------------------------------------------------------------------------------------


def _audit(args: argparse.Namespace, sets: Sequence[DataSet], todo: Sequence[Task], scorer: Scorer) -> list[Totals]:
    (args.output / "scores").mkdir(parents=True, exist_ok=True)
    scorer = _begun(args, sets, todo, scorer)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("scoring", total=len(todo))
        totals: dict[int, Totals] = {}
        if args.workers == 1 or len(todo) == 1:
            for at, task in enumerate(todo):
                totals[at] = run_task(at, task, scorer, args.output)
                progress.advance(bar)
        else:
            context = multiprocessing.get_context("forkserver")
            with ProcessPoolExecutor(min(args.workers, len(todo)), context) as pool:
                futures = {pool.submit(run_task, at, task, scorer, args.output): at for at, task in enumerate(todo)}
                for future in as_completed(futures):
                    totals[futures[future]] = future.result()
                    progress.advance(bar)
    return [totals[at] for at in range(len(todo))]


def _begun(args: argparse.Namespace, sets: Sequence[DataSet], todo: Sequence[Task], scorer: Scorer) -> Scorer:
    """The scorer with model and limits: those of an audit of the same that was interrupted, or new ones."""
    same = {
        "version": __version__,
        "tasks": [[*vars(task).values()] for task in todo],
        "sizes": [[Path(each).stat().st_size for each in _files_of(task)] for task in todo],
        "settings": {
            name: str(getattr(args, name))
            for name in ("tokenizer", "tokenizer_bytes", "jsonl_key", "preset", "vocab_size")
        },
    }
    state, arrays = args.output / STATE, args.output / "model.npz"
    try:
        before = files.read_json(state)
    except FileNotFoundError:
        before = None
    except ValueError:
        before = {}
    if before is not None and {name: before.get(name) for name in same} == strict(same):
        with np.load(arrays, allow_pickle=False) as held:
            model = Model(held["unigram"], *(held.get(each) for each in ("inner", "pairs")))
        return replace(scorer, model=model, limits=limits.Limits(before["middle"], before["limit"]))
    if before is not None and not args.overwrite:
        raise UsageError(
            f"--output {args.output} holds an audit of other data or settings; give --overwrite, or another"
        )
    for part in work.parts(args.output):
        part.unlink()
    model, found = sample(todo, scorer)
    kept = {name: value for name, value in vars(model).items() if value is not None}
    with tempfile.NamedTemporaryFile(dir=args.output, prefix=files.TEMPORARY, delete=False) as stream:
        np.savez(stream, **kept)
    os.replace(stream.name, arrays)
    what = {**same, "middle": dict(found.middle), "limit": dict(found.limit)}
    files.write_atomically(state, json.dumps(strict(what)).encode())
    return replace(scorer, model=model, limits=found)


def _files_of(task: Task) -> list[str]:
    return [f"{task.name}.idx", f"{task.name}.bin"] if task.kind == "indexed" else [task.name]


def _limits_of(folder: Path) -> limits.Limits:
    held = files.read_json(folder / STATE)
    return limits.Limits(held["middle"], held["limit"])


def _excerpts(summary: Summary, scorer: Scorer, todo: Sequence[Task]) -> dict[tuple[str, int, int], str]:
    """How the worst documents of data sets in Megatron's format begin."""
    indexed = {task.name for task in todo if task.kind == "indexed"}
    skips = sorted((skip for each in summary.sets for skip in each.skips), key=lambda skip: -skip["score"])[:WORST]
    found = {}
    for skip in skips:
        if skip["input"] in indexed and scorer.classes is not None:
            index = indexes.read("input", skip["input"])
            first = int(index.offsets(skip["document"], skip["document"] + 1)[0]) + skip["first"]
            ids = np.asarray(index.ids()[first : first + min(skip["tokens"], EXCERPT)])
            text = scorer.classes.decode(ids).decode("utf-8", "replace")[:EXCERPT]
            found[skip["input"], skip["document"], skip["first"]] = text
    return found


def _tell(args: argparse.Namespace, summary: Summary, skips: int) -> None:
    if args.json:
        sets = [{**vars(each), "skips": len(each.skips)} for each in summary.sets]
        told = {"findings": summary.findings, "notes": summary.notes, "duplicates": summary.duplicates, "sets": sets}
        print(json.dumps(strict({**told, "output": str(args.output), "skip_list": skips})))
        return
    documents, bad = sum(e.documents for e in summary.sets), sum(e.bad_documents for e in summary.sets)
    print(f"{documents:,} documents, {summary.tokens:,} tokens; {bad:,} bad documents with {summary.bad_tokens:,}.")
    for each in summary.findings:
        print(said(f"finding: {each}"))
    for each in summary.notes:
        print(said(f"note: {each}"))
    print(f"{args.output}: audit.html, skip.jsonl ({skips} lines), scores/*.parquet")
