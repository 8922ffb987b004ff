"""What a step read: its samples, the documents in them, and the files that those came from."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_stability.data import attribution, index, order
from megatron_stability.data.attribution import Piece, Source
from megatron_stability.data.audit.findings import sidecar
from megatron_stability.data.byte_classes import ByteClasses
from megatron_stability.data.tokenizer_table import byte_classes
from megatron_stability.echo import plain
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import LedgerView

SEED = 1234  # Megatron's default, which a `run` line leaves out
MOST = 4096  # samples that are traced; of a larger batch the first
EXCERPT = 240  # characters of a document


@dataclass(frozen=True, kw_only=True)
class Read:
    """One document of a batch.

    Attributes:
        prefix: of its data set.
        document: its number in PREFIX.idx.
        samples: those that it stands in, sorted.
        tokens: of it in the batch.
        first: the first of its tokens that is in the batch, from 0.
        last: the one after the last.
        source: where it came from; None where nobody kept it.
        text: how it begins in the batch; empty unless asked for.
    """

    prefix: str
    document: int
    samples: tuple[int, ...]
    tokens: int
    first: int
    last: int
    source: Source | None = None
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON primitives."""
        where = vars(self.source) if self.source is not None else {}
        text = {"text": self.text} if self.text else {}
        said = {"data_set": self.prefix, "document": self.document, "samples": list(self.samples)}
        return {**said, "tokens": self.tokens, "token_range": [self.first, self.last], **where, **text}

    @property
    def place(self) -> str:
        """File, line or offset where they are known."""
        if self.source is None:
            return "not kept"
        at = f"byte {self.source.offset:,}" if self.source.line is None else f"line {self.source.line}"
        return f"{self.source.path}, {at}"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples [first, last) and what was read for them; `told` says why nothing is, or what is left out."""

    first: int
    last: int
    reads: tuple[Read, ...] = ()
    told: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON primitives."""
        return {
            "samples": [self.first, self.last],
            "documents": [each.to_json() for each in self.reads],
            "told": self.told,
        }


@dataclass(frozen=True)
class Decoder:
    """Ids to text, by the tokenizer that a person names, or that a data set's sidecar says was bytes."""

    tokenizer: Path | None = None
    _tables: dict[str, ByteClasses | None] = field(default_factory=dict)

    def text(self, piece: Piece) -> str:
        """How a piece begins.

        Raises:
            UsageError: the tokenizer can't be read, or none is known.
        """
        table = self._table(piece.prefix)
        found = index.read("--data-path", piece.prefix)
        first = int(found.offsets(piece.document, piece.document + 1)[0]) + piece.first
        ids = np.asarray(found.ids()[first : first + min(piece.last - piece.first, EXCERPT)])
        return plain(table.decode(ids).decode("utf-8", "replace")[:EXCERPT])

    def _table(self, prefix: str) -> ByteClasses:
        if prefix not in self._tables:
            bytes_ = (sidecar(prefix).get("tokenizer") or {}).get("kind") == "bytes"
            self._tables[prefix] = byte_classes(self.tokenizer) if self.tokenizer or bytes_ else None
        table = self._tables[prefix]
        if table is None:
            raise UsageError(f"--text: {prefix} is not of bytes; name its tokenizer with --tokenizer FILE")
        return table


def arguments(view: LedgerView, generation: int) -> Namespace:
    """The flags that decide the order of a run's samples, as its ledger kept them.

    Args:
        view: the run's ledger.
        generation: of the process that is asked about.

    Raises:
        UsageError: the ledger is older than the keeping of settings.
    """
    runs = [run for run in view.runs if run.generation <= generation and run.settings]
    if not runs:
        raise UsageError("the ledger does not hold the run's settings, so its samples can't be traced")
    settings: Mapping[str, Any] = runs[-1].settings
    return Namespace(**{"seed": SEED, **{name: value for name, value in settings.items() if name.isidentifier()}})


def of_step(view: LedgerView, generation: int, first: int, last: int, decoder: Decoder | None = None) -> Batch:
    """What the samples [first, last) of a run hold.

    Args:
        view: the run's ledger.
        generation: of the process that read them.
        first: global sample index.
        last: the one after the last.
        decoder: for excerpts; None: none.

    Returns:
        The documents, those with most tokens first; where they can't be known, why.

    Raises:
        UsageError: excerpts are asked for and can't be made.
    """
    traced = range(first, min(last, first + MOST))
    try:
        blend = order.of_run(arguments(view, generation))
        pieces = attribution.attribute_all(blend, traced)
    except UsageError as error:
        return Batch(first=first, last=last, told=str(error))
    reads = _reads(pieces, decoder)
    told = f"of {last - first:,} samples the first {MOST:,}" if last - first > MOST else ""
    if all(each.source is None for each in reads):
        told = told or "files are known of data sets that prepare-data made"
    return Batch(first=first, last=last, reads=reads, told=told)


def _reads(pieces: Iterable[tuple[int, Piece]], decoder: Decoder | None) -> tuple[Read, ...]:
    by_document: dict[tuple[str, int], list[tuple[int, Piece]]] = {}
    for sample, piece in pieces:
        by_document.setdefault((piece.prefix, piece.document), []).append((sample, piece))
    found = [_read(group, decoder) for group in by_document.values()]
    return tuple(sorted(found, key=lambda read: (-read.tokens, read.prefix, read.document)))


def _read(group: Sequence[tuple[int, Piece]], decoder: Decoder | None) -> Read:
    piece = group[0][1]
    return Read(
        prefix=piece.prefix,
        document=piece.document,
        samples=tuple(sorted({sample for sample, _ in group})),
        tokens=sum(each.last - each.first for _, each in group),
        first=min(each.first for _, each in group),
        last=max(each.last for _, each in group),
        source=piece.source,
        text="" if decoder is None else decoder.text(piece),
    )
