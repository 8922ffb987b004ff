"""Ranks on which Megatron-Bridge is imported; they need the overlay of `ci/nemo_env.sh` on PYTHONPATH."""

from collections.abc import Iterator

import pytest

from tests.dist.pool import Pool
from tests.nemo import jobs


@pytest.fixture(scope="session")
def bridge() -> Iterator[Pool]:
    """`bridge.run(jobs.train, settings, stability, faults, world=2)`."""
    pool = Pool(jobs.bridge)
    yield pool
    pool.close()
