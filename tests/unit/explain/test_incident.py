"""`incident` and `sample`: the page of each kind of incident names step, cause, files, action and next command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_stability import cli
from megatron_stability.ledger.entries import FILE, EpisodeEntry, LedgerView, SaveEntry, line_of
from megatron_stability.records import Action, Change, Tier
from megatron_stability.sites import Site
from tests.unit.data import maker
from tests.unit.explain.runs import BATCH, Run, at, both, settings, since, verdict, view

AT = {"fp8/saturation/at": Site(3, "linear_fc1", "input").order}
SKIP = {"action": Action.SKIP, "fate": "skipped"}
NAN = {"loss": math.nan, "grad_norm": math.nan, "nonfinite_losses": 1, "culprit_ranks": (2,)}


def spike(step: int, detector: str, **fields: Any) -> Any:
    return at(step, **SKIP, verdicts=(verdict(step, detector),), reason=f"{detector} (large): far above", **fields)


KINDS: dict[str, tuple[LedgerView, int, str, str]] = {  # ledger, step, cause, a word that the page must have
    "NaN on a rank": (
        view(Run(wrong=spike(120, "non_finite", **NAN))),
        *(120, "rank", "not finite first on rank 2 of 4"),
    ),
    "gradient of a rank x1000": (
        view(Run(wrong=spike(120, "rank_agreement", grad_norm=900.0, disagreeing_ranks=(1,)))),
        *(120, "rank", "rank 1 differs from the others"),
    ),
    "repeated documents": (
        view(Run(wrong=spike(120, "bad_batch", loss=6.0, signals={"data/repeated": 0.8}))),
        *(120, "bad_batch", "samples 952 to 959"),
    ),
    "passed over by its scores": (
        view(Run(wrong=at(120, **SKIP, parameters={"passed_over": 1.0}, reason="bad_batch (medium): a row of it"))),
        *(120, "bad_batch", "bad_batch (medium): a row of it"),
    ),
    "learning-rate jump": (
        view(
            Run(
                wrong=both(
                    since(115, learning_rate=3e-3),
                    since(117, grad_norm=lambda n: 6.0 * 1.3**n),
                    spike(121, "loss_divergence", loss=4.0),
                )
            )
        ),
        *(121, "learning_rate", "learning rate 0.003, rising"),
    ),
    "FP8 saturation": (
        view(
            Run(
                settings=settings(fp8="hybrid"),
                wrong=spike(120, "fp8_saturation", loss=5.0, signals={"fp8/saturation": 0.2, **AT}),
            )
        ),
        *(120, "fp8_range", "fp8/saturation began at layer 3"),
    ),
    "z-loss runaway": (
        view(
            Run(
                wrong=both(
                    lambda n, f: f["signals"].update({"log_z/sum": 256 * (0.3 + 0.5 * max(0, n - 80))}),
                    spike(125, "loss_divergence", loss=5.0),
                )
            )
        ),
        *(125, "output_logits", "--stability-model-z-loss 1e-4"),
    ),
}


def put(folder: Path, view: LedgerView) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(b"".join(line_of(entry) for entry in view.entries))
    return folder


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main([*argv, "--json"]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_incident_names_step_cause_action_and_next_command(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    ledger, step, cause, word = KINDS[kind]
    run = str(put(tmp_path, ledger))
    found = told(capsys, "incident", run, "--last")
    assert found["step"] == step
    assert found["triage"]["hypotheses"][0]["cause"] == cause
    assert [each["action"] for each in found["done"]] == ["skip"]
    assert any(line.startswith("megatron-stability ") for line in found["next"])
    assert cli.main(["incident", run]) == 1
    page = capsys.readouterr().out
    assert word in page
    assert f"step {step}" in page.splitlines()[0].lower()
    for title in ("Seen", "Done", "Where", "Data", "Around it", "Before it", "Cause", "Evidence", "Next"):
        assert f"\n{title}\n" in page


def _episode(first: int, last: int, incident: int, change: Change = Change.CLOSED, **more: Any) -> EpisodeEntry:
    fields = {
        "detector": "loss_divergence",
        "tier": Tier.LARGE,
        "value": 6.0,
        "threshold": 4.0,
        "verdicts": last - first + 1,
    }
    fields |= {"reason": "loss 6 is far", "grave": last - first + 1} | more
    return EpisodeEntry(generation=1, change=change, incident=incident, first_step=first, last_step=last, **fields)


def test_an_incident_of_episodes_is_found_by_any_of_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = list(view(Run(wrong=since(120, 140, loss=6.0))).entries)
    lines += [_episode(120, 120, 120, Change.OPENED), _episode(120, 139, 120)]
    run = str(put(tmp_path, LedgerView(tuple(lines))))
    assert told(capsys, "incident", run)["title"].startswith(f"Incident 120 of {run}: steps 120 to 139, large, page")
    inside = told(capsys, "incident", run, "130")
    assert (inside["incident"], inside["step"]) == (120, 130)
    assert [each["detector"] for each in inside["seen"]] == ["loss_divergence"]
    outside = told(capsys, "incident", run, "50")
    assert (outside["incident"], outside["seen"]) == (None, [])
    assert outside["title"] == f"Step 50 of {run}: in no incident"
    assert cli.main(["incident", run, "--list", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {
            "incident": 120,
            "last_step": 139,
            "tier": "large",
            "detectors": ["loss_divergence"],
            "actions": [],
            "page": True,
        }
    ]


def test_what_came_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = list(view(Run(steps=110)).entries)
    wrong = both(since(115, samples=2 * BATCH), spike(120, "loss_spike", loss=6.0))
    second = list(view(Run(steps=40, first=111, generation=2, settings=settings(lr=1e-3), wrong=wrong)).entries)
    lines = [*first, SaveEntry(generation=1, step=100), *second]
    before = told(capsys, "incident", str(put(tmp_path, LedgerView(tuple(lines)))))["before"]
    assert before[0] == "the process had begun, or gone back, 9 steps before"
    assert "lr: 0.0003 -> 0.001 (restart after step 110)" in before
    assert "batch size 8 -> 16 at step 115" in before
    assert before[-1] == "last checkpoint: step 100"


def _data(folder: Path) -> dict[str, Any]:
    """Two files of plain bytes as a data set, and the settings of a run that reads it."""
    texts = {"a.txt": b"alpha " * 300, "b.txt": b"beta " * 300}
    maker.make(folder / "set", [[*text, 256] for text in texts.values()])
    lines = [
        {"document": at_, "input": at_, "path": name, "offset": 0, "bytes": len(text), "tokens": len(text) + 1}
        for at_, (name, text) in enumerate(texts.items())
    ]
    (folder / "set.provenance.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "set.meta.json").write_text(json.dumps({"inputs": list(texts), "tokenizer": {"kind": "bytes"}}))
    data = {"data_path": [str(folder / "set")], "split": "1,0,0", "seq_length": 32, "global_batch_size": BATCH}
    return settings(**data, train_iters=200)


def test_samples_are_traced_to_files_and_text_only_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = view(
        Run(settings=_data(tmp_path), wrong=spike(120, "bad_batch", loss=6.0, signals={"data/repeated": 0.8}))
    )
    run = str(put(tmp_path, ledger))
    found = told(capsys, "incident", run)
    documents = found["batch"]["documents"]
    assert {Path(each["path"]).name for each in documents} <= {"a.txt", "b.txt"}
    assert sum(each["tokens"] for each in documents) == BATCH * 33
    assert not any("text" in each for each in documents)
    assert "alpha" not in json.dumps(found)
    assert f"megatron-stability incident {run} 120 --text" in found["next"]
    texts = [each["text"] for each in told(capsys, "incident", run, "--text")["batch"]["documents"]]
    assert all("alpha" in text or "beta" in text for text in texts)
    one = told(capsys, "sample", run, str(119 * BATCH))
    assert sum(each["tokens"] for each in one["documents"]) == 33
    assert [(each["step"], each["fate"], each["undone"]) for each in one["steps"]] == [(120, "skipped", False)]
    assert cli.main(["sample", run, "99999999"]) == 0
    assert "sample 99999999: the run has samples 0 to" in capsys.readouterr().out


def test_data_that_cannot_be_traced_are_told_and_the_rest_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"mock_data": True}, {"dataloader_type": "cyclic"}, {"data_path": [str(tmp_path / "gone")]}
    for at_, changed in enumerate(kinds):
        more = {"seq_length": 32, "global_batch_size": 8, "train_iters": 9, "split": "1,0,0"} | changed
        run = str(
            put(tmp_path / str(at_), view(Run(settings=settings(**more), wrong=spike(120, "loss_spike", loss=6.0))))
        )
        found = told(capsys, "incident", run)
        assert found["batch"]["told"]
        assert found["batch"]["documents"] == []
    old = str(put(tmp_path / "old", view(Run(settings={}, wrong=spike(120, "loss_spike", loss=6.0)))))
    assert "does not hold the run's settings" in told(capsys, "incident", old)["batch"]["told"]


def test_the_html_page_escapes_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = view(
        Run(wrong=at(120, **SKIP, reason="<script>alert(1)</script>", verdicts=(verdict(120, "loss_spike"),)))
    )
    page = tmp_path / "incident.html"
    assert cli.main(["incident", str(put(tmp_path / "r", ledger)), "--html", str(page)]) == 1
    assert capsys.readouterr().out == ""
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "default-src 'none'" in text
    assert "http://" not in text.replace("http-equiv", "")


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = str(put(tmp_path / "quiet", view(Run())))
    for argv, word in (
        (["incident", quiet], "no incident in this ledger"),
        (["incident", quiet, "9999"], "step 9999: is not in the ledger"),
        (["incident", str(tmp_path / "nowhere")], "nowhere"),
        (["incident", quiet, "5", "--html", "page.txt"], "ends in .html"),
        (["incident", quiet, "--list", "--html", "page.html"], "--list: is of the whole run"),
    ):
        assert cli.main(argv) == 2, argv
        assert word in capsys.readouterr().err
    assert cli.main(["incident", quiet, "--list"]) == 0
    assert "no incident" in capsys.readouterr().out
