"""The patches of Megatron-Bridge: a wheel's very version, to the byte, and beside megatron-core's in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching import in_memory
from megatron_stability.megatron.patching.patch_set import load_patch_set, patches_root
from megatron_stability.megatron.patching.tree import BRIDGE, State, read_bridge
from tests.patches.patch_tools import HEADER, unified, write

TARGET = "megatron/bridge/loop.py"
STOCK = "def train():\n    return 'stock'\n"


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / "patches"
    patch = f"{HEADER}diff --git a/{TARGET} b/{TARGET}\n" + unified(TARGET, STOCK, STOCK.replace("stock", "patched"))
    write(folder, {"0.6.2/001-loop.patch": patch})
    return folder


def tree(tmp_path: Path, version: str = "0.6.2", text: str = STOCK) -> Path:
    root = tmp_path / "site-packages"
    info = f"megatron_bridge-{version}.dist-info/METADATA"
    files = {TARGET: text, "megatron/bridge/package_info.py": "", info: f"Name: megatron-bridge\nVersion: {version}\n"}
    write(root, files)
    return root


def test_the_very_version_and_the_very_bytes(tmp_path: Path, patches: Path) -> None:
    found = read_bridge(patches, tree(tmp_path))
    assert (found.version, found.state) == ("0.6.2", State.NOT_APPLIED)
    assert found.files[0].patched == STOCK.replace("stock", "patched")
    with pytest.raises(UsageError, match=r"megatron-bridge 0\.6\.2\) can't be patched: .*001-loop"):
        read_bridge(patches, tree(tmp_path, text=STOCK.replace("train", "fit")))


def test_another_version_is_refused_by_name(tmp_path: Path, patches: Path) -> None:
    with pytest.raises(UsageError, match=r"megatron-bridge 0\.7\.0 is not supported: there are patches for 0\.6\.2;"):
        read_bridge(patches, tree(tmp_path, "0.7.0"))
    with pytest.raises(UsageError, match="megatron-bridge is not installed"):
        read_bridge(patches)


def test_it_is_served_beside_other_patches(tmp_path: Path, patches: Path) -> None:
    found = read_bridge(patches, tree(tmp_path))
    other = in_memory.PatchFinder({"somewhere.else": (tmp_path, "")})
    sys.meta_path.insert(0, other)
    installation = in_memory.serve(found)
    try:
        with pytest.raises(UsageError, match="installed in this process already"):
            in_memory.serve(found)
    finally:
        installation.uninstall()
        sys.meta_path.remove(other)


def test_the_projects_own_are_whole() -> None:
    own = load_patch_set("0.6.2", patches_root() / BRIDGE, "megatron-bridge")
    assert own.paths == ("megatron/bridge/training/train.py",)
    assert [patch.name for patch in own.patches] == ["0.6.2/001-train-step.patch", "0.6.2/002-train-loop.patch"]
