"""A save that finds no space costs that checkpoint and nothing else."""

from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.drills import full_disk, resume_runs

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("how", [(), resume_runs.ASYNC], ids=["sync", "async"])
def test_training_goes_on_and_saves_again(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, how: tuple[str, ...]
) -> None:
    assert full_disk.run(pools["0.19.2", "patched"], tmp_path, how) == full_disk.GOES_ON
