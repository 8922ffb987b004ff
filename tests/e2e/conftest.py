"""Pools of ranks for each release of Megatron, stock and patched; the first job that needs a template starts it."""

from collections.abc import Iterator

import pytest

from tests.dist.pool import Pool
from tests.e2e import jobs

RELEASES = ("0.19.2", "0.18.2")


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[tuple[str, str], Pool]]:
    """`pools["0.19.2", "stock"].run(jobs.train, flags, world=4)`."""
    made = {
        ("0.19.2", "stock"): Pool(jobs.stock),
        ("0.19.2", "patched"): Pool(jobs.patched),
        ("0.18.2", "stock"): Pool(jobs.older_stock),
        ("0.18.2", "patched"): Pool(jobs.older_patched),
    }
    yield made
    for pool in made.values():
        pool.close()
