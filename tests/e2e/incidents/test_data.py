"""Data that a run can't be trained on end it on every rank with one sentence: before a forward, before a resume."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_stability.checkpoints import generations
from megatron_stability.data.fingerprint import places
from megatron_stability.errors import EXIT_UNUSABLE
from megatron_stability.ledger import entries
from tests.dist.pool import Context, Pool
from tests.e2e import jobs
from tests.e2e.incidents.test_resume_and_halt import Actions
from tests.unit.data.maker import make

TOKENS = 640_000  # 1.28 MB of uint16: blocks leave room between them
WHOLE = ("--split", "1,0,0", "--train-iters", "4", "--stability-mode", "act")


def hidden(prefix: Path, bad: int) -> str:
    """A data set with ids below 200 in every sampled block, and `bad` at the end of every 50 others: in every batch."""
    ids = np.arange(TOKENS) % 200
    shown = np.zeros(TOKENS, bool)
    for offset, length in places(2 * TOKENS):
        shown[offset // 2 : (offset + length + 1) // 2] = True
    ids[~shown & (np.arange(TOKENS) % 50 == 0)] = bad
    return make(prefix, np.split(ids, 16))


def train(context: Context, flags: tuple[str, ...]) -> tuple[int, list[tuple[int, str]], str]:
    """The exit code, the steps and what was done with them, and what the rank said on standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code, steps = jobs.train(context, flags, Actions())
    return code, [(step, action) for step, action, *_ in steps], said.getvalue()


@pytest.mark.parametrize(
    ("release", "layout"),
    [
        ("0.19.2", ()),
        ("0.19.2", (*jobs.TP2, "--mtp-num-layers", "1")),
        ("0.18.2", jobs.PP2),
    ],
    ids=["tp1", "tp2-mtp", "older-pp2"],
)
def test_no_forward_sees_an_id_beyond_the_vocabulary(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, release: str, layout: tuple[str, ...]
) -> None:
    """Megatron-LM#2459, #2570. Id 256 is below the padded vocabulary: nothing of Megatron's would stop it."""
    data = ("--data-path", hidden(tmp_path / "text", 256), "--vocab-size", "200")
    flags = (*layout, *data, *WHOLE, "--save", str(tmp_path / "save"), "--save-interval", "1")
    world = 2 if layout else 1
    results = pools[release, "patched"].run(train, flags, world=world, timeout=120)
    assert [each[:2] for each in results] == [(EXIT_UNUSABLE, [])] * world
    assert f"{tmp_path}/text.bin holds token id 256, and the vocabulary has 200 (0 to 199)" in results[0][2]
    assert "--vocab-size" in results[0][2]
    assert not list((tmp_path / "save").glob("iter_*"))
    (end,) = entries.read(tmp_path / "save" / "stability").ends
    assert (end.step, end.code) == (0, EXIT_UNUSABLE)
    assert "token id 256" in end.reason


def test_an_evaluation_too(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    good, bad = make(tmp_path / "good", [range(200)] * 50), hidden(tmp_path / "bad", 256)
    data = ("--train-data-path", good, "--valid-data-path", bad, "--vocab-size", "200", *WHOLE[2:])
    flags = (*jobs.TP2, *data, "--eval-interval", "4", "--eval-iters", "1")
    results = pools["0.19.2", "patched"].run(train, flags, world=2, timeout=120)
    assert [each[:2] for each in results] == [(EXIT_UNUSABLE, [(step, "apply") for step in range(1, 5)])] * 2
    assert "bad.bin holds token id 256" in results[0][2]


def test_data_exchanged_behind_a_list_file_are_told_at_a_resume(
    pools: dict[tuple[str, str], Pool], tmp_path: Path
) -> None:
    """Megatron-LM#725, #1343: the flags are the same, and so are the sizes and the index."""
    draw = np.random.default_rng(1)
    prefixes = [make(tmp_path / name, draw.integers(0, 127, (40, 100)).tolist()) for name in ("a", "b")]
    list_file = tmp_path / "list.json"
    list_file.write_text(json.dumps({"train": ["0.5", prefixes[0], "0.5", prefixes[1]], "valid": None, "test": None}))
    save = tmp_path / "save"
    flags = ("--per-split-data-args-path", str(list_file), "--save", str(save), *WHOLE[2:])
    pool, more = pools["0.19.2", "patched"], ("--load", str(save))
    assert [code for code, _ in pool.run(jobs.train, flags, world=1, timeout=120)] == [0]
    assert [each.step for each in generations.candidates(save)] == [4]
    make(tmp_path / "b", draw.integers(0, 127, (40, 100)).tolist())
    ((code, steps, said),) = pool.run(train, (*flags, *more), world=1, timeout=120)
    assert (code, steps) == (EXIT_UNUSABLE, [])
    assert f"differs from the checkpoint in dataset ({prefixes[1]}.bin has other content)" in said
