"""What an audit found, from its parts: one sentence a finding, sums over data sets, and the list of what to skip."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_stability import files
from megatron_stability.data.audit.work import OUTSIDE, Totals, parts
from megatron_stability.data.blends import DataSet
from megatron_stability.data.fingerprint import META
from megatron_stability.data.limits import SEED_MEAN
from megatron_stability.errors import UsageError

CUT_SHARE = 0.02  # of documents that are exactly as long as the longest
CUT_LEAST = 20
DRIFT = 0.05  # of a data set's share of tokens from its weight


@dataclass(frozen=True)
class Summary:
    """The sums of an audit.

    Attributes:
        sets: of each data set, what its tasks add up to.
        findings: one sentence each; none where all is well.
        duplicates: documents that an earlier one equals token by token.
        notes: what is to be known and is no fault.
    """

    sets: tuple[Totals, ...]
    findings: tuple[str, ...]
    duplicates: int
    notes: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Of all data sets."""
        return sum(each.tokens for each in self.sets)

    @property
    def bad_tokens(self) -> int:
        """Of the documents that are beyond a limit."""
        return sum(each.bad_tokens for each in self.sets)


def summed(totals: Sequence[Totals], sets: int) -> tuple[Totals, ...]:
    """The tasks of each data set together.

    Args:
        totals: of the tasks.
        sets: number of data sets.
    """
    found = [Totals(at) for at in range(sets)]
    for each in totals:
        into = found[each.data_set]
        if each.longest == into.longest:
            into.at_longest += each.at_longest
        elif each.longest > into.longest:
            into.longest, into.at_longest = each.longest, each.at_longest
        for field in fields(Totals):
            was, more = getattr(into, field.name), getattr(each, field.name)
            if field.name in ("data_set", "longest", "at_longest"):
                continue
            if field.name == "by_reason":
                setattr(into, field.name, dict(Counter(was) + Counter(more)))
            elif field.name == "histograms":
                setattr(into, field.name, {name: _added(was.get(name), more[name]) for name in more} or was)
            elif field.name == "lengths":
                setattr(into, field.name, _added(was, more))
            else:
                setattr(into, field.name, was + more)
    return tuple(found)


def _added(was: list[int] | None, more: list[int]) -> list[int]:
    return [a + b for a, b in zip(was or [0] * len(more), more, strict=True)]


def judged(
    totals: tuple[Totals, ...], sets: Sequence[DataSet], folder: Path, fail_over: float, seed: bool, eod: int | None
) -> Summary:
    """All findings.

    Args:
        totals: of each data set.
        sets: what was audited.
        folder: of the audit.
        fail_over: the share of tokens in bad documents that is a finding.
        seed: the `seed` preset judged.
        eod: the id that ends a document; None where it is not known.
    """
    duplicates = _duplicates(folder)
    findings: list[str] = []
    tokens, bad = sum(each.tokens for each in totals), sum(each.bad_tokens for each in totals)
    documents = sum(each.documents for each in totals)
    if bad > fail_over * tokens:
        findings.append(f"{bad / tokens:.2%} of the tokens are in documents beyond a limit (at most {fail_over:.2%})")
    if duplicates > fail_over * documents:
        findings.append(f"{duplicates} of {documents} documents are equal to an earlier one, token by token")
    for each, given in zip(totals, sets, strict=True):
        findings += _of_set(each, given, eod)
    mean = sum(each.seed for each in totals) / max(documents, 1)
    if seed and mean > SEED_MEAN:
        findings.append(f"the mean score of the seed preset is {mean:.3f}, above {SEED_MEAN}")
    return Summary(totals, tuple(findings), duplicates, tuple(_mixture(totals, sets)))


def _of_set(totals: Totals, given: DataSet, eod: int | None) -> Iterator[str]:
    name = given.prefix
    if not totals.documents:
        yield f"{name}: it has no document with a token"
        return
    if totals.outside:
        yield f"{name}: {totals.outside} documents have {OUTSIDE}: made with another tokenizer, or damaged"
    if totals.no_eod:
        yield f"{name}: {totals.no_eod} of {totals.documents} documents do not end with the end-of-document id {eod}"
    if totals.empty:
        yield f"{name}: {totals.empty} documents are empty"
    if totals.unreadable:
        file, place, why = totals.unreadable[0]
        yield f"{name}: lines can't be read, the first in {file} at byte {place}: {why}"
    if totals.at_longest >= max(CUT_LEAST, CUT_SHARE * totals.documents) and totals.documents > totals.at_longest:
        yield (
            f"{name}: {totals.at_longest} documents have exactly {totals.longest} tokens, the most of all: "
            "they were cut there, or packed"
        )


def _mixture(totals: tuple[Totals, ...], sets: Sequence[DataSet]) -> Iterator[str]:
    tokens, weights = sum(each.tokens for each in totals), sum(each.weight or 0.0 for each in sets)
    if not weights or not tokens:
        return
    for each, given in zip(totals, sets, strict=True):
        wanted, has = (given.weight or 0.0) / weights, each.tokens / tokens
        if abs(wanted - has) > DRIFT:
            yield (
                f"{given.prefix} has {has:.1%} of the tokens and {wanted:.1%} of the weight: a token of it is read "
                f"{wanted / has:.2g} times as often as one of all" if has else f"{given.prefix} has no token"
            )  # fmt: skip


def _duplicates(folder: Path) -> int:
    """Documents whose tokens another has: 8 bytes a document are held, and sorted."""
    from pyarrow import parquet

    full = [part for part in parts(folder) if "hash" in parquet.read_schema(part).names]
    held = [parquet.read_table(part, columns=["hash"]).column(0).to_numpy() for part in full]
    if not held:
        return 0
    hashes = np.sort(np.concatenate(held))
    return int((hashes[1:] == hashes[:-1]).sum())


def write_skips(folder: Path, totals: Sequence[Totals]) -> int:
    """`skip.jsonl`: a line a bad document of a data set, the worst first.

    Args:
        folder: of the audit.
        totals: of each data set.

    Returns:
        Lines.
    """
    lines = sorted((skip for each in totals for skip in each.skips), key=lambda skip: -skip["score"])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    files.write_atomically(folder / "skip.jsonl", text.encode())
    return len(lines)


def sidecar(prefix: str) -> dict[str, Any]:
    """What `prepare-data` says of a data set; empty where it did not make it.

    Raises:
        UsageError: it can't be read.
    """
    try:
        said = files.read_json(Path(f"{prefix}{META}"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{prefix}{META}: can't be read ({error}); make the data set again") from None
    return said if isinstance(said, dict) else {}
