"""Which checkpoint a run resumes from, judged by two ranks together; no training."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.checkpoints import generations, manifest
from megatron_stability.checkpoints.compare import text
from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.data.index import HEAD
from megatron_stability.errors import UsageError
from tests.dist.checkpoint.files_read import Read
from tests.dist.pool import Context, Pool
from tests.unit.data.maker import make as make_data

pytestmark = pytest.mark.megatron
TRAINING = {"lr": 0.001, "seed": 1, "data_path": ["a"]}


def make(root: Path, step: int, hashes: dict[str, str] | None = None) -> Path:
    folder = generations.folder_of(root, step)
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", "common.pt", ".metadata"):
        data = f"{step} {name}".encode() * 100
        (folder / name).write_bytes(pickle.dumps(data.decode()) if name == ".metadata" else data)
    files = manifest.hash_files(folder, manifest.file_names(folder))
    manifest.write(
        folder,
        Manifest(step=step, samples=step, tokens=step, files=files, training=TRAINING, hashes=hashes or {}),
    )
    return folder


def choose(context: Context, root: str, settings: dict[str, Any], args: dict[str, Any]) -> Any:
    from megatron_stability.config import Checkpoint
    from megatron_stability.megatron.checkpoint.resume import choose as resume

    known = {"save": root, "ckpt_step": None} | args
    try:
        chosen = resume.choose(Path(root), Namespace(**known), Checkpoint(**settings))
    except UsageError as error:
        return str(error)
    if chosen is None:
        return None
    resume.from_rank_0(lambda: resume.accept(Path(root), chosen))
    return chosen.manifest.step


def ask(pool: Pool, root: Path, settings: dict[str, Any] | None = None, **args: Any) -> Any:
    """What both ranks say; it must be the same."""
    first, second = pool.run(choose, str(root), settings or {}, args, world=2, timeout=60)
    assert first == second
    return first


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", manifest.MANIFEST])
def test_the_next_older_is_used_where_a_file_of_either_rank_is_bad(
    patched_ranks: Pool, tmp_path: Path, file: str
) -> None:
    """Megatron-LM#4378: a checkpoint is verified before it is believed."""
    make(tmp_path, 5)
    flip(make(tmp_path, 10) / file)
    generations.write_tracker(tmp_path, 10)
    assert ask(patched_ranks, tmp_path) == 5
    assert generations.read_tracker(tmp_path) == 10  # it moves with the first step only
    assert file in ask(patched_ranks, tmp_path, {"strict": True})


def test_a_tracker_that_says_nothing_is_mended_and_a_suspect_passed_over(patched_ranks: Pool, tmp_path: Path) -> None:
    make(tmp_path, 5)
    generations.mark_suspect(make(tmp_path, 10), "NaN")
    (tmp_path / generations.TRACKER).write_text("garbage")
    assert ask(patched_ranks, tmp_path) == 5
    assert generations.read_tracker(tmp_path) == 5


def test_a_step_that_is_asked_for_is_not_replaced_by_another(patched_ranks: Pool, tmp_path: Path) -> None:
    make(tmp_path, 5)
    flip(make(tmp_path, 10) / "common.pt")
    generations.write_tracker(tmp_path, 5)
    assert ask(patched_ranks, tmp_path, ckpt_step=5) == 5
    assert "common.pt" in ask(patched_ranks, tmp_path, ckpt_step=10)
    assert "no checkpoint there" in ask(patched_ranks, tmp_path, ckpt_step=7)
    generations.write_tracker(tmp_path, 99)
    shutil.rmtree(tmp_path / "iter_0000005")
    said = ask(patched_ranks, tmp_path)
    assert "latest_checkpointed_iteration.txt names step 99, and there is no iter_0000099" in said


def test_missing_or_empty_stops_unless_a_fresh_start_is_allowed(patched_ranks: Pool, tmp_path: Path) -> None:
    """Megatron-Bridge#1649, verl#7952: a path without a checkpoint must not mean random weights."""
    for root in (tmp_path / "missing", tmp_path):
        assert "--stability-checkpoint-allow-fresh-start" in ask(patched_ranks, root, save=str(tmp_path / "other"))
        assert ask(patched_ranks, root, {"allow_fresh_start": True}) is None
    (tmp_path / "running").mkdir()
    assert f"near it: {tmp_path / 'running'})" in ask(patched_ranks, tmp_path / "runnning", save=None)
    (make(tmp_path, 5) / manifest.MARKER).unlink()  # killed in its first save
    assert "is incomplete" in ask(patched_ranks, tmp_path)
    assert ask(patched_ranks, tmp_path, {"allow_fresh_start": True}) is None
    generations.write_tracker(tmp_path, 5)  # but where a tracker points at it, Megatron would load it
    assert "is incomplete" in ask(patched_ranks, tmp_path, {"allow_fresh_start": True})
    assert ask(patched_ranks, tmp_path, {"allow_unverified": True}) is None
    shutil.rmtree(tmp_path / "iter_0000005")
    flip(make(tmp_path, 5) / "common.pt")
    assert "common.pt" in ask(patched_ranks, tmp_path, {"allow_unverified": True, "allow_fresh_start": True})


def test_a_folder_to_load_from_and_save_to_may_be_new_and_not_one_that_was_used(
    patched_ranks: Pool, tmp_path: Path
) -> None:
    root = tmp_path / "new"
    assert ask(patched_ranks, root) is None
    (root / "tensorboard").mkdir(parents=True)  # Megatron's writer, before the load
    assert ask(patched_ranks, root) is None
    assert "--stability-checkpoint-allow-fresh-start" in ask(patched_ranks, root, finetune=True)
    (root / "stability").mkdir()
    (root / "stability" / "ledger.jsonl").touch()
    assert "--stability-checkpoint-allow-fresh-start" in ask(patched_ranks, root)


def test_a_program_in_the_metadata_is_passed_over_and_without_a_manifest_refused(
    patched_ranks: Pool, tmp_path: Path
) -> None:
    """Megatron unpickles `.metadata` on every rank, whoever wrote it and sealed it."""
    make(tmp_path, 5)
    folder = make(tmp_path, 10)
    (folder / ".metadata").write_bytes(pickle.dumps(os.system))
    names = manifest.hash_files(folder, manifest.file_names(folder))
    manifest.write(folder, manifest.read(make(tmp_path / "other", 10)).model_copy(update={"files": names}))
    assert ask(patched_ranks, tmp_path) == 5
    (folder / manifest.MARKER).unlink()
    (tmp_path / "iter_0000005" / manifest.MARKER).unlink()
    generations.write_tracker(tmp_path, 10)
    answer = ask(patched_ranks, tmp_path, {"allow_unverified": True})
    assert "iter_0000010/.metadata: names posix.system" in answer
    generations.write_tracker(tmp_path, 5)
    assert ask(patched_ranks, tmp_path, {"allow_unverified": True}) is None
    assert "names posix.system" in ask(patched_ranks, tmp_path, {"allow_unverified": True}, ckpt_step=10)


def judge(context: Context) -> dict[str, Any]:
    """Post-load checks on one linear layer, healthy and hurt; and generators there and back."""
    import numpy as np
    import torch

    context.megatron()
    from megatron_stability.megatron.access import rank_state

    torch.manual_seed(0)
    model = [torch.nn.Linear(8, 8)]
    prints = rank_state.measure(model, None)
    packed = rank_state.packed(prints, model)
    saved = rank_state.unpacked(packed, model)
    other = rank_state.unpacked(packed.replace(b'"cpu"', b'"cuda"'), model)
    assert other == {name: (None, amax) for name, (_, amax) in saved.items()}
    said = {"healthy": rank_state.complaint(prints, saved), "replicas": rank_state.check_replicas(model, prints)}
    state = rank_state.generators()
    torch.rand(3)
    torch.cuda.manual_seed(5)
    random.random()
    np.random.rand()
    moved = rank_state.generators()
    rank_state.restore_generators(state)
    said["generators"] = text(rank_state.generators()) == text(state) != text(moved)
    with torch.no_grad():
        weight = model[0].weight.view(-1)
        if context.rank == 1:
            weight[3] += 1e-6
    hurt = rank_state.measure(model, None)
    said["one bit"], said["other replica"] = rank_state.complaint(hurt, saved), rank_state.check_replicas(model, hurt)
    with torch.no_grad():
        weight[0] = 100.0
        said["range"] = rank_state.complaint(rank_state.measure(model, None), saved)
        weight[0] = float("nan")
        said["nan"] = rank_state.complaint(rank_state.measure(model, None), None)
    return said


def test_loaded_tensors_are_checked_against_what_was_saved_and_against_replicas(patched_ranks: Pool) -> None:
    """Megatron-LM#1842, #1570: fingerprint and range of each tensor; Megatron-LM#6920: equal over replicas."""
    first, second = patched_ranks.run(judge, world=2)
    assert first["healthy"] is first["replicas"] is first["one bit"] is None
    assert first["generators"]
    assert second["generators"]
    assert second["one bit"] == "model0.weight differs in its bits from what was saved"
    assert first["other replica"] == second["other replica"]
    assert "weights of rank 1 differ from those of rank 0" in first["other replica"]
    assert "100" in first["range"]
    assert "NaN or Inf" in first["nan"]


def partial_load(context: Context) -> list[str]:
    """What is said of a strict load that failed, refused and allowed; and the exit code of a failed load."""
    from megatron_stability import config
    from megatron_stability.megatron import seams
    from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints

    said = []
    for allowed in (False, True):
        tree = config.StabilityConfig(checkpoint=config.Checkpoint(allow_partial_load=allowed))
        try:
            Checkpoints(tree, Namespace(), Read()).strict_load_failed(
                RuntimeError("Missing key(s): layers.0\n  weight")
            )
            said.append("goes on")
        except UsageError as error:
            said.append(str(error))
    assert seams.failed_load_code() is None  # no runtime: as stock
    return said


def test_a_failed_strict_load_is_not_repeated_leniently(patched_ranks: Pool) -> None:
    (refused, allowed), *_ = patched_ranks.run(partial_load, world=1)
    assert "Missing key(s): layers.0 weight" in refused
    assert "--stability-checkpoint-allow-partial-load" in refused
    assert allowed == "goes on"


def save_again(context: Context, root: str) -> list[str]:
    """What is left of a killed save of step 5 when the step is about to be saved again."""
    from megatron_stability import config
    from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints

    checkpoints = Checkpoints(config.StabilityConfig(), Namespace(save=root, iteration=0, ckpt_format="torch"), Read())
    checkpoints.save_begins(root, 5)
    return sorted(path.name for path in generations.folder_of(Path(root), 5).iterdir())


def test_what_a_killed_save_left_is_not_taken_for_the_next_ones(patched_ranks: Pool, tmp_path: Path) -> None:
    folder = make(tmp_path, 5)
    (folder / manifest.MARKER).unlink()
    stale = {".stability-share-0.json", ".stability-share-11.json", "__0_stability.json", "__11_stability.json"}
    for name in stale:
        (folder / name).write_text("{}")
    before = {path.name for path in folder.iterdir()}
    (left,) = patched_ranks.run(save_again, str(tmp_path), world=1)
    assert before - set(left) == stale


def save_twice(context: Context, root: str) -> list[str]:
    """In which order fingerprints are begun and waited for where two saves have no applied step between them."""
    from megatron_stability import config
    from megatron_stability.megatron.access import rank_state
    from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints

    seen: list[str] = []

    def begin(model: list[Any], optimizer: Any) -> Any:
        name = f"of save {len(seen) // 2 + 1}"
        seen.append(f"begun {name}")
        return lambda: seen.append(f"waited {name}") or {}

    args = Namespace(save=root, world_size=1, consumed_train_samples=8, seq_length=4)
    checkpoints = Checkpoints(config.StabilityConfig(), args, Read())
    checkpoints._model, checkpoints._complete = [object()], lambda *_: None  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_state, "begin_measure", begin)
        patch.setattr(rank_state, "replicated", lambda model: [])
        for step in (1, 2):
            checkpoints.saved(root, step, None)
    checkpoints.weights_will_change()
    return seen


def test_no_fingerprint_is_still_taken_when_an_update_follows_two_saves(patched_ranks: Pool, tmp_path: Path) -> None:
    (seen,) = patched_ranks.run(save_twice, str(tmp_path), world=1)
    assert seen == ["begun of save 1", "waited of save 1", "begun of save 2", "waited of save 2"]


def one_breaks(context: Context, root: str) -> str:
    """Rank 1's thread meets what nobody thought of."""
    from megatron_stability import config
    from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints

    def out_of_memory(*_: Any) -> dict[str, Any]:
        raise MemoryError("no memory for a buffer")

    generations.folder_of(Path(root), 5).mkdir(exist_ok=True)
    args = Namespace(save=root, world_size=2, consumed_train_samples=8, seq_length=4, ckpt_format="torch_dist")
    checkpoints = Checkpoints(config.StabilityConfig(), args, Read())
    if context.rank == 1:
        checkpoints.completion.hash_share = out_of_memory  # type: ignore[method-assign]
    checkpoints.saved(root, 5, None)
    try:
        checkpoints.close()
    except MemoryError as error:
        return str(error)
    return "went on"


def test_a_rank_whose_part_breaks_is_not_waited_for(patched_ranks: Pool, tmp_path: Path) -> None:
    said = patched_ranks.run(one_breaks, str(tmp_path), world=2, timeout=60)
    assert said == ["went on", "no memory for a buffer"]
    assert generations.generations(tmp_path)[0].state == "incomplete"
    assert generations.read_tracker(tmp_path) is None


def read_files(context: Context, args: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """What rank 0 reads of a run's files, and what every rank is told of it."""
    from megatron_stability import config
    from megatron_stability.megatron.checkpoint.run_files import RunFiles

    files = RunFiles(config.StabilityConfig(), Namespace(rank=context.rank, **args))
    said = None
    try:
        files.judge(vocab_size)
    except UsageError as error:
        said = str(error)
    return {"said": said} | (files.known() if context.rank == 0 and said is None else {})


def test_what_the_run_reads_is_read_by_rank_0_and_judged_for_all(patched_ranks: Pool, tmp_path: Path) -> None:
    words = ["0.5", make_data(tmp_path / "a", [[1, 2], [3]]), "0.5", make_data(tmp_path / "b", [[4]] * 9)]
    (tmp_path / "list").write_text(" ".join(words))
    (tmp_path / "text.model").write_text("a tokenizer")
    args = {"data_args_path": str(tmp_path / "list"), "tokenizer_model": str(tmp_path / "text.model")}

    def look(split: str = "1,0,0", vocab_size: int = 5) -> list[dict[str, Any]]:
        return patched_ranks.run(read_files, args | {"split": split}, vocab_size, world=2, timeout=60)

    first, other = look()
    assert other == {"said": None}
    assert [(each.weight, each.prefix) for each in first["data"]] == [(0.5, words[1]), (0.5, words[3])]
    make_data(tmp_path / "b", [[4]] * 8 + [[3]])
    flip(tmp_path / "text.model")
    second, _ = look()
    assert {name for name, was in first["hashes"].items() if was != second["hashes"][name]} == {"tokenizer"}
    assert [was == now for was, now in zip(first["data"], second["data"], strict=True)] == [True, False]
    for said, answers in (
        (f"{words[1]} has 2 documents", look("1,1,1")),
        (f"{words[3]}.bin holds token id 4, and the vocabulary has 4 (0 to 3)", look(vocab_size=4)),
    ):
        assert len({answer["said"] for answer in answers}) == 1
        assert said in answers[0]["said"]
    index = bytearray((tmp_path / "b.idx").read_bytes())
    index[HEAD] += 1  # the first document's length, which only the sum of all shows
    (tmp_path / "b.idx").write_bytes(index)
    assert [f"--data-args-path {words[3]}" in answer["said"] for answer in look()] == [True, True]


def find_id(context: Context, args: dict[str, Any]) -> str:
    from megatron_stability import config
    from megatron_stability.megatron.checkpoint.run_files import RunFiles

    with pytest.raises(UsageError) as found:
        RunFiles(config.StabilityConfig(), Namespace(rank=context.rank, **args)).refuse_id(8, 5)
    return str(found.value)


def test_the_file_of_an_id_is_found_by_the_rank_that_has_its_share(patched_ranks: Pool, tmp_path: Path) -> None:
    words = [make_data(tmp_path / name, [[number]]) for name, number in (("a", 1), ("b", 8), ("c", 2))]
    first, second = patched_ranks.run(find_id, {"data_path": words}, world=2, timeout=60)
    assert first == second
    assert first.startswith(f"{words[1]}.bin holds token id 8, and the vocabulary has 5")
    (lost,) = patched_ranks.run(find_id, {"data_path": words[::2]}, world=1, timeout=60)
    assert lost.startswith("a batch holds token id 8"), "not in any file that could be read in time"
