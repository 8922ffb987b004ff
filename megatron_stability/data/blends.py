"""Which data sets a run's flags name: blends with weights, for all splits or for each, in flags or in list files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stability import files
from megatron_stability.errors import UsageError

PER_SPLIT = ("train", "valid", "test")


@dataclass(frozen=True)
class DataSet:
    """One data set of a blend.

    Attributes:
        flag: the setting that names it.
        split: "train", "valid" or "test" where the split has a blend of its own; "all" where `--split` shares it out.
        prefix: path without suffix.
        weight: as given; None where the blend has none.
    """

    flag: str
    split: str
    prefix: str
    weight: float | None


def data_sets(args: Any) -> list[DataSet]:
    """The data sets in the order of the blends, as Megatron reads the same flags.

    Args:
        args: has Megatron's names, `data_path` and its relatives, where they are known.

    Returns:
        None for mock data.

    Raises:
        UsageError: a list file can't be read, or both forms are given.
    """
    given = {name: getattr(args, name, None) for name in ("data_path", "data_args_path", "per_split_data_args_path")}
    if getattr(args, "mock_data", False):
        return []
    if given["data_path"] and given["data_args_path"]:
        raise UsageError("--data-path and --data-args-path both name data; drop one of the two")
    if given["data_args_path"]:
        return blend("--data-args-path", "all", _text("--data-args-path", given["data_args_path"]).split())
    if given["data_path"]:
        return blend("--data-path", "all", given["data_path"])
    if given["per_split_data_args_path"]:
        return _per_split("--per-split-data-args-path", given["per_split_data_args_path"])
    found = []
    for split in PER_SPLIT:
        found += blend(f"--{split}-data-path", split, getattr(args, f"{split}_data_path", None) or [])
    return found


def blend(flag: str, split: str, words: Sequence[str]) -> list[DataSet]:
    """Pairs of weight and prefix where all first words of the pairs are numbers; else every word is a prefix.

    Args:
        flag: that gave the words.
        split: which they serve.
        words: of the flag.
    """
    words = [str(word).strip() for word in words]
    weights = [_weight(word) for word in words[::2]]
    if len(words) % 2 or None in weights:
        return [DataSet(flag, split, prefix, None) for prefix in words]
    return [DataSet(flag, split, prefix, weight) for weight, prefix in zip(weights, words[1::2], strict=True)]


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _per_split(flag: str, file: str) -> list[DataSet]:
    try:
        blends = files.parse_json(_text(flag, file))
        by_split = [(split, blends[split]) for split in PER_SPLIT]
        if not all(given is None or isinstance(given, str | list) for _, given in by_split):
            raise TypeError("a blend is a list or a text")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{flag} {file}: is not a JSON object with train, valid and test ({error!r})") from None
    return [
        data_set
        for split, given in by_split
        for data_set in blend(flag, split, given.split() if isinstance(given, str) else given or [])
    ]


def _text(flag: str, file: str) -> str:
    if not Path(file).is_file():
        raise UsageError(f"{flag} {file}: there is no such file")
    try:
        return files.read_bytes(Path(file)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {file}: can't be read ({error})") from None
