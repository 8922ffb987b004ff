"""Bad input: exit code 2, one readable line, no traceback, nothing written; ours judges before a rank is started."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stability import cli
from megatron_stability.data import index as data_index
from megatron_stability.megatron.start import input_checks
from megatron_stability.megatron.start.job import Job
from megatron_stability.megatron.start.ranks import without_usage
from tests.dist.pool import Context, Pool

TINY = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "2"),
    *("--lr", "1e-3", "--mock-data", "--vocab-size", "127"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; nothing may be added to it, and no environment of a launcher is inherited."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def _listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_size) for path in folder.rglob("*"))


def _refused(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str, nproc: int = 1) -> str:
    """What `pretrain` says: one line, and the folder is as it was."""
    before, imported = _listing(folder), "megatron.core" in sys.modules
    code = cli.main(["pretrain", "--nproc", str(nproc), "--cpu", *TINY, *flags])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("megatron-stability pretrain: ")
    assert _listing(folder) == before
    assert ("megatron.core" in sys.modules) == imported
    return err


@pytest.mark.parametrize(
    ("flags", "nproc", "said"),
    [
        (("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"), 3, "--nproc 4"),
        (("--tensor-model-parallel-size", "0"), 1, "at least 1"),
        (("--expert-model-parallel-size", "3", "--num-experts", "3"), 2, "--expert-model-parallel-size 3"),
        (("--num-experts", "2", "--moe-router-topk", "4"), 1, "--moe-router-topk 4"),
        (("--group-query-attention", "--num-query-groups", "3"), 1, "--num-query-groups 3"),
        (("--context-parallel-size", "2", "--seq-length", "30"), 2, "--seq-length 30"),
        (("--tensor-model-parallel-size", "2", "--sequence-parallel", "--seq-length", "31"), 2, "--seq-length 31"),
        (("--num-layers", "0"), 1, "--num-layers 0"),
        (("--data-args-path", "nowhere"), 1, "--data-args-path nowhere"),
        (("--num-layers",), 1, "--num-layers: expected one argument"),
        (("--nproc", "two"), 1, "invalid int value"),
        (("--stability-config", ""), 1, "--stability-config is empty"),
        ((), 0, "--nproc 0"),
        ((), 99999999, "--nproc 99999999"),
        (("--tensor-model-parallel-size", "2"), -1, "--nproc -1"),
        (("--stability-mode", "akt"), 1, "--stability-mode"),
        (("--stability-config", "missing.yaml"), 1, "missing.yaml"),
        (("--data-path", "nowhere"), 1, "prepare-data"),
        (("--save", "/proc/1/nowhere"), 1, "--save"),
        (("--stability-record-dir", "/dev/null/x"), 1, "not a folder"),
    ],
)
def test_refused_before_megatron_is_imported(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], nproc: int, said: str
) -> None:
    assert said in _refused(folder, capsys, *flags, nproc=nproc)


def test_a_wrong_yaml_key_gets_a_suggestion(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "stability.yaml").write_text("detect:\n  grad_norm_spike: {ratoi: 3}\n")
    said = _refused(folder, capsys, "--stability-config", "stability.yaml")
    assert "detect.grad_norm_spike.ratoi" in said
    assert "detect.grad_norm_spike.ratio`?" in said


def test_of_a_scripts_parser_the_error_alone_is_shown() -> None:
    said = (
        "a warning\nusage: script.py [-h]\n                 [--lr LR]\nscript.py: error: unrecognized arguments: --x\n"
    )
    assert without_usage(said) == "a warning\nscript.py: error: unrecognized arguments: --x\n"
    assert without_usage("usage: of memory is high\nand more\n") == "usage: of memory is high\nand more\n"


def test_a_file_stands_where_the_output_folder_should(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out").write_text("a file")
    assert "not a folder" in _refused(folder, capsys, "--save", "out")
    assert "not a folder" in _refused(folder, capsys, "--tensorboard-dir", "out/deeper")


def _dataset(folder: Path) -> tuple[Path, Path]:
    """Two documents of 3 and 2 tokens, int32, in Megatron's format."""
    index, data = folder / "text.idx", folder / "text.bin"
    data.write_bytes(struct.pack("<5i", *range(5)))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
    index.write_bytes(head + struct.pack("<2i2q3q", 3, 2, 0, 12, 0, 1, 2))
    assert data_index.read("--data-path", str(folder / "text")).tokens(0, 2) == 5
    return index, data


@pytest.mark.parametrize("damage", ["cut index", "index of no length", "not an index", "endless index", "short data"])
def test_damaged_data_files(folder: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    index, data = _dataset(folder)
    if damage == "cut index":
        index.write_bytes(index.read_bytes()[:-5])
    elif damage == "index of no length":
        index.write_bytes(b"")
    elif damage == "not an index":
        index.write_bytes(b"PK" + index.read_bytes()[2:])
    elif damage == "endless index":
        index.write_bytes(index.read_bytes()[:18] + struct.pack("<QQ", 2**62, 3) + index.read_bytes()[34:])
    else:
        data.write_bytes(data.read_bytes()[:-1])
    said = _refused(folder, capsys, "--data-path", "1.0", "text")
    assert (data.name if damage == "short data" else index.name) in said


def test_a_cut_data_set_is_named_whatever_names_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM#725, #1343."""
    _, data = _dataset(folder)
    data.write_bytes(data.read_bytes()[:-4])
    (folder / "list").write_text("0.5 text 0.5 text")
    (folder / "list.json").write_text('{"train": ["text"], "valid": null, "test": null}')
    for flag, word in (
        ("--data-args-path", "list"),
        ("--per-split-data-args-path", "list.json"),
        ("--train-data-path", "text"),
    ):
        said = _refused(folder, capsys, flag, word)
        assert f"{flag} text: text.bin has 16 bytes where its index says 20" in said


def test_a_split_that_megatron_would_wait_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _dataset(folder)
    said = _refused(folder, capsys, "--data-path", "text", "--split", "9999,8,2")
    assert "--split 9999,8,2: the validation split would be empty, for text has 2 documents" in said
    assert "give --split 1,1,0" in said


def test_an_index_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index, _ = _dataset(folder)
    index.unlink()
    index.symlink_to("/proc/self/mem")  # a regular file whose first byte can't be read, by root either
    assert "--data-path text: its files can't be read" in _refused(folder, capsys, "--data-path", "text")


def test_an_occupied_port(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        assert f"MASTER_PORT={port}" in _refused(folder, capsys)
    monkeypatch.setenv("MASTER_PORT", "a port")
    assert "is not a port" in _refused(folder, capsys)


@pytest.mark.parametrize("size", [None, "", "two", "0"])
def test_a_rank_left_in_the_environment(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, size: str | None
) -> None:
    monkeypatch.setenv("RANK", "0")
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert cli.main(["pretrain", "--cpu", *TINY]) == 2
    assert "WORLD_SIZE" in capsys.readouterr().err


def complaint(context: Context, flags: tuple[str, ...]) -> str | None:
    from megatron_stability.megatron import cpu

    return input_checks.complaint_about_arguments(Job((*cpu.FLAGS, *TINY, *flags), None, True, True), world=2)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--train-itres", "3"), "did you mean --train-iters?"),
        (("--stability-mod", "act"), "did you mean --stability-mode?"),
        (("--pipeline-model-parallel-size", "2", "--num-layers", "3"), "refuses these arguments"),
        (("--tensor-model-parallel-size", "2", "--num-attention-heads", "3", "--hidden-size", "33"), "refuses"),
        (("--global-batch-size", "3"), "refuses these arguments"),
        (("--lr", "fast"), "--lr"),
        (("--clip-grad", "nan"), "--clip-grad nan"),
        (("--train-iters", "-2"), "--train-iters"),
        (("--drill-fault", "nan"), "KIND"),
        (("--fp16", "--stability-mode", "act"), "--fp16"),
        (("--sft",), "--sft"),
        (("--dataloader-type", "external"), "--dataloader-type external is not carried"),
        (("--rampup-batch-size", "2", "2", "16"), "--step-batch-size-schedule"),
        (("--eval-iters", "0"), "--eval-interval is missing"),
        (("stray",), "'stray'"),
    ],
)
def test_what_megatron_would_refuse(pools: dict[tuple[str, str], Pool], flags: tuple[str, ...], said: str) -> None:
    (answer,) = pools["0.19.2", "patched"].run(complaint, flags, world=1, timeout=60)
    assert answer is not None
    assert said in answer
    assert "\n" not in answer


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.megatron
def test_the_launcher_says_it_once(folder: Path) -> None:
    """The whole way: a flag that only Megatron's parser can judge, and two ranks that are never started."""
    ran = _run(folder, "-m", "megatron_stability.cli", "pretrain", "--nproc", "2", "--cpu", *TINY, "--train-itres", "3")
    said = [line for line in ran.stderr.splitlines() if line.startswith("megatron-stability pretrain:")]
    assert ran.returncode == 2
    assert said == ["megatron-stability pretrain: unknown flag --train-itres; did you mean --train-iters?"]
    assert "Traceback" not in ran.stderr + ran.stdout
    assert _listing(folder) == []


@pytest.mark.megatron
def test_under_torchrun_each_worker_ends_with_2_and_rank_0_speaks(folder: Path) -> None:
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--log-dir",
        "logs",
        "--redirects",
        "3",
    )
    late = '[ "$RANK" != 0 ] || sleep 5; exec "$0" -m megatron_stability.cli pretrain --cpu "$@"'
    worker = ("--no-python", "bash", "-c", late, sys.executable, *TINY, "--tensor-model-parallel-size", "4")
    ran = _run(folder, *torchrun, *worker)
    assert ran.returncode == 1
    assert "exitcode  : 2" in ran.stderr
    workers = {path.parent.name: path.read_text() for path in (folder / "logs").rglob("stderr.log")}
    assert "2 ranks can't hold --tensor-model-parallel-size 4" in workers["0"]
    assert "Traceback" not in workers["0"] + workers["1"]
    assert [text.count("megatron-stability pretrain:") for _, text in sorted(workers.items())] == [1, 0]
