"""Skip lists: where the listed documents stand in a run's samples."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from megatron_stability.data import attribution, order, skips
from megatron_stability.data.skips import Skip
from megatron_stability.errors import UsageError
from tests.unit.data.maker import make


@pytest.fixture
def blend(tmp_path):
    first = make(tmp_path / "a", [[1] * n for n in (5, 7, 1, 20, 8, 3)])
    second = make(tmp_path / "b", [[2] * n for n in (30, 2, 2, 11)])
    run = {"split": "1,0,0", "seed": 7, "seq_length": 8, "train_iters": 20, "global_batch_size": 4}
    return order.of_run(Namespace(data_path=["0.3", first, "0.7", second], **run))


def test_masks_are_the_tokens_that_attribution_names(blend):
    prefixes = [each.index.prefix for each in blend.orders]
    skipped = [Skip(prefixes[0], 3, 0, 20), Skip(prefixes[1], 0, 4, 9), Skip(prefixes[1], 2, 0, 2)]
    masks = skips.masks(blend, skipped)
    total = 0
    for sample in range(blend.size):
        wanted = set()
        for piece in attribution.attribute(blend, sample):
            for token in range(piece.first, piece.last):
                held = (skip.prefix == piece.prefix and skip.document == piece.document for skip in skipped)
                if any(
                    hit and skip.first <= token < skip.first + skip.tokens
                    for hit, skip in zip(held, skipped, strict=True)
                ):
                    wanted.add(piece.at + token - piece.first)
        assert {at for first, end in masks.spans(sample) for at in range(first, end)} == wanted
        targets = len(wanted - {0})
        assert masks.targets(sample, sample + 1) == targets
        total += targets
    assert masks.targets(0, blend.size) == total > 0
    assert 0 < len(masks) < blend.size


def test_a_list_is_read_and_judged(tmp_path, blend):
    prefix = blend.orders[0].index.prefix
    line = {"input": prefix, "document": 1, "first": 0, "tokens": 7, "reasons": ["run"]}
    (tmp_path / "skip.jsonl").write_text(json.dumps(line) + "\n")
    assert skips.read(tmp_path / "skip.jsonl") == [Skip(prefix, 1, 0, 7)]
    for text in ("{", "{}", json.dumps({**line, "document": -1}), json.dumps({**line, "tokens": 0}), "[]"):
        (tmp_path / "skip.jsonl").write_text(text)
        with pytest.raises(UsageError, match="line 1"):
            skips.read(tmp_path / "skip.jsonl")
    with pytest.raises(UsageError, match="can't be read"):
        skips.read(tmp_path / "none")
    with pytest.raises(UsageError, match="no document 6"):
        skips.masks(blend, [Skip(prefix, 6, 0, 1)])
    with pytest.raises(UsageError, match="trains on"):
        skips.masks(blend, [Skip("else", 0, 0, 1)])
    assert len(skips.masks(blend, [])) == 0
