"""What the documents tell people to type exists: commands, flags, files, links."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from ci import flags_page, tags_page, triage_page
from megatron_stability import cli
from megatron_stability.config import ALIASES, dest, flag, leaves
from megatron_stability.megatron.access.flags import flag_rows

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
_DOCS = (ast.Module, ast.ClassDef, ast.FunctionDef)
# Flags of the tree that are not leaves.
OTHER_FLAGS = {"--stability-config", *ALIASES.values()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(document: Path) -> None:
    known = {command.name for command in cli.COMMANDS}
    named = re.findall(r"(?:^|`|\.)megatron-stability ([a-z][a-z0-9-]*)", document.read_text(), flags=re.MULTILINE)
    named += re.findall(r"-m megatron_stability ([a-z][a-z0-9-]*)", document.read_text())
    assert set(named) <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_exist(document: Path) -> None:
    known = {flag(path) for path, _ in leaves()} | OTHER_FLAGS
    assert set(re.findall(r"--stability-[a-z0-9-]+", document.read_text())) <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_scripts_exist(document: Path) -> None:
    text = document.read_text()
    targets = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in targets if not (document.parent / link).exists()] == []
    scripts = re.findall(r"\bbash ((?:ci|examples|benchmarks)/[\w./-]+\.sh)", text)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_the_text_exist(document: Path) -> None:
    named = re.findall(r"`([a-z_0-9]+/[a-z_0-9./-]+\.(?:py|sh|toml|txt|in|lock))`", document.read_text())
    roots = (ROOT, ROOT / "megatron_stability", ROOT / "megatron_stability/megatron")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_flag_names_are_unique() -> None:
    paths = [path for path, _ in leaves()]
    assert len({dest(path) for path in paths}) == len(paths)


def test_the_muonclip_page_says_what_its_figures_are() -> None:
    figures = json.loads((ROOT / "docs" / "muonclip.json").read_text())
    page, tau = (ROOT / "docs" / "qk_clip.md").read_text(), figures["tau"]
    for layout in ("dp2", "tp2pp2"):
        without, clipped = (figures[f"{layout}-{way}"]["max_logit"] for way in ("without", "with"))
        assert len(without) == len(clipped) == 300
        assert max(without) > 2 * tau
        assert max(clipped) <= tau
        assert f"{max(without):.1f}, above τ from step" in page
        assert f"| {max(clipped):.2f} | 0 |" in page


def test_the_page_of_flags_is_what_the_rows_say() -> None:
    assert flags_page.main("--check") == 0


def test_what_the_page_of_flags_names_is_there_and_what_it_calls_refused_is() -> None:
    cells = [(flags, cell) for flags, three in flags_page.tested() for cell in three if cell]
    assert len(cells) > 40
    refused = {row.flag for row in flag_rows.REFUSED}
    for flags, cell in cells:
        path, _, name = cell.partition("::")
        if cell == "refused":
            assert flags.split()[0] in refused, flags
        elif name.startswith("test_"):
            assert f"def {name}(" in (ROOT / path).read_text(), cell
        else:
            assert f'"{name}"' in (ROOT / path).read_text() or f"def {name}(" in (ROOT / path).read_text(), cell


def test_the_tables_of_triage_are_those_of_the_rules() -> None:
    assert triage_page.main("--check") == 0


def test_the_page_of_tags_is_of_what_is_written() -> None:
    assert tags_page.main("--check") == 0


def test_the_fp8_page_says_what_its_figures_are() -> None:
    figures = json.loads((ROOT / "docs" / "drills" / "fp8_compare.json").read_text())
    page = (ROOT / "docs" / "fp8.md").read_text()
    arms = {run["arm"] for run in figures["runs"]}
    assert len(figures["seeds"]) >= 3
    assert figures["steps"] >= 300
    assert figures["separated"] is all(run["passes"] is (run["arm"] == "healthy") for run in figures["runs"])
    for arm in arms:
        runs = [run for run in figures["runs"] if run["arm"] == arm]
        errors = [100 * abs(run["loss_error_worst"]["error"]) for run in runs]
        binades = [run["telemetry"]["binades"] for run in runs]
        shares = [100 * run["telemetry"]["underflow"] for run in runs]
        passed = sum(run["passes"] for run in runs)
        row = f"| {arm} | {passed} of {len(runs)} | {_range(errors, 2)} | {_range(binades, 1)} | {_range(shares, 2)} |"
        assert row in page, row


def _range(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


UPSTREAM = (
    "core",
    "training",
    "pytorch",
    "debug",
    "transformer_engine",
)  # whose files are not ours


@pytest.mark.parametrize("module", sorted((ROOT / "megatron_stability").rglob("*.py")), ids=lambda path: path.stem)
def test_files_named_in_docstrings_exist(module: Path) -> None:
    package = ROOT / "megatron_stability"
    roots = (ROOT, package, package / "megatron", module.parent)
    docs = [
        ast.get_docstring(node) or "" for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, _DOCS)
    ]
    named = [name for doc in docs for name in re.findall(r"`([a-z_0-9]+/[a-z_0-9./]+\.py)`", doc)]
    ours = [name for name in named if name.split("/")[0] not in UPSTREAM]
    assert [name for name in ours if not any((root / name).exists() for root in roots)] == []
