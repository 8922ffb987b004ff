"""`checkpoint` in the terminal and as JSON, its exit codes, and the drills' own honesty."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.checkpoints import command, drill, generations, manifest
from megatron_stability.errors import UsageError
from tests.unit.checkpoints.checkpoint_maker import complete, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    complete(tmp_path, 5)
    complete(tmp_path, 10)
    generations.write_tracker(tmp_path, 10)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict]:
    code = command.run([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_list_and_verify_a_good_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("list", "verify"):
        code, document = run(capsys, verb, root)
        assert code == 0
        assert document["newest"] == document["tracker"] == 10
        assert [each["state"] for each in document["checkpoints"]] == ["complete", "complete"]
    assert command.run(["list", str(root)]) == 0
    assert "iter_0000010 <- tracker" in capsys.readouterr().out


def test_verify_names_the_bad_file_and_list_reads_no_bytes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "iter_0000010" / "common.pt"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    assert run(capsys, "list", root)[0] == 0
    code, document = run(capsys, "verify", root)
    assert code == 1
    assert document["checkpoints"][0]["problems"][0]["file"] == "common.pt"
    assert run(capsys, "verify", root / "iter_0000005")[0] == 0
    assert run(capsys, "verify", root / "iter_0000010")[0] == 1


def test_a_wrong_tracker_is_a_finding_and_repaired(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / generations.TRACKER).write_text("garbage")
    assert run(capsys, "list", root)[0] == 1
    code, document = run(capsys, "repair-tracker", root)
    assert (code, document) == (0, {"before": "garbage", "now": 10, "changed": True})
    assert run(capsys, "repair-tracker", root)[0] == 0


def test_suspect_says_what_a_resume_takes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["suspect", str(root / "iter_0000010"), "--reason", "loss rose"]) == 0
    assert "suspect: loss rose; a resume takes step 5 now" in " ".join(capsys.readouterr().out.split())
    assert command.run(["suspect", str(root / "iter_0000005"), "--reason", "it too"]) == 0
    assert "no other is complete: a resume is refused" in " ".join(capsys.readouterr().out.split())


def test_rows_are_whole_in_a_pipe(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    why = "the loss rose " * 20
    command.run(["suspect", str(root / "iter_0000010"), "--reason", why])
    command.run(["list", str(root)])
    assert why.strip() in capsys.readouterr().out


def test_suspect_is_passed_over(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "suspect", root / "iter_0000010", "--reason", "loss rose")[0] == 0
    code, document = run(capsys, "list", root)
    assert code == 1
    assert document["newest"] == 5
    assert document["checkpoints"][0]["reason"] == "loss rose"


def test_every_drill_passes_and_the_checkpoints_are_untouched(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    code, document = run(capsys, "drill", root)
    assert code == 0, document
    assert {each["drill"] for each in document["drills"]} == {"intact", "bad tracker", *drill.DAMAGES}
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_a_drill_can_fail(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drill.DAMAGES, "corrupt shard", lambda folder: "common.pt")  # damages nothing
    code, document = run(capsys, "drill", root)
    assert code == 1
    assert [each["drill"] for each in document["drills"] if not each["passed"]] == ["corrupt shard"]


def test_a_run_that_ends_badly_fails_its_drill(root: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    outcome = drill.resume_drill(root, work, ["no-such-command"], nproc=None, timeout_s=60)
    assert not outcome.passed
    assert outcome.got == "exit code 2"


@pytest.mark.parametrize("seconds", ["nan", "0", "-1"])
def test_a_drill_waits_for_some_time(root: Path, seconds: str) -> None:
    with pytest.raises(UsageError, match=f"--timeout {seconds}: must be more than 0 seconds"):
        command.run(["drill", str(root), "--timeout", seconds])


def test_a_resumed_run_is_asked_for_as_this_tool_starts_it(root: Path) -> None:
    with pytest.raises(UsageError, match=r"torchrun: after `--` comes .* pretrain or run"):
        command.run(["drill", str(root), "--", "torchrun", "pretrain_gpt.py"])


@pytest.mark.parametrize(
    "argv",
    [
        ["list", "nowhere"],
        ["list", "a" * 300],
        ["verify", "{empty}"],
        ["drill", "{empty}", "--nproc", "4"],
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        command.run([word.format(empty=tmp_path / "empty") for word in argv])


def test_what_a_run_deletes_meanwhile_is_no_finding(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = generations.generation

    def late(folder: Path, **how: Any) -> generations.Generation:
        if how.get("full") and folder.name == "iter_0000005":
            shutil.rmtree(folder)
        return look(folder, **how)

    with monkeypatch.context() as patch:
        patch.setattr(generations, "generation", late)
        code, document = run(capsys, "verify", root)
    assert (code, [each["step"] for each in document["checkpoints"]]) == (0, [10])
    monkeypatch.setattr(drill, "link_copy", lambda source, target: target.mkdir(parents=True))
    with pytest.raises(UsageError, match="was deleted while it was copied"):
        command.run(["drill", str(root)])


def test_a_reason_may_hold_brackets(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.run(["suspect", str(root / "iter_0000010"), "--reason", "[/x] [rank 3]"])
    assert command.run(["verify", str(root / "iter_0000010")]) == 0
    assert "[/x] [rank 3]" in capsys.readouterr().out


def test_one_checkpoint_from_within_it_and_a_run_that_is_called_like_one(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root / "iter_0000010")
    assert [each["step"] for each in run(capsys, "verify", ".")[1]["checkpoints"]] == [10]
    monkeypatch.chdir(root.parent)
    root.rename("iter_tests")
    assert run(capsys, "list", "iter_tests")[1]["newest"] == 10


def test_a_file_that_cannot_be_written_is_one_sentence(root: Path) -> None:
    (root / generations.TRACKER).unlink()
    (root / generations.TRACKER).mkdir()
    with pytest.raises(UsageError, match=f"{generations.TRACKER}: Is a directory"):
        command.run(["repair-tracker", str(root)])
    (root / "iter_0000005" / manifest.SUSPECT).mkdir()
    assert command.run(["list", str(root)]) == 1
    with pytest.raises(UsageError, match=f"{manifest.SUSPECT}: Is a directory"):
        command.run(["suspect", str(root / "iter_0000005"), "--reason", "x"])


def test_an_unfinished_save_is_a_finding(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(root, 15)
    code, document = run(capsys, "list", root)
    assert code == 1
    assert document["checkpoints"][0]["state"] == "incomplete"
    assert document["newest"] == 10
