"""on_disk.py and tree.py: all or none, exact bytes, hard links, bytecode caches, and every tree they refuse."""

import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patch_tools import HEADER, PATCHED, STOCK, contents, python, unified, write, write_series

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.patch_set import load_patch_set
from megatron_stability.megatron.patching.tree import State, detect_version, read_tree

SECOND = "megatron/core/second.py"


def refused(call, root: Path, said: str) -> None:
    """`call` raises UsageError with a text that matches, and changes nothing below `root`."""
    before = contents(root)
    with pytest.raises(UsageError, match=said):
        call()
    assert contents(root) == before


def as_wheel(root: Path, version: str) -> None:
    info = root / f"megatron_core-{version}.dist-info"
    write(info, {"METADATA": f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n"})


def test_revert_gives_back_bytes_and_modes(root, patches):
    (root / SECOND).chmod(0o750)
    stock = contents(root)
    assert on_disk.apply(root, patches).state is State.NOT_APPLIED
    for path, text in PATCHED.items():
        assert (root / path).read_bytes() == text.encode()
    assert (root / SECOND).stat().st_mode & 0o7777 == 0o750
    assert read_tree(root, patches).state is State.APPLIED
    on_disk.revert(root, patches)
    assert contents(root) == stock
    assert read_tree(root, patches).state is State.NOT_APPLIED


def test_a_second_apply_or_revert_touches_no_file(root, patches):
    def stamps():
        return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in root.rglob("*.py")}

    on_disk.apply(root, patches)
    patched = stamps()
    assert on_disk.apply(root, patches).state is State.APPLIED
    assert stamps() == patched
    on_disk.revert(root, patches)
    stock = stamps()
    assert on_disk.revert(root, patches).state is State.NOT_APPLIED
    assert stamps() == stock


def test_the_other_name_of_a_hard_linked_file_stays_stock(root, patches, tmp_path):
    cache = tmp_path / "cache.py"
    os.link(root / SECOND, cache)
    on_disk.apply(root, patches)
    assert cache.read_text() == STOCK[SECOND]
    assert cache.stat().st_nlink == 1
    on_disk.revert(root, patches)
    assert cache.read_text() == STOCK[SECOND]


def test_the_target_of_a_symbolic_link_stays_stock(root, patches, tmp_path):
    cache = tmp_path / "cache.py"
    (root / SECOND).rename(cache)
    (root / SECOND).symlink_to(cache)
    on_disk.apply(root, patches)
    assert cache.read_text() == STOCK[SECOND]
    assert (root / SECOND).read_text() == PATCHED[SECOND]


def run_where(root: Path) -> str:
    code = "from megatron.core.second import where; print(where())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, timeout=60, check=True, capture_output=True, text=True
    )
    return result.stdout.strip()


@pytest.mark.parametrize(
    "mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH]
)
def test_no_stale_bytecode_runs_even_for_a_patch_of_equal_size(root, tmp_path, mode):
    new = STOCK[SECOND].replace("'stock'", "'other'")
    assert len(new) == len(STOCK[SECOND])
    write(tmp_path / "same", {"0.19.2/001-x.patch": HEADER + unified(SECOND, STOCK[SECOND], new)})
    for act, expected in ((on_disk.revert, "stock"), (on_disk.apply, "other"), (on_disk.revert, "stock")):
        act(root, tmp_path / "same")
        assert run_where(root) == expected
        py_compile.compile(str(root / SECOND), invalidation_mode=mode)


def test_whole_seconds_of_mtime_move_on_at_every_change(root, patches):
    seen = [int((root / SECOND).stat().st_mtime)]
    for act in (on_disk.apply, on_disk.revert, on_disk.apply):
        act(root, patches)
        seen.append(int((root / SECOND).stat().st_mtime))
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("what", [SECOND, "megatron/training"])
@pytest.mark.parametrize("act", [on_disk.apply, on_disk.revert])
def test_a_read_only_file_or_folder_is_refused(root, patches, what, act):
    if act is on_disk.revert:
        on_disk.apply(root, patches)
    (root / what).chmod((root / what).stat().st_mode & ~0o222)
    refused(lambda: act(root, patches), root, rf"{what} is read-only; nothing was changed; .*megatron-stability run")
    (root / what).chmod(0o755)


@pytest.mark.parametrize("act", [on_disk.apply, on_disk.revert])
@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_a_write_error_at_any_move_puts_everything_back(root, patches, monkeypatch, act, moves):
    if act is on_disk.revert:
        on_disk.apply(root, patches)
    real, left = os.replace, [moves]

    def replace(source, target):
        left[0] -= 1
        if left[0] == -1:
            raise OSError(28, "No space left on device", str(source))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    if act is on_disk.revert and moves == 3:
        act(root, patches)  # three moves and one removal: the fourth move never comes
        assert read_tree(root, patches).state is State.NOT_APPLIED
        return
    refused(lambda: act(root, patches), root, "No space left on device; nothing was changed")


def test_a_failure_to_put_back_says_half_applied(root, patches, monkeypatch):
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) > 1:
            raise OSError(30, "Read-only file system", str(source))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UsageError, match="left half-applied: make it writable and run"):
        on_disk.apply(root, patches)
    assert read_tree(root, patches).state is State.HALF_APPLIED


@pytest.mark.parametrize("act", [on_disk.apply, on_disk.revert])
@pytest.mark.parametrize("moves", [1, 2])
def test_a_kill_between_moves_is_refused_by_apply_and_undone_by_revert(root, patches, monkeypatch, act, moves):
    stock = contents(root)
    if act is on_disk.revert:
        on_disk.apply(root, patches)
    real, left = os.replace, [moves]

    def replace(source, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        act(root, patches)
    monkeypatch.undo()
    assert not list(root.rglob("*.tmp"))
    assert read_tree(root, patches).state is State.HALF_APPLIED
    refused(
        lambda: on_disk.apply(root, patches), root, "half-applied: megatron/.* patched, megatron/.* not; .*patch revert"
    )
    on_disk.revert(root, patches)
    assert contents(root) == stock


@pytest.mark.parametrize("moves", [0, 2])
def test_what_kill_9_leaves_behind_is_cleared_away(root, patches, moves):
    stock = contents(root)
    code = f"""
import os, signal
from pathlib import Path
from megatron_stability.megatron.patching import on_disk
real, left = os.replace, [{moves}]
def replace(source, target):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    real(source, target)
os.replace = replace
on_disk.apply(Path("."), Path("../patches"))
"""
    with pytest.raises(AssertionError):
        python(code, root)
    assert list(root.rglob("*.tmp"))
    assert read_tree(root, patches).state is (State.HALF_APPLIED if moves else State.NOT_APPLIED)
    on_disk.revert(root, patches)
    assert contents(root) == stock


def test_a_changed_context_is_refused_by_file_hunk_line_and_versions(root, patches):
    write(root, {"megatron/core/first.py": STOCK["megatron/core/first.py"].replace("line_19 = 19", "line_19 = 0")})
    write(patches, {"0.18.2/001-x.patch": (patches / "0.19.2/001-part.patch").read_text()})
    said = (
        r"0.19.2/002-part.patch does not fit megatron/core/first.py: hunk 1, line 20: expected 'line_19 = 19\\n', "
        r"found 'line_19 = 0\\n'; supported are megatron-core 0.18.2, 0.19.2 .*nothing was changed"
    )
    for act in (on_disk.apply, on_disk.revert):
        refused(lambda act=act: act(root, patches), root, said)


def test_a_file_that_another_release_patched_is_refused(root, patches):
    write(root, {SECOND: "import megatron_stability\n" + STOCK[SECOND]})
    refused(lambda: on_disk.apply(root, patches), root, "perhaps another release patched it")


@pytest.mark.parametrize(("path", "said"), [(SECOND, "is missing"), ("megatron/core/seam.py", "exists already")])
def test_a_missing_or_unexpected_file_is_refused(root, patches, path, said):
    if (root / path).exists():
        (root / path).unlink()
    else:
        write(root, {path: "something else\n"})
    refused(lambda: on_disk.apply(root, patches), root, f"does not fit {path}: the file {said}")


def test_a_folder_without_megatron_is_refused(tmp_path, patches):
    refused(
        lambda: on_disk.apply(tmp_path, patches), tmp_path, "holds no megatron/core/package_info.py: --target takes"
    )


@pytest.mark.parametrize("text", ["MAJOR = (\n", "MAJOR = 0\0\n", "\udcff\n", "MAJOR, MINOR = 0, 19\n", ""])
def test_a_version_that_cannot_be_read_is_refused(root, patches, text):
    write(root, {"megatron/core/package_info.py": text})
    refused(lambda: on_disk.apply(root, patches), root, "package_info.py")
    write(root, {"megatron/core/package_info.py": "MAJOR = MINOR = 0\nMINOR = 'x'\nPATCH = 0\nPRE_RELEASE = ''\n"})
    refused(lambda: on_disk.apply(root, patches), root, "which is no version")


def test_a_wheel_must_have_a_supported_version(root, patches):
    as_wheel(root, "0.19.1")
    assert detect_version(root) == ("0.19.1", True)
    refused(
        lambda: on_disk.apply(root, patches),
        root,
        "megatron-core 0.19.1 is not supported: there are patches for 0.19.2",
    )
    as_wheel(root, "0.19.2")
    refused(
        lambda: on_disk.apply(root, patches), root, "0.19.1.dist-info and megatron_core-0.19.2.dist-info: reinstall"
    )
    shutil.rmtree(root / "megatron_core-0.19.1.dist-info")
    on_disk.apply(root, patches)
    assert read_tree(root, patches).state is State.APPLIED


def test_a_clone_of_the_same_minor_release_is_taken_by_its_context(root, patches):
    info = "megatron/core/package_info.py"
    write(root, {info: STOCK[info].replace("PATCH = 2", "PATCH = 1")})
    write(patches, {"0.19.3/001-x.patch": (patches / "0.19.2/002-part.patch").read_text()})  # newer, and does not fit
    tree = on_disk.apply(root, patches)
    assert (tree.version, tree.patch_set.version) == ("0.19.1", "0.19.2")
    on_disk.revert(root, patches)
    write(root, {SECOND: "changed\n"})
    refused(lambda: on_disk.apply(root, patches), root, "expected .*supported are megatron-core 0.19.2, 0.19.3")
    write(root, {info: STOCK[info].replace("MINOR = 19", "MINOR = 20")})
    refused(lambda: on_disk.apply(root, patches), root, "megatron-core 0.20.2 is not supported")


def test_the_digest_covers_what_the_patches_do_and_nothing_else(patches, tmp_path):
    digest = load_patch_set("0.19.2", patches).digest
    other = write_series(tmp_path / "other")
    file = other / "0.19.2/001-part.patch"
    file.write_text(file.read_text().replace("opens a seam.", "is worded otherwise."))
    assert load_patch_set("0.19.2", other).digest == digest
    file.write_text(file.read_text().replace("+A = 1", "+A = 2"))
    assert load_patch_set("0.19.2", other).digest != digest


def test_a_patch_outside_megatron_is_refused(tmp_path):
    write(tmp_path, {"0.19.2/001-x.patch": HEADER + unified("pretrain_gpt.py", "a\n", "b\n")})
    with pytest.raises(UsageError, match=r"pretrain_gpt\.py is not a module under megatron/"):
        load_patch_set("0.19.2", tmp_path)
