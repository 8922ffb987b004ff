"""The ledger file: whole lines after any death, one writer, nothing outside its folder."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import StepEntry, read
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.records import Action, Decision, StepRecord, Tier, Verdict
from megatron_stability.report.runview import RunView

INFO = RunInfo(mode="act", versions={"megatron-core": "0.19.2"}, layout={"tensor_model_parallel_size": 2})


def record(step, *, samples=8, **fields):
    values = {"tokens": 64.0, "loss": 4.0, "grad_norm": 1.0, "learning_rate": 1e-3} | fields
    return StepRecord(step=step, first_sample=(step - 1) * samples, samples=samples, **values)


def decision(step, action=Action.APPLY, advised=None, verdicts=()):
    return Decision(step=step, action=action, advised=advised or action, reason="because", verdicts=tuple(verdicts))


def start(folder, step=0):
    return Ledger.open(folder, resume_step=step, resume_sample=8 * step, run_info=INFO)


def write(ledger, *steps):
    for step in steps:
        ledger.write(record(step), decision(step))


def test_every_field_returns_as_it_was_written_also_nan_and_infinity(tmp_path):
    seen = record(
        1,
        loss=math.nan,
        grad_norm=-math.inf,
        nonfinite_losses=2,
        nonfinite_grads=1,
        overflow=True,
        disagreeing_ranks=(1,),
        culprit_ranks=(3, 4),
        signals={"max_logit": math.inf},
    )
    verdict = Verdict(
        detector="non_finite", tier=Tier.NON_FINITE, step=1, value=math.nan, threshold=0.0, reason='"<b>é\r\n\ud800'
    )
    with start(tmp_path) as ledger:
        ledger.write(seen, decision(1, Action.SKIP, verdicts=[verdict]))
    (run,), (step,) = read(tmp_path).runs, read(tmp_path).steps
    assert (run.mode, run.versions, run.layout) == (INFO.mode, INFO.versions, INFO.layout)
    assert math.isnan(step.loss)
    assert step.grad_norm == -math.inf
    assert step.signals == {"max_logit": math.inf}
    assert (step.fate, step.action, step.advised, step.reason) == ("skipped", Action.SKIP, Action.SKIP, "because")
    assert (step.nonfinite_losses, step.nonfinite_grads, step.overflow) == (2, 1, True)
    assert (step.disagreeing_ranks, step.culprit_ranks) == ((1,), (3, 4))
    assert step.verdicts[0].tier is Tier.NON_FINITE
    assert math.isnan(step.verdicts[0].value)
    assert step.verdicts[0].reason == '"<b>é\r\n?'


@pytest.mark.parametrize(
    ("action", "overflow", "fate"),
    [
        (Action.APPLY, False, "trained"),
        (Action.SCALE_LR, False, "trained"),
        (Action.APPLY, True, "skipped"),
        (Action.SKIP, False, "skipped"),
        (Action.REWIND, False, "halted"),
        (Action.HALT, False, "halted"),
    ],
)
def test_the_fate_follows_from_what_happened_to_the_weights(tmp_path, action, overflow, fate):
    with start(tmp_path) as ledger:
        ledger.write(record(1, overflow=overflow), decision(1, action))
    assert read(tmp_path).steps[0].fate == fate


def test_a_resume_before_the_last_step_undoes_what_came_after(tmp_path):
    with start(tmp_path) as ledger:
        write(ledger, 1, 2, 3)
    with start(tmp_path, 2) as ledger:
        write(ledger, 3, 4)
    view = read(tmp_path)
    assert [(s.generation, s.step) for s in view.surviving] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert [(s.generation, s.step) for s in view.undone] == [(1, 3)]
    assert [(r.generation, r.resumed_step) for r in view.runs] == [(1, 0), (2, 2)]


def test_a_resume_at_the_last_step_undoes_nothing(tmp_path):
    with start(tmp_path) as ledger:
        write(ledger, 1, 2)
    start(tmp_path, 2).close()
    assert [e.kind for e in read(tmp_path).entries] == ["run", "step", "step", "run"]


def test_a_rewind_within_the_process_begins_a_generation(tmp_path):
    with start(tmp_path) as ledger:
        write(ledger, 1, 2, 3)
        ledger.rewind(1, 8, "loss spike")
        write(ledger, 2)
    assert [(s.generation, s.step) for s in read(tmp_path).surviving] == [(1, 1), (2, 2)]


def test_why_a_process_left_early_is_in_the_view_and_the_report(tmp_path):
    with start(tmp_path) as ledger:
        write(ledger, 1, 2)
        ledger.ending(2, 16, "the step has to be run again")
    (end,) = read(tmp_path).ends
    assert (end.generation, end.step, end.code) == (1, 2, 16)
    assert "Generation 1 ended with exit code 16: the step has to be run again." in RunView.from_ledger(tmp_path).notes


def test_cut_at_any_byte_the_whole_lines_remain_and_the_next_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # one run a byte, and nothing loses power
    with start(tmp_path / "whole") as ledger:
        write(ledger, 1)
        ledger.write(record(2, loss=math.nan, nonfinite_losses=1), decision(2, Action.SKIP))
    data = (tmp_path / "whole" / "ledger.jsonl").read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    for size in range(len(data) + 1):
        (folder / "ledger.jsonl").write_bytes(data[:size])
        whole = sum(1 for line in data.splitlines(keepends=True) if data.index(line) + len(line) - 1 <= size)
        assert len(read(folder).entries) == whole
        with start(folder, 2) as ledger:
            write(ledger, 3)
        view = read(folder)
        assert view.torn_bytes == 0
        assert [e.kind for e in view.entries] == [*["run", "step", "step"][:whole], "run", "step"]
        assert view.runs[-1].trimmed_bytes in (0, size - data[:size].rfind(b"\n") - 1)


@pytest.mark.parametrize("tail", [b"\0" * 100, b'{"kind":"step"}\n', b"\xff\r\n"])
def test_a_last_line_torn_by_a_power_loss_is_trimmed(tmp_path, tail):
    with start(tmp_path) as ledger:
        write(ledger, 1)
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(tail)
    assert read(tmp_path).torn_bytes == len(tail)
    start(tmp_path, 1).close()
    assert read(tmp_path).runs[-1].trimmed_bytes == len(tail)


def test_a_flipped_bit_in_any_earlier_line_is_an_error_that_names_the_line(tmp_path):
    with start(tmp_path) as ledger:
        write(ledger, 1, 2)
    file = tmp_path / "ledger.jsonl"
    data = bytearray(file.read_bytes())
    for position in range(0, data.rindex(b"\n", 0, -1), 7):
        damaged = data.copy()
        damaged[position] ^= 1
        file.write_bytes(damaged)
        line = data.count(b"\n", 0, position) + 1
        with pytest.raises(UsageError, match=rf"ledger.jsonl, line {line}: is damaged"):
            read(tmp_path)
        with pytest.raises(UsageError, match="is damaged"):
            start(tmp_path)
        assert file.read_bytes() == damaged


def test_a_line_of_a_later_schema_is_refused(tmp_path):
    from megatron_stability.ledger.entries import RunEntry, line_of

    line = line_of(RunEntry(generation=1, schema_version=99, resumed_step=0, resumed_sample=0))
    (tmp_path / "ledger.jsonl").write_bytes(line + line)
    with pytest.raises(UsageError, match=r"line 1: has schema 99.*install a newer"):
        read(tmp_path)


def test_a_second_writer_is_refused_and_the_first_one_named(tmp_path):
    with start(tmp_path), pytest.raises(UsageError, match=rf"is being written by pid {os.getpid()} on "):
        start(tmp_path)
    start(tmp_path).close()


WRITER = """
import os, sys, time
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.report.runview import RunView
from tests.unit.ledger.test_ledger import decision, record, start
ledger = start(sys.argv[1])
forked, worker = os.pipe()
if os.fork() == 0:  # a data-loader worker that outlives its parent
    os.write(worker, b"1")
    time.sleep(60)
    os._exit(0)
os.read(forked, 1)
print("ready", flush=True)
step = 0
while True:
    step += 1
    ledger.write(record(step), decision(step))
    if step == 50:
        print("fifty", flush=True)
"""


def test_after_a_kill_9_no_line_is_lost_and_a_surviving_worker_does_not_hold_the_lock(tmp_path):
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "fifty\n"
        with pytest.raises(UsageError, match=f"pid {process.pid} on"):
            start(tmp_path)
        process.kill()
        process.wait(timeout=30)
        steps = [entry.step for entry in read(tmp_path).steps]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= 50
        start(tmp_path, len(steps)).close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_symbolic_link_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in ("ledger.jsonl", "ledger.lock"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).symlink_to(outside)
        with pytest.raises(UsageError, match=f"{name}: cannot be opened for writing"):
            start(folder)
    assert outside.read_text() == "mine"


def test_a_pipe_in_place_of_the_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "ledger.jsonl")
    with pytest.raises(UsageError, match="not a regular file"):
        start(tmp_path)


def test_an_unusable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be opened for writing.*--stability-record-dir"):
        start(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "nothing")


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path, monkeypatch):
    with start(tmp_path) as ledger:
        write(ledger, 1)
        whole = (tmp_path / "ledger.jsonl").read_bytes()
        real = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:20]))
        with pytest.raises(UsageError, match=r"only 20 of .* bytes were taken"):
            write(ledger, 2)
        monkeypatch.undo()
        assert (tmp_path / "ledger.jsonl").read_bytes() == whole
        write(ledger, 2)
    assert [step.step for step in read(tmp_path).steps] == [1, 2]


def test_only_a_plain_apply_may_wait_for_the_disk(tmp_path, monkeypatch):
    synced = []
    with start(tmp_path) as ledger:
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(1), real(descriptor)))
        write(ledger, 1)
        assert not synced
        assert len(read(tmp_path).steps) == 1  # though a reader sees it at once
        ledger.write(record(2), decision(2, Action.APPLY, advised=Action.SKIP))
        assert len(synced) == 1
        ledger.write(record(3), decision(3, Action.SKIP))
        assert len(synced) == 2
    assert len(synced) == 3


def test_a_closed_ledger_takes_nothing(tmp_path):
    ledger = start(tmp_path)
    ledger.close()
    ledger.close()
    with pytest.raises(UsageError, match="closed"):
        write(ledger, 1)


def test_a_plain_line_is_short(tmp_path):
    with start(tmp_path) as ledger:
        write(ledger, 123456)
    assert len((tmp_path / "ledger.jsonl").read_bytes().splitlines()[-1]) < 260
    assert isinstance(read(tmp_path).entries[-1], StepEntry)
