"""Documents that are not to be trained on, and where in a run's samples they stand.

A skip list is what `audit-data` writes: a line a document, or a stretch of one.

    {"input": PREFIX, "document": 17, "first": 0, "tokens": 812, "reasons": ["run 700 > 64"]}

A skipped document keeps its places: each of its tokens becomes an end of document, and its targets have no part in the
loss. So every other token of every sample stands where it stood, and the order of samples is untouched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_stability import files
from megatron_stability.data.order import Blend, Order
from megatron_stability.errors import UsageError


@dataclass(frozen=True)
class Skip:
    """A stretch of a document of a data set: tokens [first, first + tokens) of it."""

    prefix: str
    document: int
    first: int
    tokens: int


def read(file: Path) -> list[Skip]:
    """A skip list.

    Args:
        file: JSON lines.

    Raises:
        UsageError: it can't be read; names the line.
    """
    try:
        lines = files.read_bytes(file).splitlines()
    except OSError as error:
        raise UsageError(f"skip list {file}: can't be read ({error.strerror})") from None
    found = []
    for at, line in enumerate(lines, 1):
        try:
            said = files.parse_json(line)
            skip = Skip(str(said["input"]), *(int(said[name]) for name in ("document", "first", "tokens")))
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"skip list {file}: line {at} is no object with input, document, first and tokens; take one that "
                "audit-data wrote"
            ) from None
        if min(skip.document, skip.first) < 0 or skip.tokens < 1:
            raise UsageError(f"skip list {file}: line {at} has a number below 0, or no token")
        found.append(skip)
    return found


class Masks:
    """Which tokens of which samples are skipped."""

    def __init__(self, spans: dict[int, list[tuple[int, int]]], sequence_length: int) -> None:
        """`spans`: of each sample, stretches [first, end) of its s + 1 tokens; `sequence_length`: s."""
        self._spans = {sample: sorted(each) for sample, each in spans.items()}
        self._samples = np.array(sorted(spans), np.int64)
        counts = [sum(end - max(first, 1) for first, end in self._spans[each]) for each in self._samples.tolist()]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        """Samples that have a skipped token."""
        return len(self._spans)

    def spans(self, sample: int) -> Sequence[tuple[int, int]]:
        """Of a sample: stretches [first, end) of its s + 1 tokens, of which the last is a label only."""
        return self._spans.get(sample, ())

    def targets(self, first: int, end: int) -> int:
        """Targets of the samples [first, end) that have no part in the loss."""
        low, high = np.searchsorted(self._samples, (first, end))
        return int(self._before[high] - self._before[low])


def masks(blend: Blend, skips: Iterable[Skip]) -> Masks:
    """Where skipped documents stand in a run.

    Args:
        blend: the run's order.
        skips: of the list; those of other data sets are passed over.

    Raises:
        UsageError: none is of the run's data sets, or a data set has no such document.
    """
    by_prefix: dict[Path, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for skip in skips:
        by_prefix[Path(skip.prefix).resolve()][skip.document].append((skip.first, skip.first + skip.tokens))
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    met = False
    for which, order in enumerate(blend.orders):
        wanted = by_prefix.get(Path(order.index.prefix).resolve())
        if wanted is None:
            continue
        met = True
        if max(wanted) >= order.index.sequences:
            raise UsageError(
                f"skip list: {order.index.prefix} has {order.index.sequences} documents and no document {max(wanted)}; "
                "audit the data set as it is"
            )
        _add(spans, order, blend.places_of(which), wanted)
    if by_prefix and not met:
        names = ", ".join(order.index.prefix for order in blend.orders)
        raise UsageError(f"skip list: it is of {next(iter(by_prefix))}, and the run trains on {names}")
    return Masks(spans, blend.orders[0].sequence_length)


def _add(
    spans: dict[int, list[tuple[int, int]]],
    order: Order,
    places: np.ndarray,
    wanted: dict[int, list[tuple[int, int]]],
) -> None:
    s = order.sequence_length
    for at in np.flatnonzero(np.isin(order.documents, list(wanted))).tolist():
        start, stop = int(order.starts[at]), int(order.starts[at + 1])
        for first, end in wanted[int(order.documents[at])]:
            a, b = start + first, min(start + end, stop)
            for k in range(max(-(-(a - s) // s), 0), min((b - 1) // s, len(order) - 1) + 1):
                given = int(order.given_at[k])
                if a < b and given < len(places):
                    spans[int(places[given])].append((max(a - k * s, 0), min(b - k * s, s + 1)))
