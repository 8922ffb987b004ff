"""How much a run of the tests does: what every change is checked with, or all (`TESTS=all`, as `ci/test.sh --all`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

ALL = os.environ.get("TESTS") == "all"


def examples(everyday: int, thorough: int) -> int:
    """How many examples a property is tried with."""
    return thorough if ALL else everyday


def sampled(values: Iterable[str], everyday: Collection[str]) -> list[Any]:
    """For `parametrize`: those of `everyday` as they are, the others marked `rare`."""
    return [value if value in everyday else pytest.param(value, marks=pytest.mark.rare) for value in values]
