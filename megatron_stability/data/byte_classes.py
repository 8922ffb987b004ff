"""What bytes each token id stands for, counted by class: the table by which scores of text are sums over ids.

The ids of a byte-level tokenizer stand for parts of characters, so classes are of bytes, not of characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_stability.data.tokenizers import BYTE_VALUES

#: Columns of `ByteClasses.counts`.
CLASSES = (
    "bytes",
    "continuation",
    "control",
    "replacement",
    "digits",
    "markup",
    "symbols",
    "ascii_bytes",
    "ascii_tokens",
)
_REPLACEMENT = "\ufffd".encode()
_SPACE = b" \t\n\r\f\v"


@dataclass(frozen=True)
class ByteClasses:
    """Of every id, what its bytes are.

    Attributes:
        counts: [V, 9] int32, columns as `CLASSES`: bytes; bytes 0x80 to 0xBF; control characters but white space;
            U+FFFD; digits; < > & =; ASCII punctuation; bytes of an id that has ASCII alone, and 1 for such an id.
        all_digits: [V] the id is digits, with white space around them at most.
        has_space: [V] it has white space in it.
        high: [V] it has a byte above 0x7F.
        first: [V] its first byte; -1 where it has none.
        last: [V] its last byte; -1 where it has none.
        kinds: [V] uint64, a bit for each byte value modulo 64.
        text: the bytes of all ids end to end, and
        offsets: [V+1] where those of each begin.
    """

    counts: npt.NDArray[np.int32]
    all_digits: npt.NDArray[np.bool_]
    has_space: npt.NDArray[np.bool_]
    high: npt.NDArray[np.bool_]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint64]
    text: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    def decode(self, ids: npt.NDArray[np.integer]) -> bytes:
        """The text of ids [n]; those beyond the table have none."""
        known = ids[(ids >= 0) & (ids < len(self.high))]
        return b"".join(self.text[self.offsets[each] : self.offsets[each + 1]].tobytes() for each in known.tolist())


def of_table(table: Sequence[bytes]) -> ByteClasses:
    """From the bytes of every id.

    Args:
        table: [V]; empty for ids without text, such as the end of a document.
    """
    of_value = _of_value()
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in table])]).astype(np.int64)
    row = np.repeat(np.arange(len(table)), np.diff(offsets))
    flat = np.frombuffer(b"".join(table), np.uint8)
    counts = np.stack([np.bincount(row, of_value[flat, at], len(table)) for at in range(len(CLASSES))], 1)
    counts[:, CLASSES.index("replacement")] = [each.count(_REPLACEMENT) for each in table]
    high = np.bincount(row, flat > 0x7F, len(table)) > 0
    counts[:, CLASSES.index("ascii_bytes")] = np.where(high, 0, np.diff(offsets))
    counts[:, CLASSES.index("ascii_tokens")] = ~high & (np.diff(offsets) > 0)
    kinds = np.zeros(len(table), np.uint64)
    np.bitwise_or.at(kinds, row, np.uint64(1) << (flat % 64).astype(np.uint64))
    return ByteClasses(
        counts=counts.astype(np.int32),
        all_digits=np.array([each.strip().isdigit() for each in table]),
        has_space=np.bincount(row, np.isin(flat, list(_SPACE)), len(table)) > 0,
        high=high,
        first=np.array([each[0] if each else -1 for each in table], np.int64),
        last=np.array([each[-1] if each else -1 for each in table], np.int64),
        kinds=kinds,
        text=flat,
        offsets=offsets,
    )


def _of_value() -> npt.NDArray[np.int32]:
    """[256, 9] of each byte value; 0 where an id's count is no sum over its bytes."""
    value = np.arange(BYTE_VALUES)
    letters = np.array([chr(each).isalnum() for each in range(BYTE_VALUES)])
    columns = {
        "bytes": np.ones(BYTE_VALUES),
        "continuation": (value & 0xC0) == 0x80,
        "control": ((value < 0x20) | (value == 0x7F)) & ~np.isin(value, list(_SPACE)),
        "digits": (value >= 0x30) & (value < 0x3A),
        "markup": np.isin(value, list(b"<>&=")),
        "symbols": (value > 0x20) & (value < 0x7F) & ~letters,
    }
    none = np.zeros(BYTE_VALUES)
    return np.stack([columns.get(name, none) for name in CLASSES], 1).astype(np.int32)


def high_bytes(
    ids: npt.NDArray[np.integer], starts: npt.NDArray[np.integer], classes: ByteClasses
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What of the bytes above 0x7F is wrong, read across tokens.

    Args:
        ids: [N] ids of whole documents.
        starts: [D+1] where each begins, then N.
        classes: of the ids.

    Returns:
        [D] the share of such bytes that belong to no whole UTF-8 character, and [D] the share of characters above
        U+007F that begin a pair which is one character's bytes, read as Latin-1 or Windows-1252 and encoded again,
        twice over. Of fewer than 8 bytes or characters the shares are of 8.
    """
    at = np.flatnonzero(classes.high[ids])
    documents = len(starts) - 1
    if not len(at):
        return np.zeros(documents), np.zeros(documents)
    token, which = ids[at], np.searchsorted(starts, at, "right") - 1
    size = np.diff(classes.offsets)[token]
    begins = np.concatenate([[0], np.cumsum(size)[:-1]])
    text = classes.text[np.repeat(classes.offsets[token] - begins, size) + np.arange(size.sum())].astype(np.int64)
    apart = np.concatenate([[True], (np.diff(at) > 1) | (np.diff(which) > 0)])
    segment = np.repeat(np.cumsum(apart), size)
    document = np.repeat(which, size)
    follows = [_follows(text, segment, step) for step in (1, 2, 3)]
    needs = np.select(
        [(text >= 0xF0) & (text < 0xF5), (text >= 0xE0) & (text < 0xF0), (text >= 0xC2) & (text < 0xE0)], [3, 2, 1]
    )
    whole = (needs > 0) & follows[0] & ((needs < 2) | follows[1]) & ((needs < 3) | follows[2])

    def summed(weight: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.bincount(document, weight, documents)

    above = summed(text > 0x7F)
    invalid = above - summed(np.where(whole, needs + 1, 0))
    doubled = summed(_doubled(text, segment, whole, needs))
    return invalid / np.maximum(above, 8), np.minimum(2 * doubled / np.maximum(summed(whole), 8), 1.0)


def _follows(text: npt.NDArray[np.int64], segment: npt.NDArray[np.int64], step: int) -> npt.NDArray[np.bool_]:
    """Whether the byte `step` on is a continuation in the same stretch."""
    found = np.zeros(len(text), bool)
    if step < len(text):
        found[:-step] = ((text[step:] & 0xC0) == 0x80) & (segment[step:] == segment[:-step])
    return found


def _doubled(
    text: npt.NDArray[np.int64],
    segment: npt.NDArray[np.int64],
    whole: npt.NDArray[np.bool_],
    needs: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Where U+00C2..U+00F4 stands before what a following byte becomes, by Latin-1 or Windows-1252."""
    found = np.zeros(len(text), bool)
    if len(text) < 4:
        return found
    code = ((text[:-1] & 0x1F) << 6) | (text[1:] & 0x3F)
    two = whole[:-1] & (needs[:-1] == 1)
    leads = two & (code >= 0xC2) & (code <= 0xF4)
    latin = two & (code >= 0x80) & (code < 0xC0)
    windows = whole[:-1] & (
        ((text[:-1] == 0xE2) & np.isin(text[1:], (0x80, 0x82, 0x84))) | np.isin(text[:-1], (0xC5, 0xCB))
    )
    found[: len(code) - 2] = leads[:-2] & (latin | windows)[2:] & (segment[:-3] == segment[2:-1])
    return found
