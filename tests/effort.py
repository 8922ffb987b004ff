"""How much a run of the tests does: what every change is checked with, or all (`TESTS=all`, as `ci/test.sh --all`)."""

from __future__ import annotations

import os

ALL = os.environ.get("TESTS") == "all"


def examples(everyday: int, thorough: int) -> int:
    """How many examples a property is tried with."""
    return thorough if ALL else everyday
