"""Ranks whose Megatron has the seams."""

from collections.abc import Iterator

import pytest

from tests.dist.pool import Pool, megatron_on_cpu


def patched_megatron_on_cpu() -> None:
    """Prepare a template with Megatron patched in memory, on the CPU backend."""
    from megatron_stability.megatron.patching import in_memory

    in_memory.install()
    megatron_on_cpu()


@pytest.fixture(scope="session")
def patched_ranks() -> Iterator[Pool]:
    """As `megatron_ranks`, patched."""
    pool = Pool(patched_megatron_on_cpu)
    yield pool
    pool.close()
