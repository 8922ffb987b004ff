"""Replays of incidents with a training command that only writes ledgers: what is run, and what it is taken to mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_stability import cli
from megatron_stability.explain import branches
from tests.unit.checkpoints.checkpoint_maker import complete
from tests.unit.explain import fake_training
from tests.unit.explain.fake_training import BAD

WORDS = (sys.executable, "-m", "tests.unit.explain.fake_training")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a run that had its incident at step `BAD`, with checkpoints at 40 and 52, and replays it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    saves = tmp_path / "saves"
    for step in (40, 52):
        complete(saves, step)

    def replayed(wrong: str, *flags: str, seen: str = "") -> tuple[int, dict[str, Any]]:
        fake_training.write(saves / "stability", fake_training.run(1, 60, seen or wrong))
        command = [*WORDS, "--wrong", wrong, "--save", str(saves), "--save-interval=5"]
        code = cli.main(["replay", str(saves), str(BAD), "--out", "out", *flags, "--", *command])
        result = Path("out/replay.json")
        return code, json.loads(result.read_text()) if result.exists() else {}

    return replayed


def _rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["branches"]}


def test_a_bad_batch_comes_again_to_the_bit_and_goes_with_its_samples(run: Any, capsys: Any, tmp_path: Path) -> None:
    before = sorted(path.name for path in (tmp_path / "saves").glob("iter_*/*"))
    code, result = run("batch", "--branches", "skip,control,lr")
    rows = _rows(result)
    assert code == 0
    assert (result["from"], result["until"]) == (52, BAD + 3)
    assert list(rows) == ["replay", "skip", "control", "lr"]
    assert rows["replay"]["present"] and rows["replay"]["equal"]  # noqa: PT018
    assert [rows[name]["present"] for name in ("skip", "control", "lr")] == [False, False, True]
    assert "replay: reproducible to the bit" in capsys.readouterr().err
    assert Path("out/replay.html").exists()
    assert sorted(path.name for path in (tmp_path / "saves").glob("iter_*/*")) == before
    assert cli.main(["triage", "saves", "--replay", "out", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["hypotheses"][0]["cause"] == "bad_batch"
    assert found["facts"]["skip_clears"]["holds"] is True


def test_a_rate_that_is_too_high_is_cleared_by_a_lower_one_alone(run: Any, capsys: Any) -> None:
    _, result = run("rate", "--branches", "skip,control,lr")
    assert {name: row["present"] for name, row in _rows(result).items()} == {
        "replay": True, "skip": False, "control": True, "lr": False,
    }  # fmt: skip
    capsys.readouterr()
    cli.main(["triage", "saves", "--replay", "out", "--json"])
    assert json.loads(capsys.readouterr().out)["hypotheses"][0]["cause"] == "learning_rate"


def test_what_does_not_come_again_is_called_not_reproducible_and_the_exit_code_says_so(run: Any, capsys: Any) -> None:
    code, result = run("nothing", "--branches", "replay", seen="hardware:0.25")
    row = _rows(result)["replay"]
    assert code == 1
    assert (row["present"], row["equal"], row["departs_at"]) == (False, False, BAD)
    assert "not reproducible" in row["meaning"]
    capsys.readouterr()
    cli.main(["triage", "saves", "--replay", "out", "--json"])
    assert json.loads(capsys.readouterr().out)["hypotheses"][0]["cause"] == "rank"


def test_what_comes_again_otherwise_is_statistical_only(run: Any) -> None:
    code, result = run("hardware", "--branches", "replay", seen="hardware:7.5")
    assert code == 1
    assert "statistical only" in _rows(result)["replay"]["meaning"]


def test_a_branch_that_dies_says_where_its_log_is_and_the_others_go_on(run: Any) -> None:
    code, result = run("crash", "--branches", "replay,skip", seen="batch")
    assert code == 1
    assert all("exit code 1" in row["failure"] and "no such device" in row["failure"] for row in result["branches"])
    assert len(result["branches"]) == 2


def test_what_was_run_is_not_run_again_and_a_new_branch_joins_it(run: Any) -> None:
    run("batch", "--branches", "replay")
    log = Path("out/replay/log.txt")
    log.write_text("kept")
    _, result = run("batch", "--branches", "skip")
    assert log.read_text() == "kept"
    assert list(_rows(result)) == ["replay", "skip"]


def test_the_gate_holds_where_the_steps_after_are_as_before_and_not_without_them(run: Any, capsys: Any) -> None:
    code, result = run("batch", "--branches", "skip", "--gate", "6")
    assert (code, result["gate"], result["until"]) == (0, True, BAD + 6)
    assert "gate of branch skip: holds" in capsys.readouterr().out
    code, result = run("crash", "--branches", "lr", "--gate", "20", seen="batch")
    assert (code, result["gate"]) == (1, False)


def test_the_plan_runs_nothing_and_shows_each_command(run: Any, capsys: Any) -> None:
    code, result = run("batch", "--branches", "skip,bf16", "--plan")
    shown = capsys.readouterr().out
    assert (code, result) == (0, {})
    assert not Path("out").exists()
    assert "from the checkpoint of step 52: 7 steps a branch" in shown
    assert "rank-hours" in shown
    assert "--stability-decide-skip-samples [[440,448]]" in shown
    assert "bf16 is left out: the ledger says no fp8" in shown
    assert "--save" not in shown.replace("saves", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("saves", "7", "--", "x", "--save", "saves"), "holds no complete checkpoint of before step 7"),
        (("saves", "56", "--branches", "bits", "--", "x"), "--branches bits: there is no such branch; they are replay"),
        (("saves", "56", "--"), "after `--` comes the run's command"),
        (("saves", "56"), "after `--` comes the run's command"),
        (("saves", "56", "--", "x"), "neither --save nor --load; give --checkpoints FOLDER"),
        (("saves", "56", "--", "nemo", "r.yaml"), "nemo: a recipe's run can't be replayed"),
        (("saves", "56", "--checkpoints", "nowhere", "--", "x"), "--checkpoints nowhere: there is no such folder"),
        (("saves", "56", "--timeout", "0", "--", "x"), "--timeout 0"),
        (("saves", "56", "--after", "-1", "--", "x"), "--after -1"),
        (("saves", "56", "--out", "saves", "--", "x", "--save", "saves"), "which is no replay's"),
    ],
)
def test_bad_input_is_one_sentence(run: Any, capsys: Any, arguments: tuple[str, ...], said: str) -> None:
    run("batch", "--plan")
    capsys.readouterr()
    assert cli.main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_another_replays_result_or_another_file_is_refused(run: Any, tmp_path: Path, capsys: Any) -> None:
    run("batch", "--branches", "replay")
    assert cli.main(["triage", "saves", "30", "--replay", "out"]) == 2
    (tmp_path / "x.json").write_text('{"step": 56, "branches": [{"name": "skip"}]}')
    assert cli.main(["triage", "saves", "--replay", "x.json"]) == 2
    assert cli.main(["triage", "saves", "--replay", "nowhere"]) == 2
    said = capsys.readouterr().err
    for part in ("is of step 56, not 30", "is not the result of a replay", "can't be read"):
        assert part in said


def test_flags_go_with_their_values_in_both_spellings_and_others_stay() -> None:
    command = ["x.py", "--save", "a", "--lr", "1", "--save=b", "--loss", "c", "--bf16", "--list", "d", "e"]
    assert branches.without(command, ("--save", "--bf16", "--list")) == ["x.py", "--lr", "1", "--loss", "c"]
    assert branches.values(command, "--save") == ["b", "a"]
