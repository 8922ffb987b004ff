"""How unlike text documents are: one number a document and score, of many documents in one pass over their tokens.

Everything is array arithmetic over a chunk of whole documents laid end to end (`ids`, `starts`); no loop runs over
tokens or documents. Two sorts carry most of it. Sorted keys (document, token) are runs of equal tokens, so that counts,
entropy, shares of byte classes and distances to a distribution are sums over runs. Sorted keys (document, hash of an
n-gram) show each n-gram beside its repetitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_stability.data.byte_classes import CLASSES, ByteClasses, high_bytes
from megatron_stability.data.tokenizers import BYTE_VALUES

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]

#: What each score is; high is bad for all but those of `LOW`.
SCORES: Mapping[str, str] = MappingProxyType(
    {
        "repeated_4": "share of the document's 4-grams that stood in it before",
        "repeated_8": "share of its 8-grams that did",
        "entropy": "entropy of its tokens over the log of their number, or of V where that is less; 1 is even",
        "unique": "different tokens over tokens, times the square root of tokens: large where nothing comes twice",
        "run": "longest run of one token",
        "unigram": "distance of its tokens to the corpus's own: cross-entropy under them, nats a token",
        "order": "surprise at a byte after the one before it, less that at the byte alone, by the corpus's own: nats",
        "control": "share of bytes that are control characters or U+FFFD",
        "invalid": "share of the bytes above 0x7F that belong to no whole UTF-8 character",
        "mojibake": "share of the characters above U+007F that are another's bytes, encoded a second time",
        "digits": "share of bytes that are digits",
        "digit_run": "longest run of tokens of digits alone, bytes",
        "markup": "share of bytes that are < > & or =",
        "symbols": "share of bytes that are punctuation",
        "word": "longest stretch of tokens of ASCII without white space, bytes",
        "bytes_per_token": "bytes a token of ASCII alone, where most is: few where the tokenizer knows no words of it",
        "kinds": "different tokens' byte values, of 64 classes: few in a text of few characters",
    }
)
LOW = ("entropy", "bytes_per_token", "kinds")
ID_ONLY = ("repeated_4", "repeated_8", "entropy", "unique", "run", "unigram")
FEW, MANY = 16, 16.0  # of so few tokens of ASCII, or where most is not, nothing is said: as if each had so many bytes
_MULTIPLIER = np.uint64(6364136223846793005)  # of Knuth's MMIX generator: odd, so nothing is lost modulo 2^64
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Model:
    """What the corpus's own tokens and bytes are like.

    Attributes:
        unigram: [V] fp32, -log q of each id.
        inner: [V] fp32, the sum of `pairs` within the id's bytes; None without bytes.
        pairs: [256·256] fp32, log q(second) - log q(second | first), at 256·first + second; None without bytes. It is
            the pointwise mutual information with its sign changed: below 0 where the order of bytes is the corpus's.
    """

    unigram: npt.NDArray[np.float32]
    inner: npt.NDArray[np.float32] | None = None
    pairs: npt.NDArray[np.float32] | None = None


class Counts:
    """Tokens of a sample of the corpus, from which a `Model` follows."""

    def __init__(self, vocab_size: int, classes: ByteClasses | None = None) -> None:
        """`vocab_size`: V, above the largest id; `classes`: of the ids, where their bytes are known."""
        self.vocab_size, self._classes = vocab_size, classes
        self._single = np.zeros(vocab_size, np.int64)
        self._across = np.zeros(BYTE_VALUES * BYTE_VALUES, np.int64)

    def add(self, ids: Ints, starts: Ints) -> None:
        """Take documents in; shapes as of `score`."""
        self._single += np.bincount(ids, minlength=self.vocab_size)[: self.vocab_size]
        if self._classes is not None:
            pair, inside = _across(ids, starts, self._classes)
            self._across += np.bincount(pair[inside], minlength=len(self._across))

    def model(self) -> Model:
        """Add-½ for tokens; a pair of bytes that was never seen has a hundredth of a count."""
        total = self._single.sum() + 0.5 * self.vocab_size
        unigram = (-np.log((self._single + 0.5) / total)).astype(np.float32)
        if self._classes is None:
            return Model(unigram)
        text, offsets = self._classes.text.astype(np.int64), self._classes.offsets
        row = np.repeat(np.arange(self.vocab_size), np.diff(offsets))
        within = row[1:] == row[:-1]
        pair = (text[:-1] * BYTE_VALUES + text[1:])[within]
        seen = self._across + np.bincount(pair, self._single[row[1:][within]], len(self._across))
        counts = seen.reshape(BYTE_VALUES, BYTE_VALUES) + 0.01
        alone = np.log(counts.sum(0) / counts.sum())
        pairs = (alone - np.log(counts / counts.sum(1, keepdims=True))).astype(np.float32).reshape(-1)
        inner = np.bincount(row[1:][within], pairs[pair], self.vocab_size).astype(np.float32)
        return Model(unigram, inner, pairs)


def _across(ids: Ints, starts: Ints, classes: ByteClasses) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """[n-1] the last byte of each token beside the first of the next, and whether both are of one document.

    A token without bytes has none beside it.
    """
    pair = classes.last[ids[:-1]] * BYTE_VALUES + classes.first[ids[1:]]
    inside = (classes.last[ids[:-1]] >= 0) & (classes.first[ids[1:]] >= 0)
    edges = np.asarray(starts[1:-1], np.int64) - 1
    inside[edges] = False
    return np.where(inside, pair, 0), inside


def score(ids: Ints, starts: Ints, classes: ByteClasses | None = None, model: Model | None = None) -> dict[str, Floats]:
    """All scores of whole documents.

    Args:
        ids: [N] token ids, document after document; at least 0, below V of what is given.
        starts: [D+1] where each document begins, then N; each has a token.
        classes: what bytes the ids stand for; without it the scores that need bytes are absent.
        model: the corpus's own tokens; without it the two distances are absent.

    Returns:
        [D] by name, in the order of `SCORES`.
    """
    lengths = np.diff(starts)
    which = np.repeat(np.arange(len(lengths)), lengths)
    runs = _Runs(ids, which, len(lengths))
    vocab_size = len(classes.high) if classes is not None else len(model.unigram) if model is not None else len(ids)
    found = {
        "repeated_4": _repeated(ids, which, starts, 4),
        "repeated_8": _repeated(ids, which, starts, 8),
        "entropy": runs.entropy(lengths, vocab_size),
        "unique": runs.kinds / np.sqrt(lengths),
        "run": _longest(np.ones(len(ids), bool), np.concatenate([[True], ids[1:] != ids[:-1]]), starts, None),
    }
    if model is not None:
        found["unigram"] = runs.mean(model.unigram, lengths)
    if classes is not None:
        if model is not None:
            found["order"] = _surprise(ids, starts, runs, classes, model)
        found |= _of_bytes(ids, starts, runs, classes)
    return {name: found[name] for name in SCORES if name in found}


class _Runs:
    """Equal tokens of a document side by side: [R] token and count of each run, and where documents begin."""

    def __init__(self, ids: Ints, which: Ints, documents: int) -> None:
        bits = max(int(ids.max(initial=0)).bit_length(), 1)
        wide = np.uint32 if bits + int(documents).bit_length() <= 32 else np.uint64
        keys: npt.NDArray[np.uint64] = which.astype(wide)
        keys <<= wide(bits)
        keys |= ids.astype(wide)
        keys.sort()
        begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        firsts = keys[begins]
        self.tokens = (firsts & wide((1 << bits) - 1)).astype(np.int64)
        self.counts = np.diff(begins, append=len(keys))
        self.starts = np.searchsorted(firsts >> wide(bits), np.arange(documents, dtype=wide))
        self.kinds = np.diff(self.starts, append=len(begins))

    def entropy(self, lengths: Ints, vocab_size: int) -> Floats:
        """Over the log of the document's tokens, or of V where that is less."""
        c = self.counts.astype(np.float64)
        summed = np.add.reduceat(c * np.log(c), self.starts)
        n = lengths.astype(np.float64)
        return np.where(n > 1, (np.log(n) - summed / n) / np.log(np.clip(n, 2, max(vocab_size, 2))), 1.0)

    def mean(self, of_id: npt.NDArray[Any], lengths: Ints) -> Floats:
        """Mean over the tokens of a value that each id has."""
        return np.add.reduceat(self.counts * of_id[self.tokens].astype(np.float64), self.starts) / lengths

    def total(self, of_id: npt.NDArray[Any]) -> Floats:
        """[D, k] sums over the tokens of the k values that each id has."""
        return np.add.reduceat(self.counts[:, None] * of_id[self.tokens].astype(np.float64), self.starts, axis=0)


def _repeated(ids: Ints, which: Ints, starts: Ints, n: int) -> Floats:
    """Of windows that lie in one document: those whose n-gram comes before in it; 0 in a document of fewer tokens."""
    windows = np.maximum(np.diff(starts) - n + 1, 0)
    if not windows.any():
        return np.zeros(len(windows))
    wide = ids.astype(np.uint64)
    hashes = np.zeros(len(ids) - n + 1, np.uint64)
    for at in range(n):  # a polynomial in the ids, modulo 2^64; n steps over arrays
        hashes *= _MULTIPLIER
        hashes += wide[at : at + len(hashes)]
        hashes += np.uint64(1)
    hashes *= _MIX
    bits = np.uint64(max(len(windows).bit_length(), 1))
    keys = (which[: len(hashes)].astype(np.uint64) << (np.uint64(64) - bits)) | (hashes >> bits)
    keys = keys[which[: len(hashes)] == which[n - 1 :]]
    keys.sort()
    again = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(keys[1:] == keys[:-1], out=again[2:])  # of document d, its windows are a stretch, as before the sort
    ends = np.cumsum(windows)
    return (again[ends] - again[ends - windows]) / np.maximum(windows, 1)


def _surprise(ids: Ints, starts: Ints, runs: _Runs, classes: ByteClasses, model: Model) -> Floats:
    """Mean of `Model.pairs` over a document's pairs of bytes, nats."""
    assert model.inner is not None
    assert model.pairs is not None, "a model without bytes"
    size = classes.counts[:, :1]
    inner = runs.total(np.stack([model.inner, np.maximum(size[:, 0] - 1, 0)], 1))
    pair, inside = _across(ids, starts, classes)
    both = np.zeros((len(ids), 2))
    both[1:, 0] = np.where(inside, model.pairs[pair], 0.0)
    both[1:, 1] = inside
    outer = np.add.reduceat(both, starts[:-1], axis=0)
    return (inner[:, 0] + outer[:, 0]) / np.maximum(inner[:, 1] + outer[:, 1], 1)


def _longest(inside: npt.NDArray[np.bool_], breaks: npt.NDArray[np.bool_], starts: Ints, weight: Ints | None) -> Floats:
    """[D] the heaviest stretch of tokens that are `inside` and have no break (before a token) between them."""
    edge = breaks.copy()
    edge[starts[:-1]] = True
    edge[1:] |= inside[1:] != inside[:-1]
    begins = np.flatnonzero(edge)
    if weight is None:
        heavy = np.diff(begins, append=len(inside))
    else:
        heavy = np.add.reduceat(np.where(inside, weight, 0), begins)
    heavy = np.where(inside[begins], heavy, 0)
    return np.maximum.reduceat(heavy, np.searchsorted(begins, starts[:-1])).astype(np.float64)


def _of_bytes(ids: Ints, starts: Ints, runs: _Runs, classes: ByteClasses) -> dict[str, Floats]:
    sums = dict(zip(CLASSES, runs.total(classes.counts).T, strict=True))
    size = np.maximum(sums["bytes"], 1)
    quiet = np.zeros(len(ids), bool)
    weight = classes.counts[:, CLASSES.index("bytes")][ids]
    invalid, doubled = high_bytes(ids, starts, classes)
    kinds = np.bitwise_or.reduceat(classes.kinds[runs.tokens], runs.starts)
    return {
        "control": (sums["control"] + 3 * sums["replacement"]) / size,
        "invalid": invalid,
        "mojibake": doubled,
        "digits": sums["digits"] / size,
        "digit_run": _longest(classes.all_digits[ids], quiet, starts, weight),
        "markup": sums["markup"] / size,
        "symbols": sums["symbols"] / size,
        "word": _longest(~(classes.has_space | classes.high)[ids], quiet, starts, weight),
        "bytes_per_token": np.where(
            (sums["ascii_tokens"] < FEW) | (sums["ascii_bytes"] < size / 2),
            MANY,
            sums["ascii_bytes"] / np.maximum(sums["ascii_tokens"], 1),
        ),
        "kinds": np.bitwise_count(kinds).astype(np.float64),
    }


def seed_preset(ids: Ints, starts: Ints) -> Floats:
    """The score of the `seed` preset: half repeated 4-grams, half what the entropy is short of 8 bits.

    Args:
        ids: as of `score`.
        starts: likewise.

    Returns:
        [D] in [0, 1]: ½·(repeated 4-gram share) + ½·max(0, 1 - H/8 bits).
    """
    lengths = np.diff(starts)
    which = np.repeat(np.arange(len(lengths)), lengths)
    even = _Runs(ids, which, len(lengths)).entropy(lengths, len(ids)) * np.log(np.maximum(lengths, 2)) / np.log(2)
    return 0.5 * _repeated(ids, which, starts, 4) + 0.5 * np.maximum(0.0, 1.0 - even / 8)
