"""`megatron-stability prepare-data`: text in, a Megatron data set (`.bin`, `.idx`) and its provenance out.

    PREFIX.bin, PREFIX.idx      written by Megatron's own IndexedDatasetBuilder
    PREFIX.provenance.jsonl     document number -> file, byte offset, bytes, tokens
    PREFIX.meta.json            tokenizer, counts, SHA-256 of the others, flags to train with

All four are built in a folder of their own and renamed into place, the index last: Megatron reads no data set without
one, so an interrupted run leaves nothing that could be trained on.
"""

import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_stability import __version__
from megatron_stability.data import tokenizers
from megatron_stability.data.encodings import decoded
from megatron_stability.data.prepare_flags import parser
from megatron_stability.data.sources import DEFAULT_PATTERNS, Document, Source, discover, documents
from megatron_stability.data.splits import fitting
from megatron_stability.data.tokenizer_table import byte_classes
from megatron_stability.data.tokenizers import Ids, Tokenizer
from megatron_stability.data.warnings import Warnings
from megatron_stability.echo import said
from megatron_stability.errors import EXIT_FINE, UsageError
from megatron_stability.ledger.entries import strict

BIN, IDX, PROVENANCE, META = ".bin", ".idx", ".provenance.jsonl", ".meta.json"
QUARANTINE = ".quarantine.jsonl"  # lines that were no documents, with --on-error quarantine
MAX_DOCUMENT_TOKENS = 2**31 - 1  # the index keeps lengths as int32


@dataclass(frozen=True)
class Options:
    """How to prepare; the defaults are the command's.

    Attributes:
        tokenizer: a tokenizers `.json` or SentencePiece `.model` file; None for bytes.
        eod_token: the token that ends a document, where the tokenizer file does not say.
        append_eod: end every document with the EOD id.
        jsonl_key: key of the text in JSONL lines.
        patterns: shell patterns of the files to take from folders.
        exclude: shell patterns of relative paths to leave out of folders.
        max_bytes: take whole documents in order while their text stays within this many bytes.
        workers: threads that encode; the result does not depend on it.
        overwrite: replace a data set of the same prefix.
        follow_links: take files that a link in a folder leads to, out of that folder too.
        quarantine: lines of JSONL that are no documents go to PREFIX.quarantine.jsonl; else the first ends the run.
        encoding: of text files, for `codecs`; None: their bytes as they are; "detect": by charset-normalizer.
    """

    tokenizer: Path | None = None
    eod_token: str | None = None
    append_eod: bool = True
    jsonl_key: str = "text"
    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    exclude: tuple[str, ...] = ()
    max_bytes: int | None = None
    workers: int = 1
    overwrite: bool = False
    follow_links: bool = False
    quarantine: bool = False
    encoding: str | None = None


@dataclass(frozen=True)
class Summary:
    """What was written.

    Attributes:
        prefix: the path that `--data-path` takes.
        documents: documents written.
        empty_documents: documents left out because they hold no token.
        tokens: ids written, EOD included.
        text_bytes: bytes of text in them.
        vocab_size: V of the tokenizer.
        eod_id: the id that ends a document.
        training_flags: Megatron's flags to train on it.
        warnings: (kind, documents, what it is, the first of them) of documents that are unlike any text.
    """

    prefix: str
    documents: int
    empty_documents: int
    tokens: int
    text_bytes: int
    vocab_size: int
    eod_id: int
    training_flags: tuple[str, ...]
    warnings: tuple[tuple[str, int, str, str], ...] = ()


@dataclass
class _Counts:
    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    largest_id: int = -1
    quarantined: int = 0


class Index(Protocol):
    """What writes Megatron's format: its own `IndexedDatasetBuilder`."""

    data_file: BinaryIO

    def add_document(self, tensor: Any, lengths: list[int], /) -> None:
        """Append a document's ids [n], of which `lengths` is [n]."""

    def finalize(self, idx_path: str, /) -> None:
        """Write the index."""


OpenIndex = Callable[[str, int], Index]  # path of the .bin, vocabulary size V
BadLine = Callable[[str, bytes, UsageError], None]


def prepare(
    inputs: Sequence[str | Path], prefix: str | Path, open_index: OpenIndex, options: Options | None = None
) -> Summary:
    """Writes the data set `prefix` from text files, JSONL files and folders.

    Args:
        inputs: files and folders, in the order in which their documents go into the data set.
        prefix: path of the data set without suffix; its folder is made when missing.
        open_index: opens Megatron's writer; called once the input was judged, for it takes seconds to import.
        options: see `Options`.

    Returns:
        The counts, and the flags to train with.

    Raises:
        UsageError: unusable input or output; nothing was written under `prefix`.
    """
    options = options or Options()
    _check(options)
    tokenizer = tokenizers.load(options.tokenizer, options.eod_token)
    sources = discover([Path(given) for given in inputs], options.patterns, options.exclude, options.follow_links)
    target = Path(prefix)
    try:  # what can't be read is told by the sources; any other failure is the output's
        _check_target(target, options.overwrite, str(prefix).endswith("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".prepare-data-", dir=target.parent) as folder:
            built = Path(folder) / "data"
            warnings = Warnings(byte_classes(options.tokenizer))
            counts = _build(sources, built, tokenizer, open_index, options, warnings)
            flags = ["--data-path", str(target), *tokenizers.training_flags(tokenizer)]
            flags += ["--split", fitting(counts.documents)]  # Megatron's default leaves a split of few documents empty
            _write_meta(built, [str(given) for given in inputs], tokenizer, options, counts, flags)
            _publish(built, target)
            _publish_quarantine(built, target, counts)
    except OSError as error:
        raise UsageError(f"--output {target} cannot be written ({error.strerror}); choose another folder.") from error
    return Summary(
        prefix=str(target),
        documents=counts.documents,
        empty_documents=counts.empty_documents,
        tokens=counts.tokens,
        text_bytes=counts.text_bytes,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        training_flags=tuple(flags),
        warnings=tuple(warnings.table()),
    )


def _check(options: Options) -> None:
    if options.workers < 1:
        raise UsageError(f"--workers {options.workers} must be at least 1.")
    if options.max_bytes is not None and options.max_bytes < 1:
        raise UsageError(f"--max-bytes {options.max_bytes} must be at least 1.")


def _check_target(target: Path, overwrite: bool, folder: bool) -> None:
    if folder or not target.name or target.is_dir():
        raise UsageError(f"--output {target} is a folder; give a path prefix such as {target / 'data'}.")
    there = [path for path in map(target.with_name, _names(target.name)) if path.exists()]
    if there and not overwrite:
        raise UsageError(f"{there[0]} exists; give another --output, or --overwrite to replace the data set.")


def _names(stem: str) -> list[str]:
    """File names of a data set in the order of publication: the index last, it makes the others readable."""
    return [stem + suffix for suffix in (BIN, PROVENANCE, META, IDX)]


def _build(
    sources: Sequence[Source],
    built: Path,
    tokenizer: Tokenizer,
    open_index: OpenIndex,
    options: Options,
    warnings: Warnings,
) -> _Counts:
    """Writes bin, idx and provenance; raises UsageError when no document is left."""
    counts = _Counts()
    eod = np.array([tokenizer.eod_id] if options.append_eod else [], dtype=np.int64)
    builder = open_index(f"{built}{BIN}", tokenizer.vocab_size)
    try:
        with (
            Path(f"{built}{PROVENANCE}").open("w", encoding="utf-8", newline="\n") as provenance,
            Path(f"{built}{QUARANTINE}").open("w", encoding="utf-8", newline="\n") as quarantine,
        ):

            def bad_line(place: str, line: bytes, error: UsageError) -> None:
                counts.quarantined += 1
                warnings.unreadable(place)
                said = {"place": place, "why": str(error), "line": line.decode("utf-8", "backslashreplace")}
                quarantine.write(json.dumps(said) + "\n")

            for document, ids in _encoded(sources, tokenizer, options, bad_line if options.quarantine else None):
                if ids.size == 0:
                    counts.empty_documents += 1
                    warnings.empty(document.place())
                    continue
                warnings.add(document.place(), ids)
                tokens = np.concatenate([ids, eod])
                if tokens.size > MAX_DOCUMENT_TOKENS:
                    raise UsageError(f"{document.place()} has {tokens.size} tokens; an index holds 2^31 - 1, split it.")
                builder.add_document(tokens, [tokens.size])
                provenance.write(json.dumps(_provenance(counts.documents, document, tokens.size)) + "\n")
                counts.documents += 1
                counts.tokens += tokens.size
                counts.largest_id = max(counts.largest_id, int(tokens.max()))
                counts.text_bytes += len(document.text)
        warnings.flush()
        if counts.documents == 0:
            raise UsageError(_nothing(options))
        builder.finalize(f"{built}{IDX}")
    finally:
        builder.data_file.close()
    return counts


def _nothing(options: Options) -> str:
    if options.max_bytes is not None:
        return f"no document with text fits into --max-bytes {options.max_bytes}; raise it."
    return "the inputs hold no text; give other inputs or another --pattern."


def _provenance(number: int, document: Document, tokens: int) -> dict[str, Any]:
    source = document.source
    place = {"input": source.input, "path": source.path, "offset": document.offset, "bytes": document.length}
    line = {} if document.line is None else {"line": document.line}
    encoding = {} if document.encoding is None else {"encoding": document.encoding}
    return {"document": number, **place, **line, **encoding, "tokens": tokens}


def _encoded(
    sources: Sequence[Source], tokenizer: Tokenizer, options: Options, bad_line: BadLine | None
) -> Iterator[tuple[Document, Ids]]:
    """Documents and their ids [n], without EOD, in order; encoded by threads, since the tokenizers release the GIL."""

    def encode(document: Document) -> Ids:
        try:
            ids = tokenizer.encode(document.text)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{document.place()} is not UTF-8 at byte {error.start}; mend it, or leave out --tokenizer for bytes."
            ) from error
        if tokenizer.eod_id in ids:
            raise UsageError(f"{document.place()} holds the end-of-document token as text; choose another --eod-token.")
        return ids

    taken = _within(sources, options, bad_line)
    if options.workers == 1:
        yield from ((document, encode(document)) for document in taken)
        return
    with ThreadPoolExecutor(options.workers) as pool:
        for batch in batched(taken, 4 * options.workers):
            yield from zip(batch, pool.map(encode, batch), strict=True)


def _within(sources: Sequence[Source], options: Options, bad_line: BadLine | None) -> Iterator[Document]:
    """Documents in order, up to the first that would pass `max_bytes`; shows progress on a terminal."""
    left = float("inf") if options.max_bytes is None else options.max_bytes
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenizing", total=min(left, sum(source.size for source in sources)))
        for source in sources:
            for document in map(
                partial(decoded, encoding=options.encoding), documents(source, options.jsonl_key, bad_line)
            ):
                left -= len(document.text)
                if left < 0:
                    return
                yield document
                progress.advance(task, document.length)


def _write_meta(
    built: Path, inputs: list[str], tokenizer: Tokenizer, options: Options, counts: _Counts, flags: list[str]
) -> None:
    """Writes the sidecar; it holds no time and no host, so equal inputs give equal bytes."""
    meta = {
        "format": 1,
        "megatron_stability": __version__,
        "inputs": inputs,
        "tokenizer": tokenizers.describe(tokenizer, options.tokenizer),
        "append_eod": options.append_eod,
        "jsonl_key": options.jsonl_key,
        "patterns": options.patterns,
        "exclude": options.exclude,
        "max_bytes": options.max_bytes,
        "encoding": options.encoding,
        **vars(counts),
        "sha256": {suffix: _sha256(Path(f"{built}{suffix}")) for suffix in (BIN, IDX, PROVENANCE)},
        "training_flags": flags,
    }
    Path(f"{built}{META}").write_text(json.dumps(strict(meta), indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(built: Path, target: Path) -> None:
    """Moves the files into place: an old index goes first and the new one comes last."""
    target.with_name(target.name + IDX).unlink(missing_ok=True)
    for made, name in zip(map(built.with_name, _names(built.name)), _names(target.name), strict=True):
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(target.with_name(name))


def _publish_quarantine(built: Path, target: Path, counts: _Counts) -> None:
    """Beside the data set where it holds a line; one of an earlier data set goes."""
    place = target.with_name(target.name + QUARANTINE)
    if counts.quarantined:
        built.with_name(built.name + QUARANTINE).replace(place)
    else:
        place.unlink(missing_ok=True)


def run(argv: list[str], open_index: OpenIndex) -> int:
    """The command `prepare-data`.

    Args:
        argv: the arguments after the command's name.
        open_index: as `prepare` takes it.

    Returns:
        The exit code.
    """
    args = parser().parse_args(argv)
    options = Options(
        tokenizer=args.tokenizer,
        eod_token=args.eod_token,
        append_eod=args.append_eod,
        jsonl_key=args.jsonl_key,
        patterns=tuple(args.pattern or DEFAULT_PATTERNS),
        exclude=tuple(args.exclude),
        max_bytes=args.max_bytes,
        workers=args.workers,
        overwrite=args.overwrite,
        follow_links=args.follow_links,
        quarantine=args.on_error == "quarantine",
        encoding=args.encoding,
    )
    summary = prepare(args.inputs, args.output, open_index, options)
    if args.json:
        print(json.dumps(vars(summary)))
        return EXIT_FINE
    skipped = f" ({summary.empty_documents} empty ones left out)" if summary.empty_documents else ""
    print(f"{summary.prefix}: {summary.documents} documents{skipped}, {summary.tokens} tokens.")
    for kind, count, what, first in summary.warnings:
        print(said(f"warning: {count} documents: {kind} ({what}), the first {first}"))
    print("Train on it with: " + shlex.join(summary.training_flags))
    return EXIT_FINE
