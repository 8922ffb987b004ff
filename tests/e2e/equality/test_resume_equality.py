"""A resumed run is the uninterrupted one: three rows of `tests/drills/resume_equality.py`, which has the rest."""

from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.drills import resume_equality
from tests.drills.resume_equality import CASES

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("name", ["VPP2", "MoE, EP2"])
def test_to_the_bit(pools: dict[tuple[str, str], Pool], tmp_path: Path, name: str) -> None:
    result = resume_equality.run(pools["0.19.2", "patched"], CASES[name], tmp_path)
    assert result["findings"] == []
    assert result["entries"] > 30


def test_mid_epoch_the_next_samples_are_those_of_the_uninterrupted_run(
    pools: dict[tuple[str, str], Pool], tmp_path: Path
) -> None:
    """Megatron-Bridge#4565: a resume in the second of three epochs; every rank's sequences in their order."""
    case = CASES["mid-epoch, three epochs"]
    result = resume_equality.run(pools["0.19.2", "patched"], case, tmp_path)
    assert result["findings"] == []
    assert result["samples"] == (case.steps - case.middle) * 4
    assert result["epochs"] > 3
