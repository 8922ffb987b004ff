"""These tests run in the environment that ci/te_env.sh makes, and only there."""

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.te import stub

    stub.install()


@pytest.fixture(autouse=True)
def _fresh_global_state() -> Iterator[None]:
    import nvdlfw_inspect.api as api
    from transformer_engine.debug.pytorch.debug_state import TEDebugState
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    yield
    api.end_debug()
    TEDebugState._reset()  # remembers whether the first module was built with or without nvdlfw-inspect
