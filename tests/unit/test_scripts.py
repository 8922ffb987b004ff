"""The shell scripts' own logic, offline: a stand-in for uv writes down what it was asked to install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["bash", "awk", "cat", "dirname", "find", "flock", "grep", "mkdir", "mktemp", "mv", "rm", "rmdir", "sort"]
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


class Machine:
    """A copy of the project in a machine whose PATH holds the few tools that the scripts use and nothing else."""

    def __init__(self, folder):
        self.project, self.bin, self.pyenv, self.log = (folder / name for name in ("project", "bin", "pyenv", "log"))
        for part in ("ci", "examples", "requirements"):
            shutil.copytree(ROOT / part, self.project / part)
        for name in ("setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.project)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.script(self.bin / "uv", f'[ "$1" = --version ] || echo "$*" >> {self.log}')

    def script(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
        path.chmod(0o755)

    def python(self, path):
        """Puts a working interpreter, under another name, at `path`."""
        self.script(path, f'exec {sys.executable} "$@"')
        return path

    def run(self, *command, **environment):
        settings = {"PATH": str(self.bin), "HOME": str(self.project), "PYENV_ROOT": str(self.pyenv)} | environment
        return subprocess.run(
            ["bash", *command], cwd=self.project, env=settings, capture_output=True, text=True, timeout=120
        )

    def installed(self):
        """What was installed since the last call: `packages`, `older` Megatron and `project`, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return ["project" if " -e " in line else "older" if "--target" in line else "packages" for line in lines]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_newest_pyenv_version_is_found_behind_broken_shims(machine):
    for shim in ("python3.12", "python3.13", "python3"):
        machine.script(machine.bin / shim, "exit 127")
    machine.python(machine.pyenv / "versions" / f"{VERSION}.9" / "bin" / "python")
    newest = machine.python(machine.pyenv / "versions" / f"{VERSION}.10" / "bin" / "python")
    done = machine.run("ci/env.sh")
    assert done.returncode == 0, done.stderr
    assert f"making .venv with {newest} " in done.stderr


def test_a_second_run_installs_nothing_and_a_change_only_what_it_touches(machine):
    machine.python(machine.bin / f"python{VERSION}")
    assert machine.run("ci/env.sh").returncode == 0
    assert machine.installed() == ["packages", "older", "project"]
    second = machine.run("ci/env.sh")
    assert (second.returncode, machine.installed()) == (0, [])
    assert second.stderr == f"env: ready: {machine.project}/.venv\n"
    with (machine.project / "setup.py").open("a") as file:
        file.write("# changed\n")
    machine.run("ci/env.sh")
    assert machine.installed() == ["project"]
    with (machine.project / "requirements/dev.lock").open("a") as file:
        file.write("# changed\n")
    machine.run("ci/env.sh")
    assert machine.installed() == ["packages", "older", "project"]
    (machine.project / ".venv/bin/python").unlink()
    machine.run("ci/env.sh")
    assert machine.installed() == ["packages", "older", "project"]


def test_a_failed_installation_is_told_and_never_reused(machine):
    machine.python(machine.bin / f"python{VERSION}")
    uv = (machine.bin / "uv").read_text()
    machine.script(machine.bin / "uv", '[ "$1" = --version ]')
    done = machine.run("ci/env.sh")
    assert done.returncode == 1
    assert done.stderr.endswith("run this again to start afresh.\n")
    (machine.bin / "uv").write_text(uv)
    assert machine.run("ci/env.sh").returncode == 0
    assert machine.installed() == ["packages", "older", "project"]


def test_without_a_usable_interpreter_one_sentence_says_what_was_tried(machine):
    machine.script(machine.bin / "python3.12", "exit 127")
    machine.script(machine.bin / "python3", f"exec {sys.executable} -c \"print('lacks the module ssl\\nran')\"")
    done = machine.run("ci/env.sh")
    assert done.returncode == 1
    tried = f"{machine.bin}/python3.12 does not run, {machine.bin}/python3 lacks the module ssl"
    assert done.stderr.splitlines() == [
        f"env: no usable Python 3.12 or 3.13 (tried: {tried}); install python3.12 with its venv package, "
        "or set MEGATRON_STABILITY_PYTHON to one."
    ]
    named = machine.run("ci/env.sh", MEGATRON_STABILITY_PYTHON="/nowhere/python")
    assert named.returncode == 1
    assert "MEGATRON_STABILITY_PYTHON=/nowhere/python does not run" in named.stderr


def test_an_incomplete_checkout_is_told_before_anything_is_made(machine):
    machine.python(machine.bin / f"python{VERSION}")
    (machine.project / "requirements/older-megatron.txt").unlink()
    done = machine.run("ci/env.sh")
    assert (done.returncode, machine.installed()) == (1, [])
    told = (
        f"env: {machine.project}/requirements/older-megatron.txt is missing or unreadable; check the project out again."
    )
    assert done.stderr.splitlines() == [told]
    assert not (machine.project / ".venv").exists()


def test_an_environment_of_another_maker_is_left_alone(machine):
    machine.python(machine.bin / f"python{VERSION}")
    (machine.project / ".venv").mkdir()
    (machine.project / ".venv" / "theirs").write_text("x")
    done = machine.run("ci/env.sh")
    assert done.returncode == 1
    assert "was not made by ci/env.sh" in done.stderr
    assert os.listdir(machine.project / ".venv") == ["theirs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "setup.py/report"), "because setup.py is not one"),
        (("--out", "/proc/nowhere"), "is not writable"),
        (("--out",), "--out needs a folder"),
        (("--output", "x"), "unknown argument '--output'"),
    ],
)
def test_the_quickstart_refuses_bad_arguments_before_any_work(machine, arguments, message):
    done = machine.run("examples/quickstart.sh", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (machine.project / ".venv").exists()


def test_the_checks_take_one_flag(machine):
    done = machine.run("ci/test.sh", "--slow")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: bash ci/test.sh [--fast | --all | --release]\n"
