"""The compiled dataset helper that a fresh clone lacks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_stability.errors import UsageError

pytestmark = pytest.mark.megatron
HELPER = "megatron.core.datasets.helpers_cpp"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[list[str], Callable[[], None]]:
    """A clone without the helper: what its own `compile_helpers` did, and the one of the CPU backend."""
    import megatron.core.datasets.utils as utils

    from megatron_stability.megatron.cpu import rows

    did: list[str] = []
    real = importlib.import_module

    def look(name: str, package: str | None = None) -> object:
        if name == HELPER and "made" not in did:
            raise ImportError(name)
        return sys if name == HELPER else real(name, package)

    monkeypatch.setattr(importlib, "import_module", look)
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    monkeypatch.setattr(utils, "compile_helpers", lambda: did.append("made"))
    row = next(row for row in rows.megatron_rows() if row.attribute == "compile_helpers")
    return did, row.replacement


def test_it_is_made_where_there_is_a_makefile(made: tuple[list[str], Callable[[], None]], tmp_path: Path) -> None:
    did, compile_helpers = made
    (tmp_path / "Makefile").touch()
    compile_helpers()
    compile_helpers()
    assert did == ["made"]


def test_a_wheel_without_it_is_told(made: tuple[list[str], Callable[[], None]]) -> None:
    did, compile_helpers = made
    with pytest.raises(UsageError, match="install the megatron-core wheel again"):
        compile_helpers()
    assert did == []
