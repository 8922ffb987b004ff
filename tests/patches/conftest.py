from pathlib import Path

import pytest
from patch_tools import STOCK, write, write_series


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A folder of patch folders with one set, for 0.19.2."""
    return write_series(tmp_path / "patches")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small tree laid out as a Megatron-LM clone of 0.19.2."""
    write(tmp_path / "clone", STOCK)
    return tmp_path / "clone"
