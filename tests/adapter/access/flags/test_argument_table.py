"""The table of Megatron's arguments against the parsers and the sources of both releases."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.megatron.access.flags import argument_table
from megatron_stability.megatron.access.flags.argument_table import Effect
from tests.older_megatron import older_release

pytestmark = pytest.mark.megatron
RELEASES = ("0.18.2", "0.19.2")
PARSER = """
import argparse, json
from megatron.training.arguments import add_megatron_arguments
actions = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions
known = {}
for each in actions[1:]:
    known.setdefault(each.dest, [each.default, []])[1].extend(each.option_strings)
print(json.dumps(known, default=str))
"""
READ = re.compile(r"\b(?:args|config|cfg)\.(\w+)|getattr\([^)'\"]*['\"](\w+)['\"]")
PARSED_ONLY = re.compile(r"training/(arguments|yaml_arguments)\.py$|training/config/")


def root_of(release: str) -> Path:
    """The folder that holds `megatron`."""
    if release == "0.18.2":
        return Path(older_release())
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]).parents[1]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.known_release
def test_every_argument_of_a_release_has_a_row_with_its_default_and_flag(release: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(root_of(release)), "LOCAL_RANK": "0"}
    script = [sys.executable, "-W", "ignore", "-c", PARSER]  # seconds: a release is imported once a process
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=300, env=environment)
    parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    rows = {name: row for name, row in argument_table.table().items() if release in row.defaults}
    assert set(parsed) == set(rows)
    assert {n: d for n, (d, _) in parsed.items() if d != rows[n].defaults[release]} == {}
    if release == RELEASES[-1]:
        assert [n for n, (_, flags) in parsed.items() if rows[n].flag not in flags] == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.known_release
def test_what_is_called_unread_is_read_nowhere(release: str) -> None:
    files = [path for path in (root_of(release) / "megatron").rglob("*.py") if not PARSED_ONLY.search(str(path))]
    read = {name for path in files for names in READ.findall(path.read_text(encoding="utf-8")) for name in names}
    unread = {name for name, row in argument_table.table().items() if row.effect is Effect.IGNORED}
    assert "rampup_batch_size" in unread
    assert {"lr", "micro_batch_size"} <= read
    assert unread & read == set()


def test_a_release_that_is_not_known_has_the_nearest_newer_default() -> None:
    row = argument_table.Argument("x", "--x", Effect.MODEL, False, {"0.18.2": 1, "0.19.2": 2})
    assert [row.default(each) for each in ("0.17.1", "0.18.2", "0.18.3", "0.19.2", "0.20.0")] == [1, 1, 2, 2, 2]
