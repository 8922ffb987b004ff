"""The sketches that a run wrote (`megatron/observers/sketches.py`), and the cosines of two runs'. Needs no torch."""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_stability import files
from megatron_stability.errors import UsageError

FILE = "sketch.jsonl"
Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Sketch:
    """One step's.

    Attributes:
        cut: one a row, equal for runs whose ranks count the same elements.
        weights: [1 + L] rows of [K]: what is in no decoder layer, then the decoder layers; as the step began.
        gradients: likewise, of the step.
    """

    cut: tuple[str, ...]
    weights: Rows
    gradients: Rows


def read(folder: Path) -> dict[int, Sketch]:
    """By step, in order; of a step that was trained twice the later one. Empty where the run wrote none.

    Raises:
        UsageError: a line is damaged, unless it is the last and torn.
    """
    path = folder / FILE
    try:
        lines = files.read_bytes(path, sys.maxsize).decode().split("\n")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); move it away to compare without it") from None
    found = {}
    for number, line in enumerate(lines, start=1):
        try:
            fields = files.parse_json(line) if number < len(lines) else None  # what follows the last line feed is torn
            if fields is not None:
                rows = (_rows(fields[name], fields["k"]) for name in ("weights", "gradients"))
                found[int(fields["step"])] = Sketch(tuple(fields["cut"]), *rows)
        except (ValueError, KeyError, TypeError, binascii.Error):
            raise UsageError(
                f"{path}, line {number}: is not a line of sketches; move the file away to compare without it"
            ) from None
    return dict(sorted(found.items()))


def _rows(text: str, k: int) -> Rows:
    flat = array("d", base64.b64decode(text, validate=True))
    if k < 1 or len(flat) % k:
        raise ValueError(text)
    return tuple(tuple(flat[i : i + k]) for i in range(0, len(flat), k))


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Of two sketches; NaN where one is zero or not finite."""
    norms = math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b)) if _finite(a, b) else 0.0
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else math.nan


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """|a - b| / |b|; NaN where that is not defined."""
    if not _finite(a, b) or not any(b):
        return math.nan
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / math.fsum(y * y for y in b))


def update(run: Mapping[int, Sketch], since: int, step: int) -> Rows:
    """Sketch of what the weights changed by from one recorded step to another."""
    pairs = zip(run[since].weights, run[step].weights, strict=True)
    return tuple(tuple(y - x for x, y in zip(a, b, strict=True)) for a, b in pairs)


def _finite(*vectors: Sequence[float]) -> bool:
    return all(math.isfinite(x) for vector in vectors for x in vector)
