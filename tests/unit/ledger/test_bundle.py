"""Incident bundles: whole or absent after any death, bounded, without code in them."""

import json
import math
import os
import signal
from pathlib import Path

import pytest

from megatron_stability.config import Record
from megatron_stability.errors import UsageError
from megatron_stability.ledger.bundle import Bundles, Context, bundles, plain_args, read_bundle, read_tensors
from megatron_stability.records import Action, Decision, StepRecord, Tier, Verdict

CONTEXT = Context(
    versions={"megatron-core": "0.19.2"},
    layout={"tensor_model_parallel_size": 2},
    args={"lr": 1e-3, "loss_scale": math.inf, "data_path": ["a\udc80"]},
    patch_digest="abc",
)


def sink(folder, *, tensors=None, generation=1, **limits):
    return Bundles(folder, limits=Record(**limits), context=CONTEXT, generation=lambda: generation, tensors=tensors)


def write(sink, step, action=Action.APPLY, **fields):
    values = {"loss": 4.0, "grad_norm": 1.0} | fields
    verdict = Verdict(detector="non_finite", tier=Tier.NON_FINITE, step=step, value=1.0, threshold=0.0, reason="NaN")
    sink.write(
        StepRecord(step=step, first_sample=8 * (step - 1), samples=8, tokens=64.0, **values),
        Decision(
            step=step,
            action=action,
            advised=action,
            reason="because",
            verdicts=() if action is Action.APPLY else (verdict,),
        ),
    )


def names(folder):
    return [path.name for path in bundles(folder)]


def test_a_skip_a_rewind_and_a_halt_leave_a_bundle_and_nothing_else_does(tmp_path):
    writer = sink(tmp_path)
    for step, action in enumerate(Action, start=1):
        write(writer, step, action)
    assert names(tmp_path) == ["incident-4-g1", "incident-5-g1", "incident-6-g1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names(tmp_path)
    assert [read_bundle(path).incident.action for path in bundles(tmp_path)] == ["skip", "rewind", "halt"]


def test_a_bundle_returns_what_was_written(tmp_path):
    writer = sink(tmp_path, generation=3)
    for step in range(1, 31):
        write(writer, step)
    write(writer, 31, Action.SKIP, loss=math.nan, nonfinite_losses=1, culprit_ranks=(2,), signals={"max_logit": 9.5})
    (path,) = bundles(tmp_path)
    assert path.name == "incident-31-g3"
    assert [file.name for file in path.iterdir()] == ["incident.json"]
    bundle = read_bundle(path)
    assert math.isnan(bundle.incident.loss)
    assert (bundle.incident.first_sample, bundle.incident.last_sample) == (240, 248)
    assert bundle.incident.culprit_ranks == (2,)
    assert bundle.incident.signals == {"max_logit": 9.5}
    assert bundle.incident.verdicts[0].reason == "NaN"
    assert [before.step for before in bundle.before] == list(range(11, 31))
    assert bundle.context.versions == CONTEXT.versions
    assert bundle.context.args == {"lr": 1e-3, "loss_scale": "inf", "data_path": ["a?"]}
    assert bundle.left_out == ()
    assert read_tensors(path) == {}

    def refuse(constant):
        raise AssertionError(constant)

    json.loads((path / "incident.json").read_text(), parse_constant=refuse)  # NaN and Infinity are not JSON


def test_tensors_return_bit_for_bit_and_damage_is_seen(tmp_path):
    torch = pytest.importorskip("torch")
    tokens = torch.arange(12).reshape(3, 4).T  # not contiguous
    norms = torch.tensor([math.nan, 1.5], dtype=torch.bfloat16)
    write(sink(tmp_path, tensors=lambda record: {"tokens": tokens, "norms": norms}), 1, Action.SKIP)
    (path,) = bundles(tmp_path)
    read = read_tensors(path)
    assert torch.equal(read["tokens"], tokens)
    assert torch.equal(read["norms"].view(torch.int16), norms.view(torch.int16))
    file = path / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UsageError, match=r"tensors.safetensors: is damaged"):
        read_tensors(path)
    file.unlink()
    with pytest.raises(UsageError, match=r"tensors.safetensors: cannot be read"):
        read_tensors(path)


def test_tensors_are_asked_for_at_an_incident_only(tmp_path):
    asked = []
    writer = sink(tmp_path, tensors=lambda record: asked.append(record.step) or {})
    write(writer, 1)
    write(writer, 2, Action.HALT)
    assert asked == [2]


def test_what_exceeds_the_size_limit_is_left_out_and_named(tmp_path):
    torch = pytest.importorskip("torch")
    writer = sink(
        tmp_path, max_bundle_mb=0.004, tensors=lambda record: {"tokens": torch.zeros(1000, dtype=torch.int64)}
    )
    write(writer, 1, Action.SKIP)
    for step in range(2, 40):
        write(writer, step)
    write(writer, 40, Action.SKIP)
    small, large = (read_bundle(path) for path in bundles(tmp_path))
    assert small.left_out == ("tensors tokens: 8,000 bytes exceed 4,000",)
    assert small.context.patch_digest == "abc"
    assert (large.before, large.context) == ((), Context())
    assert large.left_out[1] == "context and steps before: with them the bundle exceeds 4,000 bytes"
    assert large.incident.step == 40
    for path in bundles(tmp_path):
        assert sum(file.stat().st_size for file in path.iterdir()) <= 4000


def test_the_oldest_go_first(tmp_path):
    writer = sink(tmp_path, max_bundles=3)
    for step in (9, 10, 11, 2, 3):
        write(writer, step, Action.SKIP)
    assert names(tmp_path) == ["incident-11-g1", "incident-2-g1", "incident-3-g1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names(tmp_path))


def test_none_is_written_when_none_is_wanted(tmp_path):
    write(sink(tmp_path, max_bundles=0), 1, Action.HALT)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_name_is_not_overwritten(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "incident-1-g1").symlink_to(outside)
    write(sink(folder), 1, Action.SKIP)
    write(sink(folder), 1, Action.SKIP)
    assert names(folder) == ["incident-1-g1-2", "incident-1-g1-3"]
    assert list(outside.iterdir()) == []


CALLS = ("mkdir", "open", "fsync", "rename", "rmdir", "unlink")


def _die_at(folder, number):
    """In a child: write two bundles of which one is kept, and die by SIGKILL just before the number-th call."""
    child = os.fork()
    if child == 0:
        left = [number]

        def fatal(real):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in CALLS:
            setattr(os, name, fatal(getattr(os, name)))
        writer = sink(folder, max_bundles=1)
        write(writer, 1, Action.SKIP)
        write(writer, 2, Action.HALT)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


def test_killed_before_any_system_call_every_bundle_is_whole_and_the_scraps_go_at_the_next_start(tmp_path):
    seen = set()
    for number in range(1, 200):
        folder = tmp_path / str(number)
        finished = _die_at(folder, number)
        for path in bundles(folder) if folder.exists() else []:
            assert read_bundle(path).incident.step in (1, 2)
            assert read_tensors(path) == {}
        sink(folder)
        assert sorted(path.name for path in folder.iterdir()) == sorted(names(folder))
        seen.add(tuple(names(folder)))
        if finished:
            break
    else:
        pytest.fail("the writer never finished")
    assert number > 15
    assert seen == {(), ("incident-1-g1",), ("incident-1-g1", "incident-2-g1"), ("incident-2-g1",)}


def test_a_full_disk_leaves_no_scrap_and_says_what_to_do(tmp_path, monkeypatch):
    writer = sink(tmp_path)

    sync = os.fsync

    def full(descriptor):  # the first time only: what follows must not pass the failure over
        monkeypatch.setattr(os, "fsync", sync)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"step 7 can't be written \(No space left.*--stability-record-max-bundles 0"):
        write(writer, 7, Action.SKIP)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not an incident"),
        ('{"schema_version": 1}', r"is not an incident \(written: "),
    ],
)
def test_what_is_not_a_bundle_is_one_sentence(tmp_path, text, message):
    if text is not None:
        (tmp_path / "incident.json").write_text(text)
    with pytest.raises(UsageError, match=rf"incident.json: {message}"):
        read_bundle(tmp_path)


def test_a_later_schema_is_refused(tmp_path):
    write(sink(tmp_path), 1, Action.SKIP)
    (path,) = bundles(tmp_path)
    file = path / "incident.json"
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(UsageError, match="has schema 99"):
        read_bundle(path)


def test_only_plain_arguments_are_kept():
    given = {"lr": 1e-3, "bf16": True, "load": Path("/a"), "x": None, "split": ("1", 2), "f": print, "g": [print]}
    assert plain_args(given) == {"lr": 1e-3, "bf16": True, "load": "/a", "x": None, "split": ["1", 2]}
