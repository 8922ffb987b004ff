"""The base install: what it declares is enough for every help, and what is missing is said with what brings it."""

from __future__ import annotations

import contextlib
import json
import runpy
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement

from megatron_stability import cli, extras

ROOT = Path(__file__).resolve().parents[2]
BARE = """
import contextlib, importlib.abc, io, json, sys
root, allowed, commands = json.loads(sys.argv[1])
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in allowed and not top.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
sys.meta_path.insert(0, Blocker())
sys.path.insert(0, root)
from megatron_stability import cli
for argv in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(argv)
        except SystemExit as ending:
            code = ending.code or 0
        except BaseException as error:
            code = repr(error)
    print(json.dumps([argv, code, out.getvalue()[:300], err.getvalue()[-600:]]))
"""


def _closure() -> set[str]:
    """Top-level modules of what the package declares without an extra, and of what that needs."""
    open_, names = [Requirement(text) for text in _described()["install_requires"]], set()
    while open_:
        requirement = open_.pop()
        if requirement.name in names:
            continue
        names.add(requirement.name)
        for text in metadata.requires(requirement.name) or ():
            other = Requirement(text)
            if other.marker is None or other.marker.evaluate({"extra": ""}):
                open_.append(other)
    canonical = {name.lower().replace("_", "-") for name in names}
    found = {
        module
        for module, owners in metadata.packages_distributions().items()
        if any(owner.lower().replace("_", "-") in canonical for owner in owners)
    }
    return found | {"megatron_stability", "_distutils_hack", "sitecustomize", "usercustomize"}


@cache
def _described() -> dict[str, Any]:
    """What setup.py says of the package, whatever is installed."""
    found: dict[str, Any] = {}
    with mock.patch("setuptools.setup", lambda **said: found.update(said)), contextlib.chdir(ROOT):
        runpy.run_path("setup.py")
    return found


def _bare(*commands: list[str]) -> list[tuple[list[str], int, str, str]]:
    given = json.dumps([str(ROOT), sorted(_closure()), commands])
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", BARE, given],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_every_command_explains_itself_in_a_bare_install() -> None:
    checkpoint = [["checkpoint", part, "--help"] for part in ("list", "verify", "repair-tracker", "suspect", "drill")]
    commands = [[command.name, "--help"] for command in cli.COMMANDS] + checkpoint
    told = _bare(*commands, ["--help"], ["--version"])
    assert [(argv, code, err) for argv, code, _, err in told if code != 0] == []
    assert all("usage: megatron-stability" in out for argv, _, out, _ in told if argv[-1] == "--help")


def test_what_is_missing_is_one_sentence_with_code_2(tmp_path: Path) -> None:
    data, nowhere = str(tmp_path / "a.txt"), str(tmp_path / "x")
    Path(data).write_text("text\n")
    commands = {
        "pyarrow": ["audit-data", data, "--output", nowhere],
        "modelopt": ["fp8-readiness", "--load", nowhere],
        "hydra": ["nemo", str(ROOT / "examples/nemo/tiny_cpu.yaml")],
    }
    for package, (argv, code, _, err) in zip(commands, _bare(*commands.values()), strict=True):
        assert code == 2, (argv, err)
        assert len(err.splitlines()) == 1
        assert package in err or "omegaconf" in err
        assert f"pip install '{ROOT}[" in err


def test_every_missing_package_has_an_extra_that_brings_it() -> None:
    assert set(extras.EXTRAS.values()) <= set(_described()["extras_require"])


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ({"url": "file:///home/a%20b", "dir_info": {}}, "pip install '/home/a b[nemo]'"),
        ({"url": "file:///w/m-0.1.whl", "archive_info": {}}, "pip install '/w/m-0.1.whl[nemo]'"),
        (
            {"url": "https://g.example/m", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'megatron-stability[nemo] @ git+https://g.example/m@abc'",
        ),
        ({"url": "https://x/m.whl", "archive_info": {}}, "pip install 'megatron-stability[nemo] @ https://x/m.whl'"),
        (None, "pip install 'megatron-stability[nemo]'"),
    ],
)
def test_an_extra_is_named_by_where_the_package_came_from(
    said: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if said is None else json.dumps(said)

    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    monkeypatch.setattr(extras, "__file__", "/site-packages/megatron_stability/extras.py")
    assert extras.command("nemo") == command


def test_run_from_its_sources_it_names_them() -> None:
    assert extras.command("report") == f"pip install '{ROOT}[report]'"


def test_no_other_place_says_how_to_install() -> None:
    """An index has no such package until somebody publishes it."""
    files = [*(ROOT / "megatron_stability").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    wrong = [str(path) for path in files if "megatron-stability[" in path.read_text() and path.name != "extras.py"]
    assert wrong == []
