"""CONTRIBUTING's list of the files of a detector with a new signal: a toy one is added by those alone, and runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron_stability

ROOT = Path(__file__).parents[2]
PACKAGE = Path(megatron_stability.__file__).parent

TOY = '''"""A toy."""

from typing import ClassVar

from megatron_stability.detect.limits import Limit


class Toy(Limit):
    name = "toy"
    what = "heat of the toy"
    requires: ClassVar[tuple[str, ...]] = ("toy/heat",)
'''
#: By file: what stands there, and what is put in its place.
EDITS = {
    "detect/config.py": (
        "    throughput: Growth",
        "    toy: Limits = Limits(watch=10, large=100)\n    throughput: Growth",
    ),
    "detect/__init__.py": ("    growth.Throughput,\n", "    growth.Throughput,\n    Toy,\n"),
    "signals.py": ('    "step_seconds": (', '    "toy/heat": ("max", "K", "heat of the toy"),\n    "step_seconds": ('),
}
IMPORT = ("from megatron_stability.detect.non_finite", "from megatron_stability.detect.toy import Toy\n")
RUN = """
import torch
from megatron_stability import detect
from megatron_stability.config import load
from megatron_stability.observe.reduction import LocalSignals, Reduction
from megatron_stability.signals import row, ways

config = load()
assert not load(overrides={"stability_detect_toy_enabled": "false"}).detect.toy.enabled  # its flags follow
reduction = Reduction(None, torch.device("cpu"), ways(("toy/heat",)))
(toy,) = (each for each in detect.build(config.detect) if each.name == "toy")
for heat in (5.0, 50.0, 500.0):
    local = LocalSignals(step=1, first_sample=0, samples=1, loss_sums_n2=torch.tensor([[1.0, 1.0]]), grad_norm=1.0,
                         grad_amax=None, overflow=False, learning_rate=0.1, history=0, extra={"toy/heat": heat})
    verdict = toy.inspect(reduction(local))
    print(verdict.tier if verdict else "none", verdict.reason if verdict else "")
print(row("toy/heat").unit)
"""


def listed() -> set[str]:
    """The files of the package that the how-to names, up to where it says that a default rule is optional."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.split("## How to add a detector")[1].split("\n## ")[0].split("Only if")[0]
    return set(re.findall(r"`megatron_stability/([\w/]+\.py)`", section))


def test_the_list_is_whole(tmp_path: Path) -> None:
    assert {name.replace("NAME", "toy") for name in listed()} == {"detect/toy.py", *EDITS}
    copy = tmp_path / "megatron_stability"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "detect/toy.py").write_text(TOY, "utf-8")
    for name, (before, after) in EDITS.items():
        source = (copy / name).read_text("utf-8")
        assert source.count(before) == 1, name
        changed = source.replace(before, after)
        (copy / name).write_text(changed.replace(IMPORT[0], IMPORT[1] + IMPORT[0]), "utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", RUN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "none ",
        "watch heat of the toy 50 is above 10",
        "large heat of the toy 500 is above 100",
        "K",
    ]
