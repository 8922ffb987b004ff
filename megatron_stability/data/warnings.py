"""What `prepare-data` sees of its documents as it goes: counts by kind, for a table at the end.

The kinds are those that no text has, whatever the corpus: with no corpus to compare with yet, a limit is the outer
bound of `data/limits.py`. `audit-data` looks closer.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import xxhash

from megatron_stability.data.byte_classes import ByteClasses
from megatron_stability.data.limits import BOUNDS
from megatron_stability.data.scores import LOW, SCORES, Ints, score

BATCH = 1 << 17  # tokens scored together
WARNED = ("repeated_4", "repeated_8", "run", "control", "invalid", "mojibake", "digits", "digit_run", "markup")
_LEAST = 32  # tokens of a document of which shares are said


class Warnings:
    """Documents of a data set that is being made, scored a batch at a time."""

    def __init__(self, classes: ByteClasses | None) -> None:
        """`classes`: of the tokenizer's ids; None leaves the scores of bytes out."""
        self._classes = classes
        self._held: list[tuple[str, Ints]] = []
        self._size = 0
        self._hashes: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, place: str, ids: Ints) -> None:
        """One document.

        Args:
            place: file, or file and line.
            ids: [n] of its text, without the end of document.
        """
        digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids))
        if digest in self._hashes:
            self._found("duplicate", place)
        self._hashes.add(digest)
        self._held.append((place, ids[:BATCH]))  # of a longer document its beginning
        self._size += len(self._held[-1][1])
        if self._size >= BATCH:
            self.flush()

    def empty(self, place: str) -> None:
        """A document without a token."""
        self._found("empty", place)

    def unreadable(self, place: str) -> None:
        """A line that was put into quarantine."""
        self._found("unreadable", place)

    def flush(self) -> None:
        """Score what is held."""
        if not self._held:
            return
        starts = np.concatenate([[0], np.cumsum([len(ids) for _, ids in self._held])])
        lengths = np.diff(starts)
        found = score(np.concatenate([ids for _, ids in self._held]), starts, self._classes)
        for name in WARNED:
            outer = BOUNDS[name].most
            if name not in found or outer is None:
                continue
            beyond = (found[name] < outer) if name in LOW else (found[name] > outer)
            if name != "run":
                beyond &= lengths >= _LEAST
            for row in np.flatnonzero(beyond).tolist():
                self._found(name, self._held[row][0])
        self._held, self._size = [], 0

    def _found(self, kind: str, place: str) -> None:
        self.counts[kind] += 1
        self.examples.setdefault(kind, place)

    def table(self) -> list[tuple[str, int, str, str]]:
        """(kind, documents, what it is, the first), the most first."""
        what = {
            "duplicate": "equal to an earlier document, token by token",
            "empty": "without a token, and left out",
            "unreadable": "in quarantine",
        }
        return [
            (kind, count, what.get(kind) or f"{SCORES[kind]}: above {BOUNDS[kind].most:g}", self.examples[kind])
            for kind, count in self.counts.most_common()
        ]
