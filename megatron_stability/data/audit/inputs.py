"""What is audited, in tasks of bounded size: stretches of a Megatron data set, of JSONL, text and Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_stability import files
from megatron_stability.data import index as indexes
from megatron_stability.data import sources
from megatron_stability.data.blends import DataSet, blend
from megatron_stability.data.scores import Ints
from megatron_stability.data.tokenizers import Tokenizer
from megatron_stability.errors import UsageError

TASK = 1 << 24  # tokens, or bytes of text: what is done anew after an interruption
CHUNK = 1 << 18  # tokens that are scored at once; a longer document is scored in parts of so many
PARQUET = ".parquet"


@dataclass(frozen=True)
class Task:
    """A stretch of one input: of a data set the documents [first, end), of a file the bytes or row groups.

    Attributes:
        data_set: its place among the audited ones.
        name: prefix of the data set, or the file.
        kind: "indexed", "jsonl", "text" or "parquet".
        first: the first document, byte or row group.
        end: the one after the last.
    """

    data_set: int
    name: str
    kind: str
    first: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Whole documents, or a part of a long one, laid end to end.

    Attributes:
        ids: [N] as they stand in the data.
        starts: [D+1].
        documents: [D] number in the data set; of JSONL the byte at which the line begins.
        firsts: [D] the token of the document at which the part begins.
        empty: documents without a token, which are in none of these.
        bad: lines that can't be read: (byte, why).
    """

    ids: Ints
    starts: Ints
    documents: Ints
    firsts: Ints
    empty: int = 0
    bad: tuple[tuple[int, str], ...] = ()


def tasks(words: Sequence[str], patterns: Sequence[str]) -> tuple[list[DataSet], list[Task]]:
    """What the command's inputs name.

    Args:
        words: prefixes with or without weights, as `--data-path` takes them; files and folders of text.
        patterns: shell patterns of the files to take from folders.

    Returns:
        The data sets and the tasks, in order.

    Raises:
        UsageError: an input is not there, damaged or empty.
    """
    sets = blend("input", "all", words)
    found: list[Task] = []
    for at, each in enumerate(sets):
        if Path(f"{each.prefix}.idx").exists() or Path(f"{each.prefix}.bin").exists():
            found += _indexed(at, each)
        elif Path(each.prefix).suffix in (".idx", ".bin"):
            raise UsageError(f"input {each.prefix}: give the prefix, without {Path(each.prefix).suffix}")
        else:
            found += _of_files(at, each.prefix, patterns)
    if not found:
        raise UsageError(f"{', '.join(words)}: there is no document; give other data")
    return sets, found


def _indexed(at: int, given: DataSet) -> list[Task]:
    index = indexes.read("input", given.prefix)
    index.refuse_wrong_sizes()
    if not index.sequences:
        raise UsageError(f"input {given.prefix}: it has no document; make it again from text")
    edges, lengths, block = [0], index.lengths(), 1 << 22
    tokens = 0
    for first in range(0, index.sequences, block):
        ends = tokens % TASK + np.cumsum(lengths[first : first + block], dtype=np.int64)
        crossed = np.flatnonzero(np.diff(ends // TASK, prepend=0))
        edges += (first + 1 + crossed).tolist()
        tokens += int(ends[-1] - tokens % TASK)
    edges = sorted({*edges, index.sequences})
    return [Task(at, given.prefix, "indexed", *pair) for pair in pairwise(edges)]


def _of_files(at: int, given: str, patterns: Sequence[str]) -> list[Task]:
    found: list[Task] = []
    for source in sources.discover([Path(given)], patterns, ()):
        name = str(source.file)
        if source.file.suffix == PARQUET:
            from pyarrow import parquet

            try:
                groups = parquet.ParquetFile(name).num_row_groups
            except Exception as error:  # pyarrow's own kinds, of damaged footers
                raise UsageError(f"input {name}: is no Parquet file ({error})") from None
            found += [Task(at, name, "parquet", group, group + 1) for group in range(groups)]
        elif source.file.suffix in sources.JSONL_SUFFIXES:
            found += [Task(at, name, "jsonl", b, min(b + TASK, source.size)) for b in range(0, source.size, TASK)]
        elif source.size:
            found.append(Task(at, name, "text", 0, source.size))
    return found


def chunks(task: Task, tokenizer: Tokenizer | None, key: str, most: int | None = None) -> Iterator[Chunk]:
    """The documents of a task.

    Args:
        task: which.
        tokenizer: for text.
        key: of the text in JSONL lines and Parquet rows.
        most: end after so many tokens.

    Yields:
        Chunks of about `CHUNK` tokens.
    """
    if task.kind == "indexed":
        yield from _of_index(task, most)
        return
    assert tokenizer is not None, "text needs a tokenizer"
    held: list[tuple[int, Ints]] = []
    bad: list[tuple[int, str]] = []
    size = empty = total = 0
    for place, text, why in _texts(task, key):
        if why is None:
            try:
                ids = tokenizer.encode(text)
            except UnicodeDecodeError as error:
                why = f"not UTF-8 at byte {error.start}"
        if why is not None:
            bad.append((place, why))
            continue
        if not len(ids):
            empty += 1
            continue
        held.append((place, ids))
        size += len(ids)
        total += len(ids)
        if size >= CHUNK:
            yield from _parts(held, empty, bad)
            held, bad, size, empty = [], [], 0, 0
        if most is not None and total >= most:
            return
    yield from _parts(held, empty, bad)


def _of_index(task: Task, most: int | None) -> Iterator[Chunk]:
    index = indexes.read("input", task.name)
    ids = index.ids()
    at, tokens = task.first, 0
    while at < task.end and (most is None or tokens < most):
        lengths = index.lengths()[at : min(at + CHUNK, task.end)]
        fit = max(int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), CHUNK, "right")), 1)
        lengths, offsets = lengths[:fit], index.offsets(at, at + fit)
        numbers = np.arange(at, at + fit)[lengths > 0]
        offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
        empty = fit - len(numbers)
        at += fit
        tokens += int(lengths.sum())
        if len(numbers) == 1 and lengths[0] > CHUNK:
            yield from _long(int(numbers[0]), ids[offsets[0] : offsets[0] + lengths[0]], empty)
        elif len(numbers):
            starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            if (offsets == offsets[0] + starts[:-1]).all():
                flat = np.asarray(ids[offsets[0] : offsets[0] + starts[-1]])
            else:
                flat = np.concatenate([ids[o : o + n] for o, n in zip(offsets, lengths, strict=True)])
            yield Chunk(flat, starts, numbers, np.zeros(len(numbers), np.int64), empty)
        elif empty:
            nothing = np.zeros(0, np.int64)
            yield Chunk(nothing, np.zeros(1, np.int64), nothing, nothing, empty)


def _long(number: int, ids: Ints, empty: int) -> Iterator[Chunk]:
    for first in range(0, len(ids), CHUNK):
        part = np.asarray(ids[first : first + CHUNK])
        yield Chunk(part, np.array([0, len(part)]), np.array([number]), np.array([first]), empty if not first else 0)


def _parts(held: list[tuple[int, Ints]], empty: int, bad: list[tuple[int, str]]) -> Iterator[Chunk]:
    short = [(place, ids) for place, ids in held if len(ids) <= CHUNK]
    starts = np.concatenate([[0], np.cumsum([len(ids) for _, ids in short], dtype=np.int64)]).astype(np.int64)
    flat = np.concatenate([ids for _, ids in short]) if short else np.zeros(0, np.int64)
    places = np.array([place for place, _ in short], np.int64)
    if short or empty or bad:
        yield Chunk(flat, starts, places, np.zeros(len(short), np.int64), empty, tuple(bad))
    for place, ids in held:
        if len(ids) > CHUNK:
            yield from _long(place, ids, 0)


def _texts(task: Task, key: str) -> Iterator[tuple[int, bytes, str | None]]:
    """(place, text, None), or (place, b"", why it can't be read)."""
    file = Path(task.name)
    try:
        if task.kind == "text":
            yield 0, files.read_bytes(file, 1 << 40), None
        elif task.kind == "parquet":
            yield from _rows(task, key)
        else:
            with file.open("rb") as lines:
                if task.first:
                    lines.seek(task.first - 1)
                    lines.readline()  # it belongs to the task before, whole, unless it ends just here
                while (place := lines.tell()) < task.end and (line := lines.readline()):
                    if line.strip():
                        yield (place, *_line(line, key))
    except OSError as error:
        raise UsageError(f"input {file}: can't be read ({error.strerror})") from error


def _line(line: bytes, key: str) -> tuple[bytes, str | None]:
    try:
        return sources.jsonl_text(line.rstrip(b"\r\n"), "the line", key), None
    except UsageError as error:
        return b"", str(error)


def _rows(task: Task, key: str) -> Iterator[tuple[int, bytes, str | None]]:
    from pyarrow import parquet

    table = parquet.ParquetFile(task.name)
    if key not in table.schema_arrow.names:
        raise UsageError(
            f"input {task.name}: has no column {key!r}, but {', '.join(table.schema_arrow.names)}; --jsonl-key"
        )
    before = sum(table.metadata.row_group(at).num_rows for at in range(task.first))
    for batch in table.iter_batches(1024, row_groups=[task.first], columns=[key]):
        for at, value in enumerate(batch.column(0).to_pylist()):
            text = value if isinstance(value, bytes) else str(value or "").encode("utf-8", "surrogatepass")
            yield before + at, text, None
        before += batch.num_rows
