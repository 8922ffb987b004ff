"""Every sample has one fate: the ledger's fold against a naive model that keeps a dict by sample."""

import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stability.ledger.entries import read
from megatron_stability.ledger.fates import audit, count, fates, history
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.records import Action, Decision, StepRecord
from tests import effort

INFO = RunInfo(mode="act", versions={}, layout={})

KINDS = ("repeated", "lost")


@pytest.fixture(autouse=True, scope="module")
def _no_fsync():  # nothing here loses power, and hundreds of files are made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


class Naive:
    """The ledger's lines replayed one by one into {sample: [fate, ...]}."""

    def __init__(self):
        self.lines = []  # (offset of the line's last byte before its line feed, operation)

    def note(self, file, *operations):
        """The last lines of the file, one an operation."""
        data = file.read_bytes()
        ends = [found.start() for found in re.finditer(b"\n", data)]
        for end, operation in zip(ends[-len(operations) :], operations, strict=True):
            self.lines.append((end, operation))

    def cut(self, size):
        self.lines = [line for line in self.lines if line[0] <= size]

    def replay(self):
        """The live steps as {step: (first, samples, fate)} in order, and the origin."""
        live, origin = [], None
        for _, (kind, *values) in self.lines:
            if kind == "step":
                live.append(values)
            else:
                step, sample = values
                origin = sample if origin is None else min(origin, sample)
                if kind == "undo":
                    live = [one for one in live if one[0] <= step]
        return live, origin or 0

    def samples(self):
        live, origin = self.replay()
        table = defaultdict(list)
        for _, first, samples, fate in live:
            for sample in range(first, first + samples):
                if fate != "halted":
                    table[sample].append(fate)
        return table, origin


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 4), st.sampled_from([0, 1, 3]), st.sampled_from(list(Action))),
        st.tuples(st.just("jump"), st.integers(-3, 3)),  # a data loader at fault: samples lost or read again
        st.tuples(st.just("resume"), st.integers(0, 12)),
        st.tuples(st.just("rewind"), st.integers(0, 12)),
        st.tuples(st.just("kill"), st.integers(0, 400)),
    ),
    max_size=25,
)


class World:
    """A run, its ledger and the naive model, kept side by side."""

    def __init__(self, folder):
        self.folder, self.file, self.model = folder, folder / "ledger.jsonl", Naive()
        self.open(0, 0)

    def open(self, step, sample):
        undoes = any(one[0] > step for one in self.model.replay()[0])
        self.ledger = Ledger.open(self.folder, resume_step=step, resume_sample=sample, run_info=INFO)
        self.step, self.sample = step, sample
        operations = [("undo", step, sample)] if undoes else []
        self.model.note(self.file, *operations, ("run", step, sample))

    def checkpoint(self, back):
        """A place to resume at: `back` live steps before the last."""
        live, origin = self.model.replay()
        kept = [one for one in live if one[3] != "halted"]
        kept = kept[: len(kept) - back]
        return (kept[-1][0], kept[-1][1] + kept[-1][2]) if kept else (0, origin)

    def do(self, operation):
        kind, *values = operation
        if kind == "steps":
            self.steps(*values)
        elif kind == "jump":
            self.sample = max(0, self.sample + values[0])
        elif kind == "rewind":
            self.step, self.sample = self.checkpoint(*values)
            self.ledger.rewind(self.step, self.sample, "test")
            self.model.note(self.file, ("undo", self.step, self.sample))
        else:
            at = self.checkpoint(values[0] if kind == "resume" else 0)
            self.ledger.close()
            if kind == "kill":
                size = max(0, self.file.stat().st_size - values[0])
                self.file.write_bytes(self.file.read_bytes()[:size])
                self.model.cut(size)
                if values[0] % 2:  # the checkpoint outlived the lines about it, or did not
                    at = self.checkpoint(0)
            self.open(*at)

    def steps(self, number, samples, action):
        for _ in range(number):
            self.step += 1
            record = StepRecord(
                step=self.step, first_sample=self.sample, samples=samples, tokens=1.0, loss=1.0, grad_norm=1.0
            )
            self.ledger.write(record, Decision(step=self.step, action=action, advised=action, reason="test"))
            fate = {Action.SKIP: "skipped", Action.REWIND: "halted", Action.HALT: "halted"}.get(action, "trained")
            self.model.note(self.file, ("step", self.step, self.sample, samples, fate))
            self.sample += samples


@settings(max_examples=effort.examples(60, 300), deadline=None, derandomize=True)
@given(operations=OPERATIONS)
def test_the_fold_and_the_audit_equal_the_naive_model(operations):
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for operation in operations:
            world.do(operation)
        world.ledger.close()
        view = read(folder)
        table, origin = world.model.samples()
        folded = defaultdict(list)
        for interval in fates(view):
            for sample in range(interval.first, interval.last):
                folded[sample].append(interval.fate)
        assert folded == {sample: found for sample, found in table.items() if found}
        found = audit(view)
        marked = {kind: {s for f in found if f.kind == kind for s in range(f.first, f.last)} for kind in KINDS}
        assert sum(f.last - f.first for f in found) == sum(len(samples) for samples in marked.values())
        assert marked["repeated"] == {sample for sample, those in table.items() if len(those) > 1}
        seen = {sample for sample, those in table.items() if those}
        assert marked["lost"] == {s for s in range(origin, max(seen, default=0)) if s not in seen}


def run_of(folder, *operations):
    world = World(folder)
    for operation in operations:
        world.do(operation)
    world.ledger.close()
    return read(folder)


def test_a_run_with_skips_a_halt_a_rewind_and_a_resume_has_no_finding(tmp_path):
    view = run_of(
        tmp_path,
        ("steps", 4, 3, Action.APPLY),
        ("steps", 1, 3, Action.SKIP),
        ("steps", 1, 3, Action.HALT),
        ("resume", 0),
        ("steps", 2, 3, Action.APPLY),
        ("rewind", 3),
        ("steps", 4, 3, Action.APPLY),
        ("kill", 0),
        ("steps", 1, 3, Action.APPLY),
    )
    assert audit(view) == []
    assert count(history(view)) == {"trained": 27, "skipped": 0, "undone": 9}


def test_neighbours_are_one_interval_and_a_skip_keeps_its_reason(tmp_path):
    view = run_of(tmp_path, ("steps", 3, 3, Action.APPLY), ("steps", 2, 3, Action.SKIP), ("steps", 1, 3, Action.APPLY))
    assert [(i.first, i.last, i.fate, i.reason, i.first_step, i.last_step) for i in fates(view)] == [
        (0, 9, "trained", "", 1, 3),
        (9, 15, "skipped", "test", 4, 5),
        (15, 18, "trained", "", 6, 6),
    ]


def test_the_findings_name_samples_and_steps(tmp_path):
    view = run_of(
        tmp_path,
        ("steps", 1, 3, Action.APPLY),
        ("jump", 3),
        ("steps", 1, 3, Action.APPLY),
        ("jump", -1),
        ("steps", 1, 3, Action.APPLY),
    )
    lost, repeated = audit(view)
    assert lost.message == (
        "no fate for samples 3 to 5: the ledger knows no step between step 1 and step 2 that read them"
    )
    assert repeated.message == (
        "two fates for sample 8: trained in step 2 (generation 1) and trained in step 3 (generation 1)"
    )


def test_ranges_within_ranges_are_repeated_and_nothing_behind_them_is_lost(tmp_path):
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        for step, (first, last) in enumerate([(0, 12), (2, 4), (6, 8), (10, 12), (14, 16)], 1):
            record = StepRecord(
                step=step, first_sample=first, samples=last - first, tokens=1.0, loss=1.0, grad_norm=1.0
            )
            ledger.write(record, Decision(step=step, action=Action.APPLY, advised=Action.APPLY, reason=""))
    found = audit(read(tmp_path))
    assert [(each.kind, each.first, each.last) for each in found] == [
        ("repeated", 2, 4),
        ("repeated", 6, 8),
        ("repeated", 10, 12),
        ("lost", 12, 14),
    ]
    assert "trained in step 1 (generation 1) and trained in step 3 (generation 1)" in found[1].message
    assert "between step 1 and step 5" in found[3].message
    assert count(fates(read(tmp_path))) == {"trained": 20, "skipped": 0, "undone": 0}


def test_a_ledger_answers_for_what_a_rewind_took_it_back_to(tmp_path):
    """A ledger begun at sample 16 and rewound to 0: what is not read again from there is lost."""
    with Ledger.open(tmp_path, resume_step=2, resume_sample=16, run_info=INFO) as ledger:
        for step, first in ((3, 16), (1, 8)):
            record = StepRecord(step=step, first_sample=first, samples=8, tokens=1.0, loss=1.0, grad_norm=1.0)
            ledger.write(record, Decision(step=step, action=Action.APPLY, advised=Action.APPLY, reason=""))
            if step == 3:
                ledger.rewind(0, 0, "loss")
    view = read(tmp_path)
    assert view.origin == 0
    assert [(each.kind, each.first, each.last) for each in audit(view)] == [("lost", 0, 8)]
    assert "between the start and step 1" in audit(view)[0].message
