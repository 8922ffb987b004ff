"""One process's part of an audit: tasks scored against the corpus's limits, each into a file of its own.

    scores/part-00000.parquet   a row a document (a part of one where it is longer than 2^18 tokens)

A part is written under another name and renamed, so that a part that is there is whole, and an audit that was
interrupted goes on with the parts that are missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_stability import files
from megatron_stability.data.audit.inputs import Chunk, Task, chunks
from megatron_stability.data.byte_classes import ByteClasses
from megatron_stability.data.limits import SEED_MAXIMUM, Limits, calibrate, reasons
from megatron_stability.data.scores import Counts, Floats, Ints, Model, score, seed_preset
from megatron_stability.data.tokenizers import Tokenizer
from megatron_stability.errors import UsageError

Bools = npt.NDArray[np.bool_]
SAMPLE = 1 << 22  # tokens that limits are calibrated with
STRETCHES = 64  # from so many places
LENGTHS = 32  # bins of the lengths: by powers of 2
BINS = 40  # of each score's histogram
WORST = 20  # bad documents that a task remembers
OUTSIDE = "ids outside the vocabulary"


@dataclass(frozen=True)
class Scorer:
    """What every process needs, the same in all.

    Attributes:
        classes: of the ids; None where their bytes are not known.
        tokenizer: for text; None for ids.
        key: of the text in JSONL lines.
        vocab_size: V; None where it is not known.
        eod: the id that ends a document; None where it is not known or there is none.
        seed: judge by the `seed` preset.
        model: the corpus's tokens.
        limits: of the corpus.
    """

    classes: ByteClasses | None
    tokenizer: Tokenizer | None
    key: str
    vocab_size: int | None
    eod: int | None
    seed: bool
    model: Model | None = None
    limits: Limits | None = None

    def scored(self, chunk: Chunk) -> tuple[dict[str, Floats], Bools]:
        """[D] scores by name, and whether a document has an id outside the vocabulary."""
        table = len(self.model.unigram) if self.model is not None else self.size(int(chunk.ids.max(initial=0)))
        wrong = (chunk.ids < 0) | (chunk.ids >= (self.vocab_size or table))
        outside = np.add.reduceat(wrong, chunk.starts[:-1], dtype=np.int64) > 0
        ids = np.clip(chunk.ids, 0, table - 1) if wrong.any() or int(chunk.ids.max(initial=0)) >= table else chunk.ids
        found = score(ids, chunk.starts, self.classes, self.model)
        if self.seed:
            found["seed"] = seed_preset(ids, chunk.starts)
        return found, outside

    def size(self, largest: int) -> int:
        """Ids that tables are made for."""
        if self.classes is not None:
            return len(self.classes.high)
        return self.vocab_size or largest + 1


@dataclass
class Totals:
    """What one task adds up to; JSON primitives."""

    data_set: int
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad_documents: int = 0
    bad_tokens: int = 0
    outside: int = 0
    no_eod: int = 0
    seed: float = 0.0  # sum over documents
    longest: int = 0
    at_longest: int = 0
    unreadable: list[list[Any]] = field(default_factory=list)  # [file, byte, why]
    by_reason: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=lambda: [0] * LENGTHS)
    histograms: dict[str, list[int]] = field(default_factory=dict)
    skips: list[dict[str, Any]] = field(default_factory=list)  # bad documents, and why


def sample(tasks: Sequence[Task], scorer: Scorer) -> tuple[Model, Limits]:
    """The corpus's own tokens, and its limits, from stretches that lie evenly over it.

    Args:
        tasks: of the audit.
        scorer: without either.

    Raises:
        UsageError: there is no document.
    """
    every = max(1, len(tasks) // STRETCHES)
    chosen = tasks[::every][:STRETCHES]
    most = max(SAMPLE // len(chosen), 1)
    held = [
        chunk for task in chosen for chunk in chunks(task, scorer.tokenizer, scorer.key, most) if len(chunk.documents)
    ]
    if not held:
        raise UsageError("there is no document with a token to calibrate with; give other data")
    size = scorer.size(max(int(chunk.ids.max()) for chunk in held))
    counts = Counts(size, scorer.classes)
    for chunk in held:
        counts.add(np.clip(chunk.ids, 0, size - 1), chunk.starts)
    model = counts.model()
    with_model = Scorer(**{**vars(scorer), "model": model})
    found = [with_model.scored(chunk)[0] for chunk in held]
    together = {name: np.concatenate([each[name] for each in found]) for name in found[0] if name != "seed"}
    return model, calibrate(together, np.concatenate([np.diff(chunk.starts) for chunk in held]), size)


def run_task(number: int, task: Task, scorer: Scorer, folder: Path) -> Totals:
    """Score a task into its part, unless that is there.

    Args:
        number: of the part.
        task: which.
        scorer: with model and limits.
        folder: of the audit.

    Returns:
        What it adds up to.
    """
    import pyarrow as pa
    from pyarrow import parquet

    part = folder / "scores" / f"part-{number:05d}.parquet"
    if part.exists():
        said = parquet.read_metadata(part).metadata[b"totals"]
        return Totals(**json.loads(said))
    totals = Totals(task.data_set)
    tables = [_table(chunk, task, scorer, totals) for chunk in chunks(task, scorer.tokenizer, scorer.key)]
    table = pa.concat_tables([pa.table(each) for each in tables if each is not None] or [pa.table({})])
    table = table.replace_schema_metadata({"totals": json.dumps(vars(totals))})
    temporary = files.temporary_name(part.parent)
    parquet.write_table(table, temporary, compression="zstd")
    os.replace(temporary, part)
    return totals


def _table(chunk: Chunk, task: Task, scorer: Scorer, totals: Totals) -> dict[str, Any] | None:
    totals.empty += chunk.empty
    totals.unreadable += [[task.name, place, why] for place, why in chunk.bad][: WORST - len(totals.unreadable)]
    if not len(chunk.documents):
        return None
    lengths = np.diff(chunk.starts)
    found, outside = scorer.scored(chunk)
    beyond = _beyond(found, lengths, scorer)
    worst = np.max(list(beyond.values()), axis=0)
    totals.seed += float(found["seed"].sum()) if scorer.seed else 0.0
    bad = (worst > 1) | outside
    _count(chunk, lengths, bad, outside, scorer, totals)
    for name, values in beyond.items():
        counted = np.histogram(np.clip(values, -1, 3), BINS, (-1, 3))[0]
        before = totals.histograms.get(name, [0] * BINS)
        totals.histograms[name] = [int(a + b) for a, b in zip(before, counted, strict=True)]
    for row in np.flatnonzero(bad).tolist():
        why = [OUTSIDE] if outside[row] else []
        why += _why(beyond, row, found, scorer)
        for reason in why[:1]:
            name = reason if reason == OUTSIDE else reason.split()[0]
            totals.by_reason[name] = totals.by_reason.get(name, 0) + 1
        place = {"document": int(chunk.documents[row]), "first": int(chunk.firsts[row]), "tokens": int(lengths[row])}
        totals.skips.append({"input": task.name, **place, "score": round(float(worst[row]), 3), "reasons": why})
    return {
        "input": [task.name] * len(lengths),
        "document": chunk.documents,
        "first": chunk.firsts,
        "tokens": lengths,
        **{name: values.astype(np.float32) for name, values in found.items()},
        "beyond": worst.astype(np.float32),
        "bad": bad,
        "hash": _hashes(chunk),
    }


def _beyond(found: dict[str, Floats], lengths: Ints, scorer: Scorer) -> dict[str, Floats]:
    assert scorer.limits is not None, "calibrate first"
    return {"seed": found["seed"] / SEED_MAXIMUM} if scorer.seed else scorer.limits.beyond(found, lengths)


def _why(beyond: dict[str, Floats], row: int, found: dict[str, Floats], scorer: Scorer) -> list[str]:
    assert scorer.limits is not None, "calibrate first"
    if scorer.seed:
        return [f"seed {found['seed'][row]:.3g} > {SEED_MAXIMUM}"] if beyond["seed"][row] > 1 else []
    return reasons(beyond, row, found, scorer.limits)


def _count(chunk: Chunk, lengths: Ints, bad: Bools, outside: Bools, scorer: Scorer, totals: Totals) -> None:
    totals.documents += int((chunk.firsts == 0).sum())
    totals.tokens += int(lengths.sum())
    totals.bad_documents += int(bad.sum())
    totals.bad_tokens += int(lengths[bad].sum())
    totals.outside += int(outside.sum())
    if scorer.eod is not None and scorer.tokenizer is None:
        totals.no_eod += int((chunk.ids[chunk.starts[1:] - 1] != scorer.eod).sum())
    bins = np.bincount(np.minimum(np.log2(lengths).astype(np.int64), LENGTHS - 1), minlength=LENGTHS)
    totals.lengths = [int(a + b) for a, b in zip(totals.lengths, bins, strict=True)]
    longest = int(lengths.max())
    count = int((lengths == longest).sum())
    if longest > totals.longest:
        totals.longest, totals.at_longest = longest, count
    elif longest == totals.longest:
        totals.at_longest += count


def _hashes(chunk: Chunk) -> Ints:
    """[D] uint64 of each document's tokens: equal documents have equal ones."""
    wide = np.ascontiguousarray(chunk.ids.astype(np.int32))
    view = memoryview(wide).cast("B")
    edges = (4 * chunk.starts).tolist()
    found = [xxhash.xxh3_64_intdigest(view[a:b]) for a, b in pairwise(edges)]
    return np.array(found, np.uint64)


def parts(folder: Path) -> Iterator[Path]:
    """The parts of an audit, in order."""
    yield from sorted((folder / "scores").glob("part-*.parquet"))
