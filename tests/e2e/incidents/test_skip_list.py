"""A corpus with a bad shard, trained on as it is and with the skip list that an audit made of it."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest

from megatron_stability import cli
from megatron_stability.ledger import fates, ledger
from tests.e2e import jobs
from tests.unit.data.maker import make

pytestmark = pytest.mark.megatron
EOD, STEPS = 256, 48
ROOT = Path(__file__).parents[3]


def corpus(folder):
    """(good, bad, held out): documents of this project's pages, and base64 of noise."""
    rng = random.Random(1)
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))).encode()
    parts = [[*text[at : at + 700], EOD] for at in range(0, len(text), 700)]
    rng.shuffle(parts)
    junk = [[*base64.b64encode(rng.randbytes(525)), EOD] for _ in range(60)]
    return make(folder / "good", parts[20:]), make(folder / "bad", junk), make(folder / "held", parts[:20])


def test_what_the_list_names_is_not_trained_on_and_no_good_sample_is_lost(pools, tmp_path, capsys):
    good, bad, held = corpus(tmp_path)
    common = ("--output", str(tmp_path / "audit"), "--tokenizer-bytes", "--workers", "1")
    assert cli.main(["audit-data", good, bad, *common]) == 1
    capsys.readouterr()
    listed = [json.loads(line) for line in (tmp_path / "audit" / "skip.jsonl").read_text().splitlines()]
    assert sorted(each["document"] for each in listed if each["input"] == bad) == list(range(60))
    false = [each["document"] for each in listed if each["input"] == good]
    assert len(false) <= 2, "1 % of the good documents"
    views, held_out = [], []
    for name, flags in (
        ("as it is", ()),
        ("listed", ("--stability-data-skip-list", str(tmp_path / "audit/skip.jsonl"))),
    ):
        folder = tmp_path / name
        given = (
            *("--vocab-size", "257", "--null-tokenizer-eod-id", "256", "--train-iters", str(STEPS)),
            *("--train-data-path", "1", good, "1", bad, "--valid-data-path", held),
            *("--eval-iters", "8", "--eval-interval", str(STEPS - 1), "--data-cache-path", str(tmp_path / "cache")),
            *("--stability-record-dir", str(folder), "--stability-detect-bad-batch-enabled", "false", *flags),
        )
        results = pools["0.19.2", "patched"].run(jobs.train, given, world=2, timeout=400)
        assert [code for code, _ in results] == [0, 0]
        views.append(ledger.read(folder))
        held_out.append(next(v for s in views[-1].steps for k, v in s.signals.items() if k.startswith("held_out/")))
    plain, skipped = views
    masked = [step.signals["data/masked"] for step in skipped.steps]
    print(
        f"held-out loss: {held_out[0]:.4f} as it is, {held_out[1]:.4f} with the list; {sum(masked):.0f} targets masked"
    )
    assert all("data/masked" not in step.signals for step in plain.steps)
    assert [step.tokens + hidden for step, hidden in zip(skipped.steps, masked, strict=True)] == [
        step.tokens for step in plain.steps
    ]
    assert 0.4 < sum(masked) / sum(step.tokens for step in plain.steps) < 0.6
    assert fates.audit(skipped) == []
    assert sum(each.masked for each in fates.fates(skipped)) == sum(masked)
    assert {each.fate for each in fates.fates(skipped)} == {"trained"}
    assert held_out[1] < held_out[0]
