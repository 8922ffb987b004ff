"""Every file that we read, damaged in ways drawn by a fixed seed: a value or one sentence, in bounded time and memory.

Each reader is tried in a forked process of its own, which has a limit on its memory and an audit hook: what it opens
lies in its folder (or is a library's), and it starts, renames and removes nothing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing as mp
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_stability import config, doctor, yaml_text
from megatron_stability.checkpoints import dcp_metadata, generations, manifest, run_state
from megatron_stability.data import blends, fingerprint, index, sources, tokenizers
from megatron_stability.errors import UsageError
from megatron_stability.ledger import bundle, entries, sketches
from megatron_stability.report.runview import RunView
from tests import effort
from tests.unit.checkpoints.checkpoint_maker import complete

EXAMPLES = effort.examples(40, 400)
EXAMPLE_S, ALL_S = 5, 100  # seconds for one example, and for all of a reader
MEMORY = 1 << 30  # bytes of address space beyond what the process has
NASTY = (
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"- " * 3000, b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b]0;x\x07"),
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"9" * 30, b"9" * 5000, b"0x" + b"f" * 5000, b"null", b"true", b"[]"),
    *(b'"../../etc/passwd"', b'"/etc/passwd"', b'"/dev/zero"', b'""', b'"\\ud800"', b"{}", b"&a [*a, *a]", b"*a"),
    *(
        b"!!python/object/apply:os.system [true]",
        b"<<: *a",
        b"? *a",
        b"2020-99-99",
        b"1:99:99",
        b"%TAG ! x",
        b"\n---\n",
    ),
    *(b"${oc.env:HOME}", b"cposix\nsystem\n", b"\x80\x04\x95", b"r\xff\xff\xff\x7f", b"\n", b"\r", b'"', b",", b":"),
)


# --- damage -----------------------------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, seed: bytes) -> bytes:
    """Bytes like the seed's: some changed, cut, doubled, or with something nasty in between."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(("nasty", "nasty", "flip", "cut", "double", "end", "any")))
        if kind == "nasty":
            data[at : draw(st.sampled_from((at, to)))] = draw(st.sampled_from(NASTY))
        elif kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:to]
        elif kind == "double":
            data[at:at] = data[at:to] * draw(st.integers(1, 50))
        elif kind == "end":
            del data[at:]
        elif kind == "any":
            data[at:to] = draw(st.binary(max_size=20))
    return bytes(data)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from((2**31, 2**63, -(2**63), 10**25, -1, 0)),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ("", ".", "..", "../x", "/etc/passwd", "/dev/zero", "a" * 300, "a/" * 3000, "\x1b[2J", "inf", "nan")
    ),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@st.composite
def misshapen(draw: st.DrawFn, seed: Any) -> bytes:
    """JSON of the seed's form, in which some values are others."""
    return json.dumps(_with_others(draw, seed, draw(st.integers(1, 3)))).encode()


def _with_others(draw: st.DrawFn, value: Any, left: int) -> Any:
    if left and isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        inner = draw(VALUES) if draw(st.booleans()) else _with_others(draw, value[key], 1)
        name = draw(st.sampled_from((key, key, key, "../x", "/etc/passwd", "", "\x00", "x\x1b[2J")))
        rest = {other: item for other, item in value.items() if other != key}
        return _with_others(draw, {**rest, name: inner}, left - 1)
    if left and isinstance(value, list) and value:
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _with_others(draw, value[at], 1), *value[at + 1 :]]
    return draw(VALUES) if left else value


# --- readers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """What is read, from which good bytes the damage begins, and how it is put into its folder and read."""

    name: str
    seed: Callable[[Path], bytes]
    read: Callable[[Path, bytes], object]
    share: float = 1.0  # of the examples, where one takes long
    sealed: bool = False  # its form is JSON, and `read` gives it a right checksum


def _file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def put_and_read(folder: Path, data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(folder)

    return put_and_read


def _sealed_manifest(folder: Path, data: bytes) -> object:
    place = folder / "iter_0000005"
    (place / manifest.MANIFEST).write_bytes(data)
    (place / manifest.MARKER).write_bytes(manifest._seal(data))
    return str(generations.generation(place, full=True))


def _marker(folder: Path, data: bytes) -> object:
    (folder / "iter_0000005" / manifest.MARKER).write_bytes(data)
    return str(generations.newest_good(folder))


def _tracker(folder: Path, data: bytes) -> object:
    (folder / generations.TRACKER).write_bytes(data)
    return generations.read_tracker(folder), generations.repair_tracker(folder)


def _suspect(folder: Path, data: bytes) -> object:
    (folder / "iter_0000005" / manifest.SUSPECT).write_bytes(data)
    return str(generations.generation(folder / "iter_0000005"))


def _view(folder: Path) -> object:
    return RunView.from_ledger(folder).summary()


def _sealed_ledger(folder: Path, data: bytes) -> object:
    lines = json.loads(data)
    bodies = [json.dumps(line).encode()[:-1] for line in lines] if isinstance(lines, list) else [data]
    (folder / entries.FILE).write_bytes(b"".join(entries._sealed(body) for body in bodies))
    return _view(folder)


def _sealed_bundle(folder: Path, data: bytes) -> object:
    (folder / bundle.JSON).write_bytes(data)
    return bundle.read_bundle(folder)


def _sealed_tensors(folder: Path, data: bytes) -> object:
    (folder / bundle.TENSORS).write_bytes(data)
    text = json.loads((folder / bundle.JSON).read_bytes())
    (folder / bundle.JSON).write_text(json.dumps(text | {"tensors_xxh64": xxhash.xxh64_hexdigest(data)}))
    return bundle.read_tensors(folder)


def _metadata(folder: Path, data: bytes) -> object:
    place = folder / "iter_0000005"
    (place / dcp_metadata.FILE).write_bytes(data)
    return dcp_metadata.problem(place / dcp_metadata.FILE), dcp_metadata.reader(place).read_metadata()


def _index(folder: Path, data: bytes) -> object:
    (folder / "d.idx").write_bytes(data)
    (folder / "d.bin").write_bytes(bytes(6))
    found = index.read("--data-path", str(folder / "d"))
    found.refuse_wrong_sizes()
    return found.tokens(0, found.sequences)


def _sidecar(folder: Path, data: bytes) -> object:
    (folder / "d.idx").write_bytes(INDEX)
    (folder / "d.bin").write_bytes(bytes(6))
    (folder / "d.meta.json").write_bytes(data)
    return int(fingerprint._sidecar(index.read("--data-path", str(folder / "d"))).get(fingerprint.LARGEST, -1))


def _jsonl(folder: Path, data: bytes) -> object:
    (folder / "t.jsonl").write_bytes(data)
    return [list(sources.documents(each, "text")) for each in sources.discover([folder / "t.jsonl"], (), ())]


YAML = b"""mode: &m act
detect:
  loss_spike: {k: 6.0, window: 100}
  grad_norm_spike: &g
    ratio: 10
decide:
  rules:
    - {detector: loss_spike, tier: large, action: skip}
checkpoint: {allow_changes: [lr, train_iters], keep: 3}
"""
STATE = {
    "schema_version": 1,
    "status": "rewind",
    "step": 4,
    "reason": "r",
    "exit_code": 19,
    "pass_over": {"windows": []},
}
STATE["rewound"] = {"to_step": 2, "to_sample": 16, "attempt": 1, "policy": {"skips": 1}, "scales": {}}
RUN = {
    "kind": "run",
    "generation": 1,
    "schema_version": 1,
    "resumed_step": 0,
    "resumed_sample": 0,
    "versions": {"a": "1"},
}
STEP = {"kind": "step", "generation": 1, "step": 1, "first_sample": 0, "samples": 8, "tokens": 64.0, "loss": 2.0}
STEP |= {"grad_norm": 1.0, "learning_rate": 0.1, "fate": "trained", "action": "apply", "advised": "apply"}
SKIPPED = STEP | {
    "step": 2,
    "first_sample": 8,
    "fate": "skipped",
    "action": "skip",
    "reason": "r",
    "signals": {"a": 1.0},
}
UNDO = {"kind": "undo", "generation": 2, "from_step": 1, "from_sample": 8, "reason": "r"}
END = {"kind": "end", "generation": 2, "step": 1, "code": 3, "reason": "r"}
LEDGER = [RUN, STEP, SKIPPED, UNDO, END]
BUNDLE = {"schema_version": 1, "written": "now", "incident": SKIPPED, "before": [STEP], "context": {"args": {"lr": 1}}}
SKETCH = {"step": 1, "k": 1, "cut": ["1"], "weights": "AAAAAAAA8D8=", "gradients": "AAAAAAAA8D8="}
FP8 = {"step": 1, "recipe": "current", "emulated": True, "kernel": "torch"}
INDEX = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08" + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
INDEX += (3).to_bytes(4, "little") + bytes(8) + bytes(8) + (1).to_bytes(8, "little")

META = {fingerprint.LARGEST: 9, "sha256": {".idx": hashlib.sha256(INDEX).hexdigest(), ".bin": "0" * 64}}


def _of(value: Any) -> Callable[[Path], bytes]:
    return lambda folder: json.dumps(value).encode()


def _there(name: str) -> Callable[[Path], bytes]:
    return lambda folder: (folder / "iter_0000005" / name).read_bytes()


READERS = (
    Reader("yaml", lambda folder: YAML, _file("c.yaml", lambda folder: config.load(folder / "c.yaml")), 0.2),
    Reader("recipe's yaml", lambda folder: YAML, _file("r.yaml", lambda folder: _recipe(folder / "r.yaml")), 0.2),
    Reader("manifest", _there(manifest.MANIFEST), _sealed_manifest),
    Reader("manifest's values", _there(manifest.MANIFEST), _sealed_manifest, sealed=True),
    Reader("marker", _there(manifest.MARKER), _marker),
    Reader("tracker", lambda folder: b"5", _tracker),
    Reader("suspect", _of({"reason": "loss rose"}), _suspect),
    Reader(
        "ledger",
        lambda folder: b"".join(entries._sealed(json.dumps(e).encode()[:-1]) for e in LEDGER),
        _file(entries.FILE, _view),
    ),
    Reader("ledger's values", _of(LEDGER), _sealed_ledger, sealed=True),
    Reader("bundle", _of(BUNDLE), _sealed_bundle),
    Reader("bundle's values", _of(BUNDLE), _sealed_bundle, sealed=True),
    Reader("bundle's tensors", lambda folder: _tensors(folder), _sealed_tensors),
    Reader("state", _of(STATE), _file(run_state.FILE, run_state.read)),
    Reader("state's values", _of(STATE), _file(run_state.FILE, run_state.read), sealed=True),
    Reader("sketches", lambda folder: json.dumps(SKETCH).encode() + b"\n", _file(sketches.FILE, sketches.read)),
    Reader(
        "FP8 table",
        lambda folder: json.dumps(FP8).encode() + b"\n",
        _file("fp8.stage0.jsonl", lambda folder: doctor._recipe(folder / "fp8.stage0.jsonl")),
    ),
    Reader(
        "tokenizer's sidecar",
        _of({"eos_token": {"content": "</s>"}}),
        _file("tokenizer_config.json", lambda folder: tokenizers._eos_token_beside(folder / "t.json")),
    ),
    Reader("metadata", _there(dcp_metadata.FILE), _metadata),
    Reader("index", lambda folder: INDEX, _index),
    Reader("data's sidecar", _of(META), _sidecar),
    Reader("data's sidecar's values", _of(META), _sidecar, sealed=True),
    Reader(
        "blends",
        _of({"train": ["1", "d"], "valid": "d", "test": None}),
        _file("b.json", lambda folder: blends._per_split("--per-split-data-args-path", str(folder / "b.json"))),
        sealed=True,
    ),
    Reader("training text", lambda folder: b'{"text": "a"}\n{"text": "b"}\n', _jsonl),
)


def _recipe(path: Path) -> object:
    import yaml

    try:
        return yaml_text.read(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:  # as its caller tells it
        raise UsageError(str(error)) from None


def _tensors(folder: Path) -> bytes:
    import torch
    from safetensors.torch import save

    (folder / bundle.JSON).write_text(json.dumps(BUNDLE))
    return save({"tokens": torch.arange(4)})


# --- the trial --------------------------------------------------------------------------------------------------------


@contextmanager
def _watched(active: list[bool]) -> Iterator[None]:
    """A reader at work: the clock runs, and what it opens is looked at."""
    signal.setitimer(signal.ITIMER_REAL, EXAMPLE_S)
    active[0] = True
    try:
        yield
    finally:
        active[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def _watch(folder: Path, active: list[bool]) -> None:
    places = (sys.prefix, sys.base_prefix, str(Path(config.__file__).parents[1]))
    libraries = (*map(os.path.realpath, places), "/usr", "/lib", "/proc")
    inside = str(folder)
    changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not active[0]:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "os.fork"):
            raise AssertionError(f"{event} {arguments}")
        if event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "open"):
            path = arguments[1] if event == "os.rename" else arguments[0]
            if isinstance(path, int) or path is None:
                return
            name = os.path.realpath(os.fsdecode(path))
            reads = event == "open" and not (arguments[2] or 0) & changing
            allowed = (inside, "/dev/null", *libraries) if reads else (inside, "/dev/null")
            if not name.startswith(allowed):
                raise AssertionError(f"{event} {name}")

    sys.addaudithook(hook)


def _in_a_process(reader: Reader, folder: Path, failed: Any) -> None:
    try:
        _trial(reader, folder)
    except BaseException:
        failed.send(traceback.format_exc()[-6000:])
        os._exit(1)
    os._exit(0)


def _trial(reader: Reader, folder: Path) -> None:
    sys.dont_write_bytecode = True
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    signal.signal(signal.SIGALRM, _too_slow)
    seed = reader.seed(folder)
    good = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reader.read(folder, seed)  # what is not damaged is read
    active = [False]
    _watch(folder, active)
    drawn = misshapen(json.loads(seed)) if reader.sealed else damaged(seed)

    @settings(
        max_examples=int(EXAMPLES * reader.share),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def trial(data: bytes) -> None:
        for path, content in good.items():
            path.write_bytes(content)
        try:
            with _watched(active):
                reader.read(folder, data)
            said = ""
        except UsageError as error:
            said = str(error)
        assert len(said) < 5000
        assert not {"\x1b", "\x07"} & set(said), said

    trial()


def _too_slow(number: int, frame: object) -> None:
    raise TimeoutError(f"no end after {EXAMPLE_S} s")


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_whatever_a_file_holds_it_is_read_or_refused_in_one_sentence(reader: Reader, tmp_path: Path) -> None:
    complete(tmp_path, 5)
    mine, theirs = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_in_a_process, args=(reader, tmp_path, theirs))
    process.start()
    theirs.close()
    process.join(ALL_S)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"no end after {ALL_S} s")
    assert process.exitcode == 0, mine.recv() if process.exitcode == 1 else f"exit code {process.exitcode}"


def test_the_trial_itself_notices(tmp_path: Path) -> None:
    """A reader that follows a path, hangs, takes memory or lets an error through fails."""
    bad = {
        "follows": lambda folder, data: data.startswith(b"5") or Path("/etc/hostname").read_bytes(),
        "runs": lambda folder, data: data.startswith(b"5") or pickle.loads(b"cposix\nsystem\n(S'true'\ntR."),  # noqa: S301
        "takes": lambda folder, data: data.startswith(b"5") or bytearray(MEMORY * 2),
        "raises": lambda folder, data: int(data),
    }
    for name, read in bad.items():
        with pytest.raises(AssertionError):
            test_whatever_a_file_holds_it_is_read_or_refused_in_one_sentence(
                Reader(name, lambda folder: b"5", read), tmp_path / name
            )
