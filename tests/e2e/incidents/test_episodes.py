"""What detectors find on a real run reaches people: log, TensorBoard, ledger and report tell of the same episodes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from megatron_stability.ledger.entries import EpisodeEntry, read
from megatron_stability.records import Change
from megatron_stability.report import command
from tests.dist.pool import Context, Pool
from tests.e2e import jobs

pytestmark = pytest.mark.megatron

# Without QK-norm, at a learning rate that lets attention logits grow; cosine decay takes its course.
HIGH = ("--lr", "1e-1", "--min-lr", "0", "--train-iters", "40", "--stability-observe-attention-enabled", "true")


def train(context: Context, folder: Path) -> tuple[int, str]:
    """The exit code, and what the run printed."""
    flags = (*HIGH, "--save", str(folder), "--tensorboard-dir", str(folder / "tensorboard"))
    log = folder / "log"
    folder.mkdir()
    with log.open("w") as stream, contextlib.redirect_stdout(stream):
        code, _ = jobs.train(context, flags)
    return code, log.read_text()


def texts(folder: Path) -> list[str]:
    """What TensorBoard has under the tag of episodes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return [
        event.tensor_proto.string_val[0].decode() for event in events.Tensors("stability/text/episodes/text_summary")
    ]


def test_growing_attention_logits_are_told(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    ((code, log),) = pools["0.19.2", "patched"].run(train, folder, world=1, timeout=120)
    assert code == 0
    found = [e for e in read(folder / "stability").entries if isinstance(e, EpisodeEntry)]
    mine = [entry for entry in found if entry.detector == "attention_logits"]
    assert mine[0].change is Change.OPENED
    assert mine[-1].value > 1.5 * mine[0].value, "a run in which logits grow"
    said = [line.split("episode: ")[1] for line in log.splitlines() if " episode: " in line]
    assert len(said) == len(found)
    assert said == texts(folder / "tensorboard")
    assert any(line.startswith("attention_logits opened (watch)") for line in said)
    assert "open episodes:  1 |" in log or "open episodes:  2 |" in log
    assert " stability: attention_logits: 1 episode, still open; worst (" in log
    assert command.run([str(folder), "--out", str(tmp_path / "page.html"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [e["value"] for e in run["episodes"] if e["detector"] == "attention_logits"] == [mine[-1].value]
    assert "judged by attention_logits" in (tmp_path / "page.html").read_text()
