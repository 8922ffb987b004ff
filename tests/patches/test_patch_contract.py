"""One contract for every patch set: those in patches/ against the real Megatron, and a small one."""

import subprocess
from pathlib import Path

import pytest
from patch_tools import contents, copy_targets, stock_megatrons

from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.diff import ContextError, read_text
from megatron_stability.megatron.patching.in_memory import PatchFinder, module_name
from megatron_stability.megatron.patching.patch_set import PatchSet, load_patch_set, patches_root, supported_versions
from megatron_stability.megatron.patching.tree import BRIDGE, State, read_tree


class PatchSetContract:
    """What holds for a patch set; a subclass gives `patches`, `version` and `root`, a stock tree to write in."""

    @pytest.fixture
    def patch_set(self, patches: Path, version: str) -> PatchSet:
        return load_patch_set(version, patches)

    def test_apply_twice_then_revert_restores_every_byte(self, root, patches):
        stock = contents(root)
        assert on_disk.apply(root, patches).state is State.NOT_APPLIED
        patched = contents(root)
        assert patched != stock
        assert on_disk.apply(root, patches).state is State.APPLIED
        assert contents(root) == patched
        on_disk.revert(root, patches)
        assert contents(root) == stock

    def test_memory_serves_the_bytes_that_disk_and_git_get(self, root, patches, patch_set, tmp_path):
        tree = read_tree(root, patches)
        finder = PatchFinder({module_name(file.path): (root / file.path, file.patched) for file in tree.files})
        served = {}
        for path in patch_set.paths:
            folder = (root / path).parent.parent if path.endswith("/__init__.py") else (root / path).parent
            spec = finder.find_spec(module_name(path), [str(folder)])
            served[path] = spec.loader.get_data(spec.origin)
        copy_targets(root, tmp_path / "by-git", patch_set.paths)
        for patch in patch_set.patches:
            subprocess.run(["git", "apply", patches / patch.name], cwd=tmp_path / "by-git", check=True, timeout=60)
        on_disk.apply(root, patches)
        for path in patch_set.paths:
            assert (root / path).read_bytes() == served[path] == (tmp_path / "by-git" / path).read_bytes(), path

    def test_patched_files_compile(self, root, patches):
        for file in read_tree(root, patches).files:
            compile(file.patched, file.path, "exec")

    def test_no_file_is_both_stock_and_patched(self, root, patches, patch_set):
        for file in read_tree(root, patches).files:
            with pytest.raises(ContextError):
                patch_set.revert(file.path, file.stock)
            with pytest.raises(ContextError):
                patch_set.apply(file.path, file.patched)

    def test_every_changed_line_of_context_is_noticed(self, root, patch_set):
        """In each file, the first line of each hunk in turn."""
        for path in patch_set.paths:
            stock = read_text(root / path) if (root / path).exists() else None
            for hunk in patch_set.diffs(path)[0].hunks if stock else ():
                lines = stock.split("\n")
                lines[hunk.old_index] += " # changed"
                with pytest.raises(ContextError, match=path):
                    patch_set.apply(path, "\n".join(lines))

    def test_headers_say_what_why_upstream_and_when_to_remove(self, patch_set):
        for patch in patch_set.patches:
            assert all((patch.what, patch.why, patch.upstream, patch.remove_when)), patch.name
            assert patch.files, patch.name

    def test_names_are_numbered_one_after_the_other(self, patch_set):
        numbers = [Path(patch.name).name.split("-")[0] for patch in patch_set.patches]
        assert numbers == [f"{n:03}" for n in range(1, len(numbers) + 1)]


class TestSmallPatchSet(PatchSetContract):
    """Two patches, one file touched by both, one new file, CRLF and no newline at the end; fixtures in conftest.py."""

    @pytest.fixture
    def version(self) -> str:
        return "0.19.2"


SHIPPED = Path(__file__).parents[2] / "patches"


def test_both_supported_versions_are_shipped():
    assert patches_root() == SHIPPED
    assert supported_versions() == ("0.18.2", "0.19.2")


class TestShippedPatchSet(PatchSetContract):
    """The patches in patches/, each set against the target files of its own megatron-core."""

    @pytest.fixture(params=sorted(folder.name for folder in SHIPPED.glob("*") if folder.name != BRIDGE))
    def version(self, request) -> str:
        return request.param

    @pytest.fixture
    def patches(self) -> Path:
        return SHIPPED

    @pytest.fixture
    def root(self, version: str, patch_set: PatchSet, tmp_path: Path) -> Path:
        copy_targets(stock_megatrons()[version], tmp_path / "tree", patch_set.paths)
        return tmp_path / "tree"

    def test_a_fork_of_the_release_is_patched_by_anchor_and_reverted(self, root, patches, patch_set):
        assert not read_tree(root, patches).by_anchor
        for path in (path for path in patch_set.paths if (root / path).exists()):
            with (root / path).open("a", encoding="utf-8") as file:
                file.write("\n\ndef of_the_fork():\n    return None\n")
        (root / patch_set.paths[-1]).write_text("# of the fork\n" + read_text(root / patch_set.paths[-1]))
        stock = contents(root)
        tree = on_disk.apply(root, patches)
        assert (tree.by_anchor, tree.patch_set.version) == (True, f"{patch_set.version} by anchor")
        assert read_tree(root, patches).state is State.APPLIED
        on_disk.revert(root, patches)
        assert contents(root) == stock
