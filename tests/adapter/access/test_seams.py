"""The handle that seams ask: installed, uninstalled, and closed at the end of a script that knows nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stability.megatron.access import handle

SCRIPT = """
import sys; sys.path[:0] = [sys.argv[1]]
from megatron_stability.megatron.access import handle
class Runtime:
    def close(self): print("closed")
handle.install(Runtime())
{then}
print("the script's end")
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [("", ["the script's end", "closed"]), ("handle.uninstall()", ["closed", "the script's end"])],
    ids=["its own script", "launcher"],
)
def test_a_runtime_is_closed_once(then: str, said: list[str]) -> None:
    root = str(Path(handle.__file__).parents[3])
    script = [sys.executable, "-c", SCRIPT.format(then=then), root]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == said
