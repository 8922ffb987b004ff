"""Any change of any file of a checkpoint shows, and a death at any moment leaves a whole generation."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_stability.checkpoints import asides, generations, manifest, parts
from megatron_stability.errors import UsageError
from tests import effort
from tests.unit.checkpoints.checkpoint_maker import complete, draft, save

EXAMPLES = settings(max_examples=effort.examples(80, 600), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations, 5 and 10."""
    root = tmp_path_factory.mktemp("whole")
    complete(root, 5)
    complete(root, 10)
    return root


def every_file(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def is_refused(root: Path, file: Path) -> None:
    """The newest generation is not good, the file is named, and the older one is chosen."""
    found = generations.generation(root / "iter_0000010", full=True)
    assert found.state in ("corrupt", "incomplete")
    blamed = {problem.file for problem in found.problems}
    own = {manifest.MANIFEST, manifest.MARKER}
    assert blamed == {file.name} or (file.name in own and blamed <= own)
    good = generations.newest_good(root)
    assert good is not None
    assert good.step == 5


def test_a_whole_checkpoint_has_no_problem(whole: Path) -> None:
    assert [(each.step, each.state) for each in generations.generations(whole, full=True)] == [
        (10, "complete"),
        (5, "complete"),
    ]
    names = manifest.file_names(whole / "iter_0000010")
    assert {".metadata", "common.pt", "metadata.json"} < set(names)
    assert sum(name.endswith(".distcp") for name in names) >= 2


def test_every_bit_of_marker_and_some_of_every_file(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(whole, root)
    chosen = random.Random(1)
    for path in every_file(root / "iter_0000010"):
        data = path.read_bytes()
        places = range(len(data)) if path.name == manifest.MARKER else chosen.sample(range(len(data)), 12)
        for place in places:
            for bit in range(8):
                changed = bytearray(data)
                changed[place] ^= 1 << bit
                path.write_bytes(changed)
                assert manifest.verify(path.parent), (path.name, place, bit)
        path.write_bytes(data)
    assert manifest.verify(root / "iter_0000010") == []


@EXAMPLES
@given(data=st.data())
def test_any_damage_to_any_file_is_caught(whole: Path, data: st.DataObject) -> None:
    """Single-byte changes, truncation, growth, removal, emptiness, over all files."""
    copy = whole.parent / f"damage-{os.getpid()}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    file = data.draw(st.sampled_from(every_file(copy / "iter_0000010")))
    content = file.read_bytes()
    kind = data.draw(st.sampled_from(["byte", "truncate", "grow", "remove", "empty"]))
    if kind == "byte":
        place = data.draw(st.integers(0, len(content) - 1))
        other = data.draw(st.integers(1, 255))
        file.write_bytes(content[:place] + bytes([content[place] ^ other]) + content[place + 1 :])
    elif kind == "truncate":
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif kind == "grow":
        file.write_bytes(content + data.draw(st.binary(min_size=1, max_size=64)))
    elif kind == "remove":
        file.unlink()
    else:
        file.write_bytes(b"")
    is_refused(copy, file)


@EXAMPLES
@given(data=st.data())
def test_any_swap_of_files_is_caught(whole: Path, data: st.DataObject) -> None:
    """Within a generation, and with the file of the same name in another."""
    copy = whole.parent / f"swap-{os.getpid()}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    files = every_file(copy / "iter_0000010")
    one = data.draw(st.sampled_from(files))
    if data.draw(st.booleans()):
        other = data.draw(st.sampled_from([file for file in files if file != one]))
    else:
        other = copy / "iter_0000005" / one.name
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    if first == second:
        assert manifest.verify(copy / "iter_0000010") == []
    else:
        assert generations.generation(copy / "iter_0000010", full=True).state in ("corrupt", "incomplete")


def test_swapped_folders_are_caught(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "iter_0000005", tmp_path / "iter_0000010")
    found = generations.generation(tmp_path / "iter_0000010", full=True)
    assert found.state == "corrupt"
    assert "renamed or swapped" in str(found)


def test_a_name_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = complete(tmp_path, 5)
    entry = manifest.FileEntry(size=0, xxh3_128="0" * 32)
    for name in ("../../secret", "/secret", "a\0b"):
        evil = draft(5).model_dump() | {"files": {name: entry.model_dump()}}
        with pytest.raises(ValueError, match="is no name of a file in the checkpoint"):
            manifest.Manifest.model_validate(evil)
    text = (folder / manifest.MANIFEST).read_text().replace('"common.pt"', '"../common.pt"').encode()
    (folder / manifest.MANIFEST).write_bytes(text)
    (folder / manifest.MARKER).write_bytes(manifest._seal(text))
    assert manifest.verify(folder)[0].kind == "schema"


def test_shares_of_all_ranks_are_a_partition() -> None:
    names = [f"__{writer}.distcp" for writer in ("0_0", "0_1", "3_0", "11_0")]
    names += [".metadata", "common.pt", "mp_rank_00/model.pt", "mp_rank_01/model.pt"]
    for world in (1, 2, 4, 7):
        shares = [parts.share(names, rank, world) for rank in range(world)]
        assert sorted(name for share in shares for name in share) == sorted(names)
    assert "__3_0.distcp" in parts.share(names, 3, 4)


def test_memory_of_verification_is_bounded(tmp_path: Path) -> None:
    """In a fresh process, hashing 384 MB grows its peak by less than the threads' buffers and a margin."""
    with (tmp_path / "big").open("wb") as stream:
        stream.truncate(384 << 20)
    code = (
        "import resource, sys; from pathlib import Path; from megatron_stability.checkpoints import manifest\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); manifest.hash_files(Path(sys.argv[1]), ['big'], threads=4); print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < 40_000, done.stderr  # KiB; 16 MiB of buffers


# --- generations ------------------------------------------------------------------------------------------------------


def test_the_tracker_is_repaired_to_the_newest_good(tmp_path: Path) -> None:
    complete(tmp_path, 5)
    complete(tmp_path, 10)
    (tmp_path / "iter_0000010" / "common.pt").write_bytes(b"x")
    for text in (b"", b"10", b"garbage \xff", b"99"):
        (tmp_path / generations.TRACKER).write_bytes(text)
        assert generations.repair_tracker(tmp_path)[1] == 5
        assert generations.read_tracker(tmp_path) == 5
    (tmp_path / "iter_0000005" / manifest.MARKER).unlink()
    with pytest.raises(UsageError, match=r"common\.pt"):
        generations.repair_tracker(tmp_path)


def test_retention_never_takes_the_last_good_nor_a_suspect(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        complete(tmp_path, step)
    save(tmp_path, 6)  # killed while it was written
    (tmp_path / "iter_0000003" / manifest.MARKER).unlink()
    generations.mark_suspect(tmp_path / "iter_0000005", "loss was rising")
    generations.mark_suspect(tmp_path / "iter_0000002", "loss was rising")
    gone = generations.retire(tmp_path, keep=1)
    assert sorted(path.name for path in gone) == ["iter_0000001", "iter_0000003"]
    assert not list(tmp_path.glob(".*"))
    left = {each.step: each.state for each in generations.generations(tmp_path, full=True)}
    assert left == {6: "incomplete", 5: "suspect", 4: "complete", 2: "suspect"}
    good = generations.newest_good(tmp_path)
    assert good is not None
    assert good.step == 4
    with pytest.raises(ValueError, match="last known-good"):
        generations.retire(tmp_path, keep=0)


def test_retention_takes_nothing_that_it_cannot_judge(tmp_path: Path) -> None:
    """A checkpoint of stock Megatron, older than every one with a manifest; and one that lies on another disk."""
    root = tmp_path / "run"
    save(root, 1)
    elsewhere = complete(tmp_path / "archive", 2)
    (root / "iter_0000002").symlink_to(elsewhere)
    for step in (3, 4):
        complete(root, step)
    assert [path.name for path in generations.retire(root, keep=1)] == ["iter_0000003"]
    assert (root / "iter_0000001").is_dir()
    assert generations.generation(root / "iter_0000002", full=True).state == "complete"


def test_a_deletion_that_was_cut_short_is_ended_by_the_next(tmp_path: Path) -> None:
    for step in (1, 2):
        complete(tmp_path, step)
    left = tmp_path / ".stability-deleted-iter_0000001"
    left.mkdir()
    (left / "__0_0.distcp").write_text("half of it")
    assert [path.name for path in generations.retire(tmp_path, keep=1)] == ["iter_0000001"]
    assert not left.exists()


@pytest.mark.parametrize("name", ["iter_00000005", "iter_5", "iter_000000\u0665", "iter_0000005.bak"])
def test_a_folder_that_megatron_would_not_find_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    complete(tmp_path, 5).rename(tmp_path / name)
    assert generations.newest_good(tmp_path) is None


def test_what_was_set_aside_stays_suspect_without_its_reason(tmp_path: Path) -> None:
    folder = complete(tmp_path, 5)
    generations.mark_suspect(folder, "NaN")
    aside = asides.set_aside(folder)
    assert aside is not None
    (aside / manifest.SUSPECT).unlink()
    assert generations.newest_good(tmp_path) is None


def test_a_tracker_with_more_digits_than_python_reads_says_nothing(tmp_path: Path) -> None:
    (tmp_path / generations.TRACKER).write_text("9" * 5000)
    assert generations.read_tracker(tmp_path) is None


def test_a_suspect_folder_is_kept_when_its_step_is_saved_again(tmp_path: Path) -> None:
    folder = complete(tmp_path, 5)
    generations.mark_suspect(folder, "NaN")
    assert asides.set_aside(folder) == tmp_path / "iter_0000005.suspect-1"
    complete(tmp_path, 5)
    assert [(each.folder.name, each.state) for each in generations.generations(tmp_path)] == [
        ("iter_0000005.suspect-1", "suspect"),
        ("iter_0000005", "complete"),
    ]


def test_no_space_leaves_the_previous_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(tmp_path, 5)
    folder = save(tmp_path, 10)
    files = manifest.hash_files(folder, manifest.file_names(folder))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            manifest.write(folder, draft(10).model_copy(update={"files": files}))
    assert not list(folder.glob(".stability-*"))
    good = generations.newest_good(tmp_path)
    assert good is not None
    assert good.step == 5


LAST_SAVE = """
import sys, time; from concurrent.futures import ThreadPoolExecutor; from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from megatron_stability.checkpoints import manifest
folder = Path(sys.argv[1])
def complete():
    time.sleep(0.3)
    files = manifest.hash_files(folder, manifest.file_names(folder), sync=True)
    manifest.write(folder, manifest.Manifest(step=5, samples=5, tokens=5, files=files))
ThreadPoolExecutor(1).submit(complete)
"""


def test_a_save_is_completed_while_the_interpreter_ends(tmp_path: Path) -> None:
    """A pretraining script that knows nothing of us ends after its last save; no thread starts any more then."""
    folder, root = save(tmp_path, 5), str(Path(manifest.__file__).parents[2])
    subprocess.run([sys.executable, "-c", LAST_SAVE, str(folder), root], check=True, timeout=60)
    assert generations.generation(folder, full=True).state == "complete"


# --- death ------------------------------------------------------------------------------------------------------------

SAVER = """
import sys; from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from megatron_stability.checkpoints import generations, manifest
root, data = Path(sys.argv[1]), bytes(range(256)) * 2000
print("ready", flush=True)
for step in range(1, 100000):
    folder = generations.folder_of(root, step); folder.mkdir()
    for number in range(3):
        (folder / f"__{number}_0.distcp").write_bytes(data + bytes([step % 256]))
    files = manifest.hash_files(folder, manifest.file_names(folder), sync=True)
    manifest.write(folder, manifest.Manifest(step=step, samples=step, tokens=step, files=files))
    generations.write_tracker(root, step)
    generations.retire(root, 2)
"""


def _kill(process: subprocess.Popen[str], after_s: float) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)


@pytest.mark.parametrize("seed", range(10))
def test_killed_at_a_random_moment_around_the_marker(tmp_path: Path, seed: int) -> None:
    """A loop that saves and retires is killed; the tracker names a whole generation, or one is newer than it."""
    root = str(Path(manifest.__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), root], stdout=subprocess.PIPE, text=True)
    _kill(process, random.Random(seed).uniform(0.05, 0.6))
    good = generations.newest_good(tmp_path)
    tracker = generations.read_tracker(tmp_path)
    if tracker is None:  # killed in the first save
        assert [each.step for each in generations.generations(tmp_path)] in ([], [1])
        return
    assert good is not None
    assert isinstance(tracker, int)
    assert good.step in (tracker, tracker + 1)
    assert all(each.state in ("complete", "incomplete") for each in generations.generations(tmp_path, full=True))
