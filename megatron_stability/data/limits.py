"""Which scores are too far from the corpus's own: a limit for each score, and who is beyond it.

A limit follows from the middle half of the documents' own scores, which a tenth of bad ones hardly moves. It lies
within bounds: below the first no text is called bad, beyond the second none is called good, whatever the corpus is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_stability.data.scores import LOW, SCORES, Floats, Ints
from megatron_stability.errors import UsageError

#: From 0 to 1. Where the corpus itself is at one end (bytes repeat more than words), the outer bound makes way.
SHARES = ("repeated_4", "repeated_8", "entropy", "digits", "markup", "symbols")
_WAY = 0.6  # of the way from the median to the end
SEED_MEAN, SEED_MAXIMUM = 0.35, 0.75
SEED_VOCABULARY, SEED_LENGTH = 1024, 256  # below them healthy text is beyond the preset's limits


@dataclass(frozen=True)
class Bound:
    """Between which values a score's limit may lie, and how it is found.

    Attributes:
        least: the limit is at least this (for a low score: at most).
        most: the limit is at most this (for a low score: at least); None where the corpus alone decides.
        spread: times the distance from median to the far quartile.
        share: instead, of the median.
        tokens: of a document of n tokens, its deviation from the median counts sqrt(n / (n + tokens)) of itself.
    """

    least: float
    most: float | None
    spread: float = 6.0
    share: float | None = None
    tokens: int = 0


BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "repeated_4": Bound(0.60, 0.85, tokens=16),
        "repeated_8": Bound(0.66, 0.72, tokens=16),
        "entropy": Bound(0.60, 0.40, tokens=16),
        "unique": Bound(1e9, None),
        "run": Bound(64, 512),
        "unigram": Bound(0.5, None, tokens=32),
        "order": Bound(0.0, 0.3, tokens=16),
        "control": Bound(0.02, 0.05),
        "invalid": Bound(0.5, 0.5),
        "mojibake": Bound(0.5, 0.5),
        "digits": Bound(0.35, 0.80, tokens=32),
        "digit_run": Bound(96, 512),
        "markup": Bound(0.12, 0.30, tokens=32),
        "symbols": Bound(0.45, 0.60, tokens=32),
        "word": Bound(256, 512),
        "bytes_per_token": Bound(1.65, None, share=0.55, tokens=16),
        "kinds": Bound(8, 4, tokens=64),
    }
)


@dataclass(frozen=True)
class Limits:
    """Of each score, its median and its limit."""

    middle: Mapping[str, float]
    limit: Mapping[str, float]

    def beyond(self, found: Mapping[str, Floats], lengths: Ints) -> dict[str, Floats]:
        """How far documents are beyond each limit.

        Args:
            found: [D] scores by name.
            lengths: [D] tokens of each document.

        Returns:
            [D] by name: the deviation from the median over that of the limit; bad above 1.
        """
        return {name: self._excess(name, found[name], lengths) for name in self.limit if name in found}

    def _excess(self, name: str, values: Floats, lengths: Ints) -> Floats:
        tokens = BOUNDS[name].tokens
        weight = np.sqrt(lengths / (lengths + tokens)) if tokens else 1.0
        room = self.limit[name] - self.middle[name]
        if room == 0.0:
            return np.where(values == self.middle[name], 0.0, np.inf)
        return weight * (values - self.middle[name]) / room


def calibrate(found: Mapping[str, Floats], lengths: Ints, vocab_size: int) -> Limits:
    """Limits of a corpus.

    Args:
        found: [D] scores by name of a sample of its documents.
        lengths: [D] tokens of each.
        vocab_size: V; ids drawn evenly are log V or more from any distribution, and other text seldom is.

    Raises:
        UsageError: there is no document.
    """
    if not len(lengths):
        raise UsageError("no document to calibrate with; give data that hold tokens")
    middle: dict[str, float] = {}
    limit: dict[str, float] = {}
    for name, values in found.items():
        bound, low = BOUNDS[name], name in LOW
        quartile, median = np.quantile(values, [0.25 if low else 0.75, 0.5])
        far = bound.share * median if bound.share is not None else median + bound.spread * (quartile - median)
        least = bound.least + (np.log(vocab_size) if name == "unigram" else 0.0)
        outer = bound.most if bound.most is not None else (-np.inf if low else np.inf)
        if name in SHARES:
            outer = min(outer, _WAY * median) if low else max(outer, median + _WAY * (1 - median))
        limit[name] = float(max(min(far, least), outer) if low else min(max(far, least), outer))
        middle[name] = float(min(median, limit[name]) if not low else max(median, limit[name]))
    return Limits(middle, limit)


def reasons(beyond: Mapping[str, Floats], document: int, found: Mapping[str, Floats], limits: Limits) -> list[str]:
    """Why a document is bad, one phrase for each score beyond its limit, the worst first.

    Args:
        beyond: of `Limits.beyond`.
        document: its row.
        found: the scores.
        limits: of the corpus.
    """
    worst = sorted((name for name in beyond if beyond[name][document] > 1), key=lambda name: -beyond[name][document])
    sign = {True: "<", False: ">"}
    return [f"{name} {found[name][document]:.3g} {sign[name in LOW]} {limits.limit[name]:.3g}" for name in worst]


def refuse_seed(vocab_size: int | None, shortest: int, force: bool) -> None:
    """The `seed` preset calls healthy text bad where ids are few or sequences short.

    Args:
        vocab_size: V, where it is known.
        shortest: tokens of the shortest sequence that is scored.
        force: use it all the same.

    Raises:
        UsageError: V or a length is below its bound, and not forced.
    """
    if force:
        return
    if vocab_size is not None and vocab_size < SEED_VOCABULARY:
        raise UsageError(
            f"--preset seed with {vocab_size} ids: byte-level text has at most 8 bits, and exceeds {SEED_MEAN} when "
            "healthy; leave the preset out, or give --force"
        )
    if shortest < SEED_LENGTH:
        raise UsageError(
            f"--preset seed with {shortest} tokens: a sequence of fewer than {SEED_LENGTH} is beyond {SEED_MEAN} when "
            "healthy; leave the preset out, or give --force"
        )


def known(names: Sequence[str]) -> None:
    """Refuse names that are no scores.

    Raises:
        UsageError: names what there is.
    """
    for name in names:
        if name not in SCORES:
            raise UsageError(f"there is no score {name!r}; the scores are {', '.join(SCORES)}")
