"""`megatron-stability prepare-data`, with Megatron's own writer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from megatron_stability.data import prepare as data
from megatron_stability.data.prepare import Index, Options, Summary


def open_index(path: str, vocab_size: int) -> Index:
    """Megatron's `IndexedDatasetBuilder` on a .bin file, with the smallest type that holds the ids.

    Args:
        path: of the .bin.
        vocab_size: V.
    """
    # Imported here: torch and megatron.core take seconds, and bad input is to be told at once. What Megatron warns of
    # on import (no TE, no Apex) has no bearing on tokens.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return cast(Index, IndexedDatasetBuilder(path, dtype=DType.optimal_dtype(vocab_size)))


def prepare(inputs: Sequence[str | Path], prefix: str | Path, options: Options | None = None) -> Summary:
    """As `data.prepare.prepare`, which has no Megatron."""
    return data.prepare(inputs, prefix, open_index, options)


def run(argv: list[str]) -> int:
    """The command `prepare-data`.

    Args:
        argv: the arguments after the command's name.

    Returns:
        The exit code.
    """
    return data.run(argv, open_index)
