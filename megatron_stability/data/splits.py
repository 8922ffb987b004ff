"""Which of a data set's documents go to training, validation and test; Megatron waits for ever on a split of none.

Megatron repeats a split until it has as many tokens as are asked for, one at the least, and a split without a token
never has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from megatron_stability.data.blends import PER_SPLIT, DataSet
from megatron_stability.data.index import Index
from megatron_stability.errors import UsageError

NAMES = dict(zip(PER_SPLIT, ("training", "validation", "test"), strict=True))
DEFAULT = "969, 30, 1"  # Megatron's, where --data-path comes without --split
_SHARES = (0.969, 0.03, 0.001)


def ranges(split: str, documents: int) -> dict[str, range | None]:
    """The documents of each split, by Megatron's arithmetic (blended_megatron_dataset_config.py and its builder).

    Args:
        split: up to three shares, as `--split` takes them.
        documents: sequences of the data set.

    Returns:
        By "train", "valid" and "test"; None where the share is 0, and so nothing is built.

    Raises:
        UsageError: there are no shares.
    """
    shares = [float(word) for word in re.findall(r"[.0-9]+", split) if word.strip(".")]
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    if len(shares) != 3 or not total > 0:
        raise UsageError(f"--split {split}: give three shares, such as {fitting(documents)}")
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share / total)
    return {
        name: range(round(first * documents), round(end * documents)) if first < end else None
        for name, (first, end) in zip(PER_SPLIT, pairwise(ends), strict=True)
    }


def fitting(documents: int) -> str:
    """A `--split` that gives every split a document where there are three, in the proportions of Megatron's default.

    Args:
        documents: of the data set, at least 1.
    """
    if documents < 3:
        return ("1,0,0", "1,1,0")[max(documents, 1) - 1]
    test = max(1, round(_SHARES[2] * documents))
    valid = max(1, round(_SHARES[1] * documents))
    return f"{documents - valid - test},{valid},{test}"


def refuse_unread(data_sets: Sequence[DataSet], split: str | None) -> None:
    """A `--split` beside data that have a blend for each split; Megatron asserts that only one of the two is given.

    Args:
        data_sets: the run's data sets.
        split: as given; None where it is not.

    Raises:
        UsageError: names both flags.
    """
    own = next((data_set.flag for data_set in data_sets if data_set.split != "all"), None)
    if split is not None and own is not None:
        raise UsageError(f"--split {split}: {own} says what each split reads; drop --split")


def refuse_empty(data_sets: Sequence[DataSet], indexes: Mapping[str, Index], split: str | None) -> None:
    """Every split that is built must have a token.

    Args:
        data_sets: the run's data sets.
        indexes: by prefix.
        split: of those that serve all splits; None for Megatron's own.

    Raises:
        UsageError: names the split, the data set and its documents, and a split that fits.
    """
    for name in PER_SPLIT:
        serving = [data_set for data_set in data_sets if data_set.split in (name, "all")]
        parts = {data_set: _part(data_set, indexes[data_set.prefix], name, split) for data_set in serving}
        built = {data_set: part for data_set, part in parts.items() if part is not None}
        empty = [each for each, part in built.items() if not indexes[each.prefix].tokens(part.start, part.stop)]
        # Of several sets without weights Megatron takes what each has, so that one may be empty.
        if empty and (empty[0].weight is not None or len(empty) == len(built)):
            raise UsageError(_says(empty[0], indexes[empty[0].prefix], name, split))


def _part(data_set: DataSet, index: Index, name: str, split: str | None) -> range | None:
    whole = range(index.sequences)
    return whole if data_set.split != "all" else ranges(split or DEFAULT, len(whole))[name]


def _says(data_set: DataSet, index: Index, name: str, split: str | None) -> str:
    has = f"{index.prefix} has {index.sequences} document{'s' * (index.sequences != 1)}"
    if data_set.split != "all" or not index.tokens(0, index.sequences):
        return (
            f"{data_set.flag}: the {NAMES[name]} split would be empty, for {has} and no token in them; give other data"
        )
    return (
        f"--split {split or DEFAULT}: the {NAMES[name]} split would be empty, for {has}, and Megatron would wait for "
        f"ever; give --split {fitting(index.sequences)}"
    )
