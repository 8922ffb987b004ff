"""Ranks on which Megatron-Bridge is imported; they need the overlay of `ci/nemo_env.sh` on PYTHONPATH."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.dist.pool import Pool
from tests.nemo import jobs


@pytest.fixture(scope="session", autouse=True)
def overlay() -> None:
    """Skip where Megatron-Bridge is not on the path."""
    if find_spec("megatron.bridge") is None:
        pytest.skip("needs Megatron-Bridge: bash ci/nemo_env.sh, then PYTHONPATH=.nemo")


@pytest.fixture(scope="session")
def bridge() -> Iterator[Pool]:
    """`bridge.run(jobs.train, settings, stability, faults, world=2)`."""
    pool = Pool(jobs.bridge)
    yield pool
    pool.close()
