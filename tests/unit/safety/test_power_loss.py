"""After a loss of power at any moment: what was promised is there, and what is there is whole or says it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stability.checkpoints import generations, manifest
from megatron_stability.config import Record
from megatron_stability.files import write_atomically
from megatron_stability.ledger.bundle import Bundles, Context, bundles, read_bundle, read_tensors
from megatron_stability.ledger.entries import EndEntry, SaveEntry, read
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.records import Action, Decision, StepRecord
from tests.power_loss import Disk
from tests.unit.checkpoints.checkpoint_maker import complete, draft

INFO = RunInfo(mode="act", versions={}, layout={})


def finished(step: int, action: Action = Action.APPLY) -> tuple[StepRecord, Decision]:
    record = StepRecord(step=step, first_sample=8 * step - 8, samples=8, tokens=64.0, loss=2.0, grad_norm=1.0)
    return record, Decision(step=step, action=action, advised=action, reason="because")


def test_the_model_forgets_what_was_not_synced(tmp_path: Path) -> None:
    """The test of the tests: a file without its fsync, and a name without its folder's, are lost somewhere."""
    root = tmp_path / "root"
    root.mkdir()
    with Disk(root).watched() as disk:
        (root / "a").write_bytes(b"12")
        disk.promise("a")
    files = (tree / "a" for tree, _ in disk.trees(tmp_path / "t"))
    found = {file.read_bytes() if file.exists() else None for file in files}
    assert found == {None, b"", b"1", b"\0\0", b"12"}
    with Disk(root).watched() as disk:
        write_atomically(root / "a", b"34")
        disk.promise("a")
    kept = {((tree / "a").read_bytes(), promised) for tree, promised in disk.trees(tmp_path / "t")}
    assert kept == {(b"12", ()), (b"34", ()), (b"34", ("a",))}


# --- ledger -----------------------------------------------------------------------------------------------------------


def test_a_ledger_keeps_what_it_was_told_to_keep(tmp_path: Path) -> None:
    root = tmp_path / "save"
    root.mkdir()
    with Disk(root).watched() as disk:
        ledger = Ledger.open(root / "new" / "stability", resume_step=0, resume_sample=0, run_info=INFO)
        disk.promise("run 1")
        for step, action in ((1, Action.APPLY), (2, Action.SKIP), (3, Action.APPLY)):
            ledger.write(*finished(step, action))
        disk.promise("step 2")
        ledger.saving(3)
        disk.promise("save 3")
        ledger.rewind(2, 16, "loss")
        disk.promise("undo 2")
        ledger.write(*finished(3))
        ledger.ending(3, 18, "halt")
        disk.promise("end 3")
        ledger.close()
    seen = set()
    for tree, promised in disk.trees(tmp_path / "t"):
        folder = tree / "new" / "stability"
        seen.add(promised)
        if not promised and not (folder / "ledger.jsonl").exists():
            continue
        view = read(folder)  # raises for a damaged line
        there = {f"run {run.generation}" for run in view.runs} | {f"step {step.step}" for step in view.steps}
        there |= {f"undo {entry.from_step}" for entry in view.entries if entry.kind == "undo"}
        there |= {f"save {entry.step}" for entry in view.entries if isinstance(entry, SaveEntry)}
        there |= {f"end {entry.step}" for entry in view.entries if isinstance(entry, EndEntry)}
        assert set(promised) <= there
        Ledger.open(folder, resume_step=1, resume_sample=8, run_info=INFO).close()
    assert len(seen) == 6


def test_a_ledger_that_is_closed_has_every_step(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "l", resume_step=0, resume_sample=0, run_info=INFO).close()
    with Disk(tmp_path / "l").watched() as disk:
        with Ledger.open(tmp_path / "l", resume_step=0, resume_sample=0, run_info=INFO) as ledger:
            ledger.write(*finished(1))
        disk.promise("closed")
    steps = {len(read(tree).steps) for tree, promised in disk.trees(tmp_path / "t") if promised}
    assert steps == {1}


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_whatever_bears_a_bundles_name_is_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    root = tmp_path / "ledger"
    root.mkdir()
    sink = Bundles(
        root,
        limits=Record(max_bundles=2),
        context=Context(),
        generation=lambda: 1,
        tensors=lambda record: {"tokens": torch.arange(4)},
    )
    with Disk(root).watched() as disk:
        for step in (1, 2, 3, 4):
            sink.write(*finished(step, Action.SKIP))
            disk.promise(f"incident-{step}-g1")
    for tree, promised in disk.trees(tmp_path / "t"):
        there = bundles(tree)
        for path in there:
            assert read_bundle(path).incident.step == int(path.name.split("-")[1])
            assert read_tensors(path)["tokens"].tolist() == [0, 1, 2, 3]
        assert set(promised[-1:]) <= {path.name for path in there}
        Bundles(tree, limits=Record(), context=Context(), generation=lambda: 1)  # clears what was interrupted


# --- checkpoints ------------------------------------------------------------------------------------------------------


def small(root: Path, step: int, text: bytes = b"weights") -> Path:
    """A generation's files, not synced: two of them, one in a folder of its own."""
    folder = generations.folder_of(root, step)
    (folder / "mp_rank_00" / "deep").mkdir(parents=True, exist_ok=True)
    (folder / "common.pt").write_bytes(text + b" common")
    (folder / "mp_rank_00" / "deep" / "model.pt").write_bytes(text)
    return folder


def mark(folder: Path, step: int) -> None:
    files = manifest.hash_files(folder, manifest.file_names(folder), sync=True)
    manifest.write(folder, draft(step).model_copy(update={"files": files}))


def test_a_save_is_whole_or_without_its_marker_and_the_tracker_comes_after_it(tmp_path: Path) -> None:
    root = tmp_path / "save"
    mark(small(root, 5), 5)
    generations.write_tracker(root, 5)
    with Disk(root).watched() as disk:
        folder = small(root, 10)
        mark(folder, 10)
        disk.promise("complete")
        generations.write_tracker(root, 10)
        disk.promise("tracker")
    states = set()
    for tree, promised in disk.trees(tmp_path / "t"):
        found = {each.step: each.state for each in generations.generations(tree, full=True)}
        states.add(found.get(10))
        assert found[5] == "complete"
        assert found.get(10) in (None, "incomplete", "complete")
        assert not promised or found[10] == "complete"
        tracked = generations.read_tracker(tree)
        assert found[tracked] == "complete"
        assert "tracker" not in promised or tracked == 10
    assert states == {None, "incomplete", "complete"}


def test_a_folder_that_is_written_anew_is_never_taken_for_what_it_was(tmp_path: Path) -> None:
    root = tmp_path / "save"
    mark(small(root, 5, b"old"), 5)
    with Disk(root).watched() as disk:
        folder = generations.folder_of(root, 5)
        manifest.begin(folder)
        small(root, 5, b"new")
        mark(folder, 5)
        disk.promise("complete")
    for tree, promised in disk.trees(tmp_path / "t"):
        found = generations.generation(tree / folder.name, full=True)
        assert found.state in ("complete", "incomplete"), str(found)
        assert not promised or (tree / folder.name / "common.pt").read_bytes() == b"new common"


def test_a_manifest_that_is_written_again_is_not_trusted_half_way(tmp_path: Path) -> None:
    """`write` takes the marker away by itself: between the two files nothing fits."""
    root = tmp_path / "save"
    folder = small(root, 5)
    mark(folder, 5)
    with Disk(root).watched() as disk:
        manifest.write(folder, manifest.read(folder).model_copy(update={"samples": 1}))
    for tree, _ in disk.trees(tmp_path / "t"):
        assert generations.generation(tree / folder.name).state in ("complete", "incomplete")


def test_retention_leaves_whole_generations_only(tmp_path: Path) -> None:
    root = tmp_path / "save"
    for step in (1, 2, 4):
        mark(small(root, step), step)
    small(root, 3)
    with Disk(root).watched() as disk:
        assert [path.name for path in generations.retire(root, 1)] == ["iter_0000002", "iter_0000001", "iter_0000003"]
        disk.promise("gone")
    for tree, promised in disk.trees(tmp_path / "t"):
        found = {each.step: each.state for each in generations.generations(tree, full=True)}
        assert found[4] == "complete"
        assert {found.get(1), found.get(2)} <= {None, "complete"}
        assert not promised or set(found) == {4}
        generations.retire(tree, 1)
        assert {path.name for path in tree.iterdir()} <= {"iter_0000004", "iter_0000003"}


def test_evidence_stays_marked_and_set_aside(tmp_path: Path) -> None:
    root = tmp_path / "save"
    folder = complete(root, 5)
    with Disk(root).watched() as disk:
        generations.mark_suspect(folder, "NaN")
        disk.promise("marked")
        aside = generations.set_aside(folder)
        disk.promise("aside")
    assert aside is not None
    for tree, promised in disk.trees(tmp_path / "t"):
        (found,) = generations.generations(tree, full=True)
        assert (found.state == "suspect") or not promised
        assert ("aside" in promised) <= (found.folder.name == aside.name)
        if promised:
            assert json.loads((found.folder / manifest.SUSPECT).read_bytes()) == {"reason": "NaN"}
