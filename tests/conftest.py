"""Fixtures that every test folder shares."""

from collections.abc import Iterator

import hypothesis
import pytest

from tests import effort
from tests.dist.pool import Pool, megatron_on_cpu

# The same examples on every run: a test that fails once in ten runs is broken, and says so in all ten.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.load_profile("ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `rare`, unless all is asked for."""
    if effort.ALL:
        return
    rare = [item for item in items if item.get_closest_marker("rare")]
    config.hook.pytest_deselected(items=rare)
    items[:] = [item for item in items if not item.get_closest_marker("rare")]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """`ranks.run(fn, *args, world=2)`: a top-level function on gloo ranks with torch alone."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Pool]:
    """As `ranks`, on ranks that have Megatron on the CPU backend; mark such tests `megatron`."""
    pool = Pool(megatron_on_cpu)
    yield pool
    pool.close()
