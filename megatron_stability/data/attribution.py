"""From a sample to the documents, files and bytes that it was read from, and back.

    blend = order.of_run(args)            # once; `args`: the run's flags, as a bundle or a checkpoint keeps them
    attribute(blend, sample)              # which tokens of which documents stand in a sample, with file and offset
    samples_of(blend, prefix, document)   # every sample that reads a document
    documents_of(prefix, path)            # the documents that were made of a file
    readings(view, samples)               # every step of a ledger that took them, and what became of it

`sample` is a global sample index, as the ledger counts (`consumed_train_samples`). What stands in sample N does not
depend on ranks, micro-batches or restarts. Where a data set has no provenance beside it (`prepare-data` writes it),
`Piece.source` is None and the rest holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron_stability import files
from megatron_stability.data.order import Blend, Ints, Order
from megatron_stability.data.prepare import META, PROVENANCE
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import LedgerView, SaveEntry, StepEntry, UndoEntry


@dataclass(frozen=True)
class Source:
    """Where a document came from, as `prepare-data` kept it.

    Attributes:
        path: of the file, as it was given to `prepare-data` or below the folder that was.
        offset: the document's first byte in the file.
        length: its bytes.
        line: line from 1 of a JSONL file; None for a text file.
    """

    path: str
    offset: int
    length: int
    line: int | None


@dataclass(frozen=True)
class Piece:
    """A stretch of one document in a sample.

    Attributes:
        prefix: of the data set.
        data_set: its place in the blend, from 0.
        document: its number in PREFIX.idx, from 0.
        first: the first of the document's tokens that is here, from 0.
        last: the one after the last.
        at: where it begins in the sample's s + 1 tokens, of which the last is a label only.
        source: None where the data set has no provenance.
    """

    prefix: str
    data_set: int
    document: int
    first: int
    last: int
    at: int
    source: Source | None = None


@dataclass(frozen=True)
class Reading:
    """A step that took samples in question.

    Attributes:
        step: 1-based.
        generation: of the run; one more with every start and rewind.
        samples: those in question, sorted.
        fate: "trained", "skipped" or "halted".
        undone: a rewind or a restart went back behind it; the weights do not hold it.
        saved_in: the first step of which there was a checkpoint that holds it, on the surviving trajectory; None where
            there was none.
    """

    step: int
    generation: int
    samples: tuple[int, ...]
    fate: str
    undone: bool
    saved_in: int | None


def attribute(blend: Blend, sample: int) -> tuple[Piece, ...]:
    """What stands in a sample, in its order.

    Args:
        blend: the run's order.
        sample: global sample index.

    Returns:
        Pieces of s + 1 tokens together.

    Raises:
        UsageError: the run has no such sample, or a provenance file can't be read.
    """
    return tuple(piece for _, piece in attribute_all(blend, (sample,)))


def attribute_all(blend: Blend, samples: Iterable[int]) -> list[tuple[int, Piece]]:
    """What stands in samples, each piece with its sample; a data set's provenance is read once.

    Args:
        blend: the run's order.
        samples: global sample indexes.

    Raises:
        UsageError: as `attribute`.
    """
    found: list[tuple[int, Piece]] = []
    for sample in samples:
        which, count = blend.place(sample)
        found += [(sample, piece) for piece in _pieces(blend.orders[which], which, count)]
    wanted: dict[str, set[int]] = {}
    for _, piece in found:
        wanted.setdefault(piece.prefix, set()).add(piece.document)
    sources = {prefix: provenance(prefix, documents) for prefix, documents in wanted.items()}
    return [(sample, replace(piece, source=sources[piece.prefix].get(piece.document))) for sample, piece in found]


def _pieces(order: Order, which: int, count: int) -> list[Piece]:
    first, end = order.span(count)
    begin = int(np.searchsorted(order.starts, first, "right")) - 1
    last = int(np.searchsorted(order.starts, end, "left"))
    found = []
    for at in range(begin, last):
        start, stop = int(order.starts[at]), int(order.starts[at + 1])
        left, right = max(first, start), min(end, stop)
        if left < right:
            document = int(order.documents[at])
            found.append(Piece(order.index.prefix, which, document, left - start, right - start, left - first))
    return found


def samples_of(blend: Blend, prefix: str, documents: int | Iterable[int]) -> Ints:
    """Every sample of the run that reads a token of a document, in all epochs and all places of the blend.

    Args:
        blend: the run's order.
        prefix: of the data set.
        documents: numbers in its index.

    Returns:
        [n] global sample indexes, sorted, each once; those that training never reached too.

    Raises:
        UsageError: the run has no such data set or document.
    """
    wanted = np.unique(
        np.atleast_1d(np.asarray(documents if isinstance(documents, int) else list(documents), np.int64))
    )
    named = [at for at, order in enumerate(blend.orders) if order.index.prefix == prefix]
    if not named:
        raise UsageError(
            f"{prefix} is none of the run's training data: {', '.join(o.index.prefix for o in blend.orders)}"
        )
    total = blend.orders[named[0]].index.sequences
    if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < total:
        raise UsageError(
            f"{prefix} has documents 0 to {total - 1}; {wanted[-1] if wanted[0] >= 0 else wanted[0]} is none"
        )
    found = []
    for which in named:
        counts = _samples_of(blend.orders[which], wanted)
        places = blend.places_of(which)
        found.append(places[counts[counts < len(places)]])
    return np.unique(np.concatenate(found))


def _samples_of(order: Order, wanted: Ints) -> Ints:
    """Which of the data set's samples hold a token of the documents."""
    s = order.sequence_length
    at = np.flatnonzero(np.isin(order.documents, wanted))
    start, stop = order.starts[at], order.starts[at + 1]
    start, stop = start[start < stop], stop[start < stop]
    # Sample k holds [k·s, k·s + s]; so token t is in t // s, and where t is a multiple of s in the one before as well.
    low, high = np.maximum(-(-(start - s) // s), 0), np.minimum((stop - 1) // s, len(order) - 1)
    counts = np.maximum(high - low + 1, 0)
    before = np.concatenate([[0], np.cumsum(counts)[:-1]]) if len(counts) else counts
    rows = np.arange(counts.sum()) + np.repeat(low - before, counts)
    return order.given_at[np.unique(rows)]


# --- files ------------------------------------------------------------------------------------------------------------


def provenance(prefix: str, documents: Iterable[int]) -> dict[int, Source]:
    """Where documents came from.

    Args:
        prefix: of the data set.
        documents: numbers in its index.

    Returns:
        By number; none where the data set has no provenance.

    Raises:
        UsageError: it is damaged.
    """
    wanted = set(documents)
    found: dict[int, Source] = {}
    for number, source in _sources(prefix):
        if number in wanted:
            found[number] = source
            if len(found) == len(wanted):
                break
    return found


def documents_of(prefix: str, path: str) -> list[int]:
    """The documents that were made of a file.

    Args:
        prefix: of the data set.
        path: the file, whole or as its last parts.

    Raises:
        UsageError: the data set has no provenance, or knows no such file.
    """
    if not Path(f"{prefix}{PROVENANCE}").is_file():
        raise UsageError(f"{prefix}{PROVENANCE} does not exist: files are known of data sets that prepare-data made")
    wanted = Path(path).parts
    found = [number for number, source in _sources(prefix) if Path(source.path).parts[-len(wanted) :] == wanted]
    if not found:
        raise UsageError(f"{prefix} was not made of a file {path}")
    return found


def _sources(prefix: str) -> Iterator[tuple[int, Source]]:
    file = Path(f"{prefix}{PROVENANCE}")
    if not file.is_file():
        return
    inputs = _inputs(prefix)
    with file.open("rb") as lines:
        for at, line in enumerate(lines):
            try:
                said = files.parse_json(line)
                yield int(said["document"]), _source(said, inputs)
            except (ValueError, KeyError, TypeError, IndexError):
                raise UsageError(f"{file}: line {at + 1} is damaged; make the data set again") from None


def _source(said: dict[str, Any], inputs: Sequence[str]) -> Source:
    given = Path(inputs[said["input"]]) if inputs else Path()
    path = given if given.name == said["path"] else given / said["path"]
    return Source(str(path), int(said["offset"]), int(said["bytes"]), said.get("line"))


def _inputs(prefix: str) -> list[str]:
    """What `prepare-data` was given, by the sidecar."""
    try:
        said = files.read_json(Path(f"{prefix}{META}"))
        return [str(each) for each in said["inputs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{prefix}{META}: can't be read ({error}); make the data set again") from None


# --- steps ------------------------------------------------------------------------------------------------------------


def readings(view: LedgerView, samples: Iterable[int]) -> tuple[Reading, ...]:
    """The steps of a ledger that took samples.

    Args:
        view: a ledger.
        samples: global sample indexes, of any order.

    Returns:
        By step, then generation; what was undone too.
    """
    wanted = np.unique(np.fromiter(samples, np.int64))
    saved = _saved(view)
    found = [_reading(step, wanted, False, saved) for step in view.surviving]
    found += [_reading(step, wanted, True, saved) for step in view.undone]
    return tuple(sorted(filter(None, found), key=lambda each: (each.step, each.generation)))


def _saved(view: LedgerView) -> list[int]:
    """The steps of saves on the surviving trajectory, sorted."""
    live: set[int] = set()
    for entry in view.entries:
        if isinstance(entry, UndoEntry):
            live = {step for step in live if step <= entry.from_step}
        elif isinstance(entry, SaveEntry):
            live.add(entry.step)
    return sorted(live)


def _reading(step: StepEntry, wanted: Ints, undone: bool, saved: Sequence[int]) -> Reading | None:
    first, last = np.searchsorted(wanted, (step.first_sample, step.last_sample))
    if first == last:
        return None
    holds = next((at for at in saved if at >= step.step), None) if step.fate == "trained" and not undone else None
    samples = tuple(int(each) for each in wanted[first:last])
    return Reading(step.step, step.generation, samples, step.fate, undone, holds)


def stretches(samples: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted sample indexes as (first, last) of neighbours, `last` exclusive; as `decide.skip_samples` takes them."""
    found = []
    for _, run in groupby(enumerate(samples), key=lambda pair: pair[1] - pair[0]):
        members = [int(sample) for _, sample in run]
        found.append((members[0], members[-1] + 1))
    return found
