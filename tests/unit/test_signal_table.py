"""Each signal is named once: what detectors, observers, rules and reports call by name is a row of the table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import megatron_stability
from megatron_stability.detect import DETECTORS
from megatron_stability.detect.config import Detect, Limits
from megatron_stability.report import tags
from megatron_stability.signals import PLACED, SETS, SIGNALS, notable, row, ways

PACKAGE = Path(megatron_stability.__file__).parent
FAMILIES = {name.partition("/")[0] for name in SIGNALS if "/" in name} - {"grad_norm"}
KNOWN = (SETS, "data/objective")  # a set's name is the run's own; the other is a class of causes


def _named() -> dict[str, str]:
    """Every string of the code that looks like a signal's name, with the file that has it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if re.fullmatch(r"[a-z_0-9]+(/[a-z_0-9]+)+", text) and text.partition("/")[0] in FAMILIES:
                    found[text] = str(path.relative_to(PACKAGE))
    return found


def test_every_signal_that_the_code_names_is_a_row() -> None:
    named = _named()
    assert len(named) > 30
    rows = {*SIGNALS, *tags.DERIVED, *tags.CURVES}  # what is made of signals, and of the tables, has rows there
    assert {name: file for name, file in named.items() if name not in rows and not name.startswith(KNOWN)} == {}


def test_what_detectors_need_is_a_row() -> None:
    needed = {name for detector in DETECTORS for name in getattr(detector, "requires", ())}
    assert "attention/max_logit" in needed
    assert needed <= set(SIGNALS)


def test_ways_are_the_tables() -> None:
    assert ways(("data/repeated", "data/entropy", "held_out/web", "param_norm", "fp8/gemms")) == {
        "data/repeated": "max",
        "data/entropy": "min",
        "held_out/web": "max",
        "param_norm": "norm",
        "fp8/gemms": "sum",
    }
    assert row("fp8/saturation/at").way == "min"
    with pytest.raises(KeyError):
        ways(("fp8/unheard_of",))
    with pytest.raises(AssertionError, match=r"observe/wide\.py"):
        ways(("ranks/weights",))


def test_a_place_is_named_from_where_on_its_detector_speaks() -> None:
    detectors = {detector.requires[0]: detector.name for detector in DETECTORS if getattr(detector, "requires", ())}
    for name in PLACED:
        limits = getattr(Detect(), detectors[name])
        assert isinstance(limits, Limits)
        assert notable(name) == next(limit for limit in (limits.watch, limits.small) if limit is not None), name
