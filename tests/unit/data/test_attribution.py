"""Samples, documents, files and steps, from any of them to the others."""

from __future__ import annotations

import json
from argparse import Namespace

import numpy as np
import pytest

from megatron_stability.data import attribution, order
from megatron_stability.data.attribution import Source
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import LedgerView, SaveEntry, StepEntry, UndoEntry
from tests.unit.data.maker import make


def corpus(folder, name, lengths, first=0):
    """A data set whose tokens are all different, so that a sample says where it is from."""
    ids = iter(range(first, 60000))
    return make(folder / name, [[next(ids) for _ in range(n)] for n in lengths])


def args(path, **given):
    defaults = {"split": "1,0,0", "seed": 7, "seq_length": 8, "train_iters": 6, "global_batch_size": 4}
    return Namespace(**{"data_path": path, **defaults, **given})


@pytest.fixture
def blend(tmp_path):
    first = corpus(tmp_path, "a", [5, 0, 1, 20, 8, 3])
    second = corpus(tmp_path, "b", [30, 2, 2, 11], first=1000)
    return order.of_run(args(["0.3", first, "0.7", second], train_iters=20))


def test_pieces_are_the_samples_tokens_without_a_gap(blend):
    for sample in range(blend.size):
        pieces = attribution.attribute(blend, sample)
        assert [piece.at for piece in pieces] == np.cumsum([0, *(p.last - p.first for p in pieces)])[:-1].tolist()
        assert sum(piece.last - piece.first for piece in pieces) == 9
        assert all(0 <= p.first < p.last <= blend.orders[p.data_set].index.lengths()[p.document] for p in pieces)


def test_a_document_leads_to_every_sample_that_it_is_in_and_to_no_other(blend):
    held = [
        {(piece.prefix, piece.document) for piece in attribution.attribute(blend, sample)}
        for sample in range(blend.size)
    ]
    for each in blend.orders:
        for document in range(each.index.sequences):
            wanted = [at for at, documents in enumerate(held) if (each.index.prefix, document) in documents]
            assert attribution.samples_of(blend, each.index.prefix, document).tolist() == wanted
    both = attribution.samples_of(blend, blend.orders[0].index.prefix, [3, 4])
    assert set(both) == {at for at, d in enumerate(held) if {(blend.orders[0].index.prefix, n) for n in (3, 4)} & d}


def test_every_epoch_reads_a_document_again(blend):
    """20 steps of 4 samples of 8 tokens are many epochs of 37 and 45 tokens."""
    assert len(attribution.samples_of(blend, blend.orders[1].index.prefix, 0)) > 4


def test_what_is_not_there_is_one_sentence(blend, tmp_path):
    prefix = blend.orders[0].index.prefix
    for call in (
        lambda: attribution.attribute(blend, blend.size),
        lambda: attribution.attribute(blend, -1),
        lambda: attribution.samples_of(blend, "else", 0),
        lambda: attribution.samples_of(blend, prefix, 6),
        lambda: attribution.documents_of(prefix, "a.txt"),
        lambda: order.of_run(args(None, mock_data=True)),
        lambda: order.of_run(args([prefix], dataloader_type="cyclic")),
        lambda: order.of_run(args([prefix], seed=None)),
        lambda: order.of_run(args([prefix], split="0,0,1")),
        lambda: order.of_run(args(None)),
    ):
        with pytest.raises(UsageError):
            call()


def test_a_piece_names_file_offset_and_line(tmp_path):
    prefix = corpus(tmp_path, "c", [9, 9])
    lines = [
        {"document": 0, "input": 0, "path": "x/a.jsonl", "offset": 40, "bytes": 8, "line": 3, "tokens": 9},
        {"document": 1, "input": 1, "path": "b.txt", "offset": 0, "bytes": 8, "tokens": 9},
    ]
    (tmp_path / "c.provenance.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "c.meta.json").write_text(json.dumps({"inputs": ["folder", "else/b.txt"]}))
    blend = order.of_run(args([prefix]))
    found = {p.document: p.source for sample in range(blend.size) for p in attribution.attribute(blend, sample)}
    assert found == {0: Source("folder/x/a.jsonl", 40, 8, 3), 1: Source("else/b.txt", 0, 8, None)}
    assert attribution.documents_of(prefix, "a.jsonl") == [0]
    assert attribution.documents_of(prefix, "else/b.txt") == [1]
    with pytest.raises(UsageError, match="not made of"):
        attribution.documents_of(prefix, "jsonl")
    (tmp_path / "c.provenance.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="line 1 is damaged"):
        attribution.attribute(blend, 0)


def step(number, generation=1, fate="trained"):
    action = {"trained": "apply", "skipped": "skip"}[fate]
    return StepEntry(
        generation=generation, step=number, first_sample=4 * (number - 1), samples=4, tokens=32.0, loss=1.0,
        grad_norm=1.0, learning_rate=0.1, fate=fate, action=action, advised=action,
    )  # fmt: skip


def test_steps_that_took_a_sample_and_the_checkpoint_that_holds_it():
    undo = UndoEntry(generation=2, from_step=2, from_sample=8)
    view = LedgerView(
        (
            *(step(number) for number in (1, 2)),
            SaveEntry(generation=1, step=2),
            *(step(number) for number in (3, 4)),
            SaveEntry(generation=1, step=4),
            undo,
            step(3, 2, "skipped"),
            step(4, 2),
            step(5, 2),
            SaveEntry(generation=2, step=5),
            step(6, 2),
        )
    )
    found = attribution.readings(view, [9, 1, 13, 12, 23])
    told = [(each.step, each.generation, each.samples, each.fate, each.undone, each.saved_in) for each in found]
    assert told == [
        (1, 1, (1,), "trained", False, 2),
        (3, 1, (9,), "trained", True, None),
        (3, 2, (9,), "skipped", False, None),
        (4, 1, (12, 13), "trained", True, None),
        (4, 2, (12, 13), "trained", False, 5),
        (6, 2, (23,), "trained", False, None),
    ]


def test_stretches():
    assert attribution.stretches([1, 2, 3, 7, 9, 10]) == [(1, 4), (7, 8), (9, 11)]
