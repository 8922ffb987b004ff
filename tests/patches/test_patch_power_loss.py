"""After a loss of power at any moment each file of a tree is stock or patched, and `revert` brings stock back."""

from __future__ import annotations

import importlib.util
import py_compile
from pathlib import Path

import pytest
from patch_tools import PATCHED, STOCK, contents

from megatron_stability.megatron.patching.on_disk import apply, revert
from tests.power_loss import Disk

BYTES = {path: text.encode() for path, text in STOCK.items()}
NEW = BYTES | {path: text.encode() for path, text in PATCHED.items()}


def files(root: Path) -> dict[str, bytes]:
    return {path: text for path, (text, _) in contents(root).items() if not path.endswith(".tmp")}


@pytest.mark.parametrize("back", [False, True])
def test_each_file_is_whole_and_the_tree_can_be_brought_back(
    root: Path, patches: Path, tmp_path: Path, back: bool
) -> None:
    if back:
        apply(root, patches)
    with Disk(root).watched() as disk:
        (revert if back else apply)(root, patches)
        disk.promise("done")
    for tree, promised in disk.trees(tmp_path / "t"):
        found = files(tree)
        assert all(found[path] in (text, NEW[path]) for path, text in BYTES.items())
        assert found.keys() - BYTES.keys() <= NEW.keys() - BYTES.keys()
        if promised:
            assert found == (BYTES if back else NEW)
        revert(tree, patches)
        assert files(tree) == BYTES


def test_bytecode_that_python_would_trust_does_not_come_back(root: Path, patches: Path, tmp_path: Path) -> None:
    source = root / "megatron/core/second.py"
    cache = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(str(source), str(cache), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    with Disk(root).watched() as disk:
        apply(root, patches)
    for tree, _ in disk.trees(tmp_path / "t"):
        stock = (tree / source.relative_to(root)).read_bytes() == BYTES["megatron/core/second.py"]
        assert stock or not (tree / cache.relative_to(root)).exists()
