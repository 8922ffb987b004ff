"""What somebody who can write a file, a name or a variable tries on us: one sentence each, nothing followed or run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from megatron_stability import cli, config
from megatron_stability.checkpoints import compare, drill, generations, manifest
from megatron_stability.errors import UsageError
from megatron_stability.ledger.bundle import Bundles, Context
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.report import pages
from tests.unit.checkpoints.checkpoint_maker import complete, draft, save

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


@contextmanager
def bounded(seconds: int = 20) -> Iterator[None]:
    """A hang is a failure of the test, not of the suite."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def seal(folder: Path) -> Path:
    """A manifest and marker over whatever the folder holds, as anybody who may write there can make them."""
    files = manifest.hash_files(folder, manifest.file_names(folder))
    manifest.write(folder, draft(int(folder.name[5:])).model_copy(update={"files": files}))
    return folder


def manifest_with(folder: Path, name: str, size: int) -> Path:
    """A valid manifest that names one more file."""
    entry = manifest.FileEntry(size=size, xxh3_128="0" * 32)
    whole = manifest.read(folder)
    manifest.write(folder, whole.model_copy(update={"files": {**whole.files, name: entry}}))
    return folder


class Program:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self._mark),)


# --- a program in `.metadata` -----------------------------------------------------------------------------------------


@pytest.fixture
def armed(tmp_path: Path) -> tuple[Path, Path]:
    """(root, mark): two sealed checkpoints, the newer with a `.metadata` that makes `mark` when it is unpickled."""
    root, mark = tmp_path / "save", tmp_path / "mark"
    complete(root, 5)
    folder = save(root, 10)
    (folder / ".metadata").write_bytes(pickle.dumps(Program(mark)))
    seal(folder)
    generations.write_tracker(root, 10)
    return root, mark


def test_verify_refuses_a_program_by_the_name_of_its_file(
    armed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root, mark = armed
    assert cli.main(["checkpoint", "verify", str(root)]) == 1
    out = capsys.readouterr().out
    assert "iter_0000010 is corrupt: .metadata: names posix.mknod" in " ".join(out.split())
    assert not mark.exists()


def test_a_resume_passes_a_program_over(armed: tuple[Path, Path]) -> None:
    root, mark = armed
    newest = generations.newest_good(root)
    assert newest is not None
    assert newest.step == 5
    assert not mark.exists()


def test_compare_and_drill_run_no_program(armed: tuple[Path, Path]) -> None:
    root, mark = armed
    folder = generations.folder_of(root, 10)
    with pytest.raises(UsageError, match=r"iter_0000010/\.metadata: names posix\.mknod"):
        compare.compare(folder, folder, bitwise=True)
    assert [each.step for each in drill.good_ones(root, 2)] == [5]
    assert not mark.exists()


def test_metadata_that_name_a_file_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = complete(tmp_path, 5)
    found = dcp.FileSystemReader(folder).read_metadata()
    for info in found.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    seal(folder)
    with pytest.raises(UsageError, match=r"\.metadata: .* is no file of the checkpoint"):
        compare.tensors(folder)


# --- files that are none ----------------------------------------------------------------------------------------------


def test_a_fifo_in_a_manifest_is_no_file(tmp_path: Path) -> None:
    folder = complete(tmp_path, 5)
    os.mkfifo(folder / "__0_9.distcp")
    manifest_with(folder, "__0_9.distcp", 0)
    with bounded():
        assert [str(each) for each in manifest.verify(folder)] == [
            "__0_9.distcp: can't be read (is not a regular file)"
        ]


def test_a_device_in_a_manifest_is_no_file(tmp_path: Path) -> None:
    folder = complete(tmp_path, 5)
    (folder / "zero").symlink_to("/dev/zero")
    manifest_with(folder, "zero", 0)
    with bounded():
        assert [str(each) for each in manifest.verify(folder)] == ["zero: can't be read (is not a regular file)"]


@pytest.mark.parametrize("name", [manifest.MANIFEST, manifest.MARKER, manifest.SUSPECT])
def test_a_fifo_in_the_place_of_our_own_file(tmp_path: Path, name: str) -> None:
    folder = complete(tmp_path, 5)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with bounded():
        found = generations.generation(folder)
    assert found.state == ("suspect" if name == manifest.SUSPECT else "corrupt")


def test_a_fifo_in_the_place_of_the_tracker(tmp_path: Path) -> None:
    complete(tmp_path, 5)
    os.mkfifo(tmp_path / generations.TRACKER)
    with bounded():
        assert generations.read_tracker(tmp_path) is None
        assert generations.repair_tracker(tmp_path)[1] == 5


def test_a_drill_does_not_wait_for_a_fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = complete(tmp_path / "save", 5)
    os.mkfifo(folder / "extra")
    monkeypatch.setattr(os, "link", _no_links)
    with bounded(), pytest.raises(OSError, match="is not a regular file"):
        drill.link_copy(folder, tmp_path / "copy")


def _no_links(*arguments: Any) -> None:
    raise OSError("this file system has none")


@pytest.mark.parametrize("name", ["ledger.jsonl", "state.json", "incident.json", "sketch.jsonl", "config.yaml"])
def test_readers_do_not_wait_for_a_fifo(tmp_path: Path, name: str) -> None:
    from megatron_stability.checkpoints import run_state
    from megatron_stability.ledger import bundle, entries, sketches

    path = tmp_path / name
    os.mkfifo(path)
    readers = {
        "ledger.jsonl": lambda: entries.read(tmp_path),
        "state.json": lambda: run_state.read(tmp_path),
        "incident.json": lambda: bundle.read_bundle(tmp_path),
        "sketch.jsonl": lambda: sketches.read(tmp_path),
        "config.yaml": lambda: config.load(path),
    }
    with bounded(), pytest.raises(UsageError, match=name.replace(".", r"\.")):
        readers[name]()


# --- links at names that can be guessed -------------------------------------------------------------------------------


def test_a_page_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f".r.html.{os.getpid()}", "r.html"):
        (tmp_path / name).symlink_to(victim)
    pages.write("--out", tmp_path / "r.html", "page")
    assert victim.read_text() == "precious"
    assert (tmp_path / "r.html").read_text() == "page"
    assert not (tmp_path / "r.html").is_symlink()


@pytest.mark.parametrize("name", [manifest.MANIFEST, manifest.MARKER])
def test_a_manifest_is_not_written_through_a_link(tmp_path: Path, name: str) -> None:
    folder, victim = save(tmp_path / "save", 5), tmp_path / "victim"
    victim.write_text("precious")
    (folder / f".stability-{name}.{os.getpid()}").symlink_to(victim)
    seal(folder)
    assert victim.read_text() == "precious"
    assert generations.generation(folder, full=True).state == "complete"


def test_a_link_at_a_bundles_hidden_name_is_neither_followed_nor_in_the_way(tmp_path: Path) -> None:
    from megatron_stability.records import Action
    from tests.unit.ledger.test_bundle import names, sink, write

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    folder = tmp_path / "ledger"
    folder.mkdir()
    (folder / ".incident-1-g1").symlink_to(elsewhere)
    writer = sink(folder)
    (folder / ".incident-4-g1").symlink_to(elsewhere)
    write(writer, 4, Action.SKIP)
    assert names(folder) == ["incident-4-g1"]
    assert [path.name for path in elsewhere.iterdir()] == ["precious"]


@pytest.mark.parametrize("what", ["link", "dangling link", "file"])
def test_what_bears_a_deleted_checkpoints_name_does_not_stop_retention(tmp_path: Path, what: str) -> None:
    root, victim = tmp_path / "save", tmp_path / "victim"
    for step in (5, 10, 15):
        complete(root, step)
    victim.mkdir()
    (victim / "precious").write_text("precious")
    name = root / ".stability-deleted-iter_0000005"
    if what == "file":
        name.write_text("x")
    else:
        name.symlink_to(victim if what == "link" else tmp_path / "nowhere")
    assert [path.name for path in generations.retire(root, 1)] == ["iter_0000010", "iter_0000005"]
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000015"]
    assert (victim / "precious").read_text() == "precious"


def test_tables_beside_the_ledger_are_not_written_through_a_link(tmp_path: Path) -> None:
    from megatron_stability.observe.fp8.samples import StageSamples

    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "fp8.stage0.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        StageSamples((), (), ()).write(tmp_path, 1, 0, [], {})
    assert victim.read_text() == "precious"


# --- texts that are programs to somebody ------------------------------------------------------------------------------


def test_endless_brackets_are_a_reason_that_can_not_be_read(tmp_path: Path) -> None:
    folder = complete(tmp_path, 5)
    (folder / manifest.SUSPECT).write_text("[" * 200_000)
    assert generations.generation(folder).reason == "marked so, without a reason that can be read"


def test_endless_brackets_in_a_table_are_a_sentence(tmp_path: Path) -> None:
    from megatron_stability import doctor
    from megatron_stability.ledger import sketches

    (tmp_path / "sketch.jsonl").write_text("[" * 200_000 + "\n")
    with pytest.raises(UsageError, match=r"sketch\.jsonl, line 1"):
        sketches.read(tmp_path)
    (tmp_path / "fp8.stage0.jsonl").write_text("[" * 200_000 + "\n")
    with pytest.raises(UsageError, match=r"fp8\.stage0\.jsonl: its last line is no table"):
        doctor._recipe(tmp_path / "fp8.stage0.jsonl")


def test_a_reason_gives_the_terminal_no_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = complete(tmp_path, 5)
    assert cli.main(["checkpoint", "suspect", str(folder), "--reason", f"rose{ESCAPE}"]) == 0
    cli.main(["checkpoint", "list", str(tmp_path)])
    cli.main(["checkpoint", "verify", str(folder)])
    cli.main(["checkpoint", "list", str(tmp_path / f"no{ESCAPE}")])
    shown = "".join(capsys.readouterr())
    assert "rose\\x1b]0;owned\\x07" in "".join(shown.split())
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_a_files_name_gives_the_terminal_no_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = manifest_with(complete(tmp_path, 5), f"x{ESCAPE}", 3)
    assert cli.main(["checkpoint", "verify", str(folder)]) == 1
    assert not {"\x1b", "\x07", "\x9b"} & set("".join(capsys.readouterr()))


def test_reasons_of_ledger_and_state_give_the_terminal_no_orders(tmp_path: Path) -> None:
    from megatron_stability.checkpoints import run_state
    from megatron_stability.ledger import entries

    with Ledger.open(
        tmp_path, resume_step=0, resume_sample=0, run_info=RunInfo(mode="act", versions={}, layout={})
    ) as l:
        l.ending(1, 3, f"left{ESCAPE}")
    (tmp_path / "state.json").write_text(json.dumps({"status": "halt", "step": 3, "reason": f"halt{ESCAPE}"}))
    state = run_state.read(tmp_path)
    assert state is not None
    for reason in (entries.read(tmp_path).ends[0].reason, state.reason):
        assert reason.endswith("\\x1b]0;owned\\x07\\x1b[2J\\x9b31m")


def bomb(depth: int = 9, width: int = 9) -> str:
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    return "\n".join(lines) + f"\nmode: *a{depth - 1}\n"


def test_an_alias_bomb_is_a_short_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(bomb(depth=7))  # 9 deep takes 24 s and 151 MB where nothing is bounded
    with bounded(5), pytest.raises(UsageError, match=r"c\.yaml, line .*: .*its aliases stand for more than") as found:
        config.load(path)
    assert len(str(found.value)) < 500


@pytest.mark.parametrize("text", ["mode: &a [*a]\n", "&a ? *a\n: x\n", "a: &a {b: *a}\n", "<<: &a {<<: *a}\n"])
def test_an_alias_within_itself_is_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with bounded(), pytest.raises(UsageError, match=r"c\.yaml"):
        config.load(path)


@pytest.mark.parametrize("value", ["x" * 200_000, "[" + "x, " * 60_000 + "]", "0x" + "f" * 100_000])
def test_an_error_repeats_little_of_a_value(tmp_path: Path, value: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"detect:\n  loss_spike:\n    k: {value}\n")
    with bounded(), pytest.raises(UsageError, match=r"detect\.loss_spike\.k") as found:
        config.load(path)
    assert len(str(found.value)) < 1000


def test_a_huge_yaml_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with path.open("wb") as stream:
        stream.truncate(1 << 34)
    with bounded(), pytest.raises(UsageError, match=r"c\.yaml: cannot be read \(has 17,179,869,184 bytes"):
        config.load(path)


def test_what_a_rank_said_is_searched_once() -> None:
    from megatron_stability.megatron.start.ranks import without_usage

    said = "usage: x\n" * 200_000
    started = time.process_time()
    with bounded():
        assert without_usage(said) == said
    assert time.process_time() - started < 10  # it took hours
    assert without_usage("a\nusage: p\n  --x\np: error: no\nb\n") == "a\np: error: no\nb\n"
    assert without_usage("usage: p\n  --x: error: y\n") == "usage: p\n  --x: error: y\n"


def test_bundles_are_made_where_shutil_is_not_asked_to_follow(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    (ledger / ".removed-1-g1").symlink_to(victim)
    Bundles(ledger, limits=config.Record(), context=Context(), generation=lambda: 1)
    assert (victim / "precious").exists()
    assert not (ledger / ".removed-1-g1").is_symlink()
    shutil.rmtree(ledger)
