"""Seams by anchor: they make the committed diffs, survive what only looks different, and refuse what is different."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.anchor.by_anchor import PATHS, read_files
from megatron_stability.megatron.patching.anchor.known import known_json
from megatron_stability.megatron.patching.anchor.seam_table import SEAMS
from megatron_stability.megatron.patching.anchor.splice import closed, opened
from megatron_stability.megatron.patching.diff import parse_patch, read_text
from megatron_stability.megatron.patching.patch_headers import HEADERS
from megatron_stability.megatron.patching.series import Placed, render
from megatron_stability.megatron.patching.survey import survey
from megatron_stability.megatron.patching.tree import State as TreeState
from megatron_stability.megatron.patching.tree import read_tree
from tests.patches.patch_tools import contents, stock_megatrons
from tests.patches.small_megatron import (
    ARGUMENTS,
    CHECKPOINTING,
    FILES,
    GPT,
    TRAINING,
    small_megatron,
)

SHIPPED = Path(__file__).parents[2] / "patches"
RELEASES = ("0.18.2", "0.19.2")
Change = Callable[[str], str]


def seams_of(path: str) -> list:
    return [seam for seam in SEAMS if seam.path == path]


def tree_of(text: str) -> str:
    """The syntax tree, but for docstrings, which layout is a part of."""
    tree = ast.parse(text.encode("utf-8", "surrogateescape"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())
    return ast.dump(tree)


@pytest.mark.parametrize("release", RELEASES)
def test_the_committed_diffs_are_made_from_the_anchors(release):
    """To the byte; `python ci/make_patches.py STOCK_TREE...` writes them anew."""
    files = read_files(stock_megatrons()[release])
    placed = [Placed(file.path, file.stock, file.placements) for file in files if file.stock is not None]
    committed = {file.stem: read_text(file) for file in (SHIPPED / release).glob("*.patch")}
    assert render(placed) == committed
    assert known_json(placed) == (SHIPPED / release / "seams.json").read_text()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("path", PATHS)
def test_a_release_with_other_layout_and_no_comments_is_patched_alike(release, path):
    stock = read_text(stock_megatrons()[release] / path)
    patched = opened(path, stock, seams_of(path))[1]
    bare = ast.unparse(ast.parse(stock)) + "\n"  # every line break, quote and comment is another
    placements, again = opened(path, bare, seams_of(path))
    assert again is not None, [p.reason for p in placements if not p.holds]
    assert tree_of(again) == tree_of(patched)
    for text in (stock, bare, stock.replace("\n", "\r\n")):
        there = opened(path, text, seams_of(path))[1]
        assert there is not None
        assert closed(path, there, seams_of(path)) == text


def test_every_patch_has_a_seam_and_every_name_is_one_of_its_own():
    assert {seam.patch for seam in SEAMS} | {1} == set(HEADERS)
    assert len({seam.name for seam in SEAMS}) == len(SEAMS)


# --- what only looks different --------------------------------------------------------------------------------


def above_each_def(text: str) -> str:
    """Thirty lines above each function, as a fork has them."""
    filler = "".join(f"    # {n} of ours\n" if n % 3 else "\n" for n in range(30))
    return re.sub(r"(?m)^( *)def ", lambda m: filler.replace("    ", m[1]) + m[0], text)


def in_tabs(text: str) -> str:
    return re.sub(r"(?m)^( {4})+", lambda m: "\t" * (len(m[0]) // 4), text)


def with_quoting_docstring(text: str) -> str:
    """A docstring that quotes the whole module, as notebooks do."""
    quoted = text.replace("\\", "\\\\").replace('"""', "'''")
    return f'r"""Notes.\n\n{quoted}"""\n{text}'


def three_local_functions(text: str) -> str:
    local = "".join(f"def ours_{n}(optimizer):\n    return optimizer.step()\n\n\n" for n in range(3))
    head = re.search(r"(?m)^(def|class) ", text).start()
    return text[:head] + local + text[head:]


def without_newline_at_the_end(text: str) -> str:
    return text.rstrip("\n")


def with_bom(text: str) -> str:
    return "\N{BYTE ORDER MARK}" + text


LOOKS: dict[str, Change] = {
    "thirty lines above each function": above_each_def,
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "tabs": in_tabs,
    "no comments, other line breaks": lambda text: ast.unparse(ast.parse(text)) + "\n",
    "two blank lines for each": lambda text: text.replace("\n\n", "\n\n\n"),
    "a comment at the end of each line": lambda text: (
        re.sub(r"(?m)([^,(\n\\\"])$", r"\1  # ours", text) if '"""' not in text else text.replace("\n", "\n", 1)
    ),
    "no newline at the end": without_newline_at_the_end,
    "a byte order mark": with_bom,
    "future annotations": lambda text: (
        text if text.startswith('"""') else "from __future__ import annotations\n" + text
    ),
}
MORE: dict[str, Change] = {
    "a docstring that quotes the code": with_quoting_docstring,
    "three local functions": three_local_functions,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("look", [*LOOKS, *MORE])
def test_what_only_looks_different_is_patched_alike(path, look):
    change = (LOOKS | MORE)[look]
    text = change(FILES[path])
    placements, patched = opened(path, text, seams_of(path))
    assert patched is not None, [(p.seam.name, p.reason) for p in placements if not p.holds]
    assert closed(path, patched, seams_of(path)) == text
    expected = opened(path, FILES[path], seams_of(path))[1]
    if look in ("CRLF", "tabs"):
        assert patched == change(expected)  # line ends and indentation of what is inserted, too
    if look in LOOKS and look != "future annotations":
        assert tree_of(patched) == tree_of(expected)
    else:
        assert _functions(patched) == _functions(text) | _functions(expected)


def _functions(text: str) -> dict[str, str]:
    nodes = ast.walk(ast.parse(text))
    return {node.name: ast.dump(node) for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_an_anchor_that_is_the_end_of_the_file_gets_a_line_of_its_own(tmp_path):
    text = FILES[ARGUMENTS].removesuffix("\n    return parser.parse_args()\n")
    root = small_megatron(tmp_path / "clone", {ARGUMENTS: text})
    tree = on_disk.apply(root)
    assert (root / ARGUMENTS).read_text() == text.replace(
        "import Thing\n", "import Thing\nfrom megatron.core.stability import seams\n"
    ).replace("    # From", "    if seams is not None:\n        seams.arguments_ready(args)\n    # From") + (
        "\n    if seams is not None:\n        seams.add_arguments(parser)"
    )
    assert tree.patch_set.apply(ARGUMENTS, text) == (root / ARGUMENTS).read_text()
    on_disk.revert(root)
    assert (root / ARGUMENTS).read_text() == text


# --- other states of a tree -------------------------------------------------------------------------------------


def test_a_job_that_upstream_took_over_is_not_needed(tmp_path):
    text = FILES[CHECKPOINTING].replace("        sys.exit()\n    return {}", "        sys.exit(1)\n    return {}")
    root = small_megatron(tmp_path / "clone", {CHECKPOINTING: text})
    row = next(row for row in survey(root).rows if row.seam == "failed_load_code in _load_base_checkpoint")
    assert (row.state, row.line) == ("not needed", None)
    assert on_disk.apply(root).by_anchor
    assert "sys.exit(1)" in (root / CHECKPOINTING).read_text()


def test_a_missing_file_and_a_foreign_seam_module_are_named(tmp_path):
    root = small_megatron(tmp_path / "clone")
    (root / GPT).unlink()
    with pytest.raises(UsageError, match=f"final_logits: there is no {GPT}"):
        on_disk.apply(root)
    root = small_megatron(tmp_path / "other", {"megatron/core/stability.py": "OURS = 1\n"})
    with pytest.raises(UsageError, match=r"megatron/core/stability\.py is there already, and is not the plugin's"):
        on_disk.apply(root)


def test_what_a_hand_patched_is_recognised_or_named(tmp_path):
    root = small_megatron(tmp_path / "clone")
    on_disk.apply(root)
    patched = (root / TRAINING).read_text()
    assert read_tree(root).state is TreeState.APPLIED
    (root / TRAINING).write_text(patched.replace("seams.step_begins()", "seams.step_begins(1)"))
    with pytest.raises(UsageError, match="step_begins is missing or was changed"):
        on_disk.revert(root)
    (root / TRAINING).write_text(patched.replace("    if seams is not None:\n        seams.step_begins()\n", ""))
    with pytest.raises(UsageError, match="step_begins is missing or was changed"):
        on_disk.apply(root)
    call = "    if seams is not None:\n        seams.step_begins()\n"
    (root / TRAINING).write_text(patched.replace(call, 2 * call))
    with pytest.raises(UsageError, match="the plugin's calls in it can't be taken out"):
        on_disk.revert(root)
    (root / TRAINING).write_text(patched.replace("    timers = get_timers()\n", "    timers = get_timers()  # ours\n"))
    on_disk.revert(root)  # a change of one's own beside the seams is kept
    assert (root / TRAINING).read_text() == FILES[TRAINING].replace("get_timers()\n", "get_timers()  # ours\n", 1)


def test_a_half_applied_tree_is_said_and_reverted(tmp_path):
    root = small_megatron(tmp_path / "clone")
    stock = contents(root)
    on_disk.apply(root)
    (root / GPT).write_text(FILES[GPT])
    assert read_tree(root).state is TreeState.HALF_APPLIED
    with pytest.raises(UsageError, match="half-applied"):
        on_disk.apply(root)
    on_disk.revert(root)
    assert contents(root) == stock


def test_an_unknown_tree_says_so_and_its_digest_follows_its_bytes(tmp_path):
    root = small_megatron(tmp_path / "clone")
    tree = read_tree(root)
    assert re.fullmatch(r"unknown Megatron 0\.77\.0 \(digest [0-9a-f]{12}\), seams placed by anchor", tree.said)
    on_disk.apply(root)
    assert read_tree(root).said == tree.said
    assert read_tree(root).patch_set.digest == tree.patch_set.digest
    other = small_megatron(tmp_path / "other", {GPT: FILES[GPT] + "# ours\n"})
    assert read_tree(other).stock_digest != tree.stock_digest


def test_the_diffs_of_an_unknown_tree_parse_and_make_what_is_written(tmp_path):
    root = small_megatron(tmp_path / "clone", {GPT: FILES[GPT].rstrip("\n")})
    tree = read_tree(root)
    for name, text in survey(root).diffs.items():
        assert parse_patch(text, name).files
    for file in tree.files:
        assert tree.patch_set.apply(file.path, file.stock) == file.patched
