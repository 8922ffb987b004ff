"""The watcher against real processes: stopped, killed, and with no space left; and what reaches a person."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import RawIOBase
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.cli import main
from megatron_stability.decide.episodes import sentence
from megatron_stability.errors import UsageError
from megatron_stability.ledger.ledger import Ledger
from megatron_stability.records import Action, Change, Episode, Tier
from megatron_stability.watch import command
from megatron_stability.watch.findings import Finding, Kind
from megatron_stability.watch.follow import Follower, folder_of
from megatron_stability.watch.heartbeat import Heartbeat, beats
from megatron_stability.watch.run import WatchedRun
from tests.unit.watch import writer

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 1.0  # seconds after which the tests' runs stall


class Inbox:
    """What arrived over HTTP: messages by POST, pings by GET."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.pings = 0
        self.refuses = False
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not inbox.refuses:
                    inbox.messages.append(body)
                self.send_response(503 if inbox.refuses else 200)
                self.end_headers()

            def do_GET(self) -> None:
                inbox.pings += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def at(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    @property
    def text(self) -> str:
        return "\n".join(message["message"] for message in self.messages)


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.server.shutdown()
    made.server.server_close()


@contextmanager
def training(folder: Path, steps: int = 100_000, seconds: float = 0.02) -> Iterator[subprocess.Popen[str]]:
    """A process that trains, once it has done some steps."""
    argv = [sys.executable, "-m", "tests.unit.watch.writer", str(folder), str(steps), str(seconds)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        try:
            yield process
        finally:
            process.kill()
            process.send_signal(signal.SIGCONT)


def watcher(folder: Path, inbox: Inbox, *flags: str) -> command.Watcher:
    argv = [str(folder), "--notify", f"json://{inbox.at}/", "--stall", str(LIMIT), "--node-limit", str(LIMIT), *flags]
    options = command.parser().parse_args(argv)
    runs = [WatchedRun(str(path), folder_of(path)) for path in options.runs]
    return command.Watcher(options, runs, command.limits_of(options))


def two_looks_after(limit: float, watching: command.Watcher) -> list[Finding]:
    """What the second look finds, of two that come once the limit has passed since what was written was seen."""
    watching.step(time.time())
    time.sleep(limit + 0.2)
    watching.step(time.time())
    return watching.step(time.time())


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_stopped_or_killed_rank_0_is_told_within_two_intervals(
    number: signal.Signals, tmp_path: Path, inbox: Inbox
) -> None:
    with training(tmp_path) as process:
        watching = watcher(tmp_path, inbox)
        assert watching.step(time.time()) == []
        process.send_signal(number)
        found = two_looks_after(LIMIT, watching)
    assert {each.kind for each in found} == {Kind.STALL, Kind.NODE}
    assert len(inbox.messages) == 1
    assert "no step has ended for" in inbox.text
    assert "1 of 1 nodes, node1 (rank 0, step" in inbox.text


def test_a_hang_in_which_every_process_lives_is_told_apart(tmp_path: Path, inbox: Inbox) -> None:
    with training(tmp_path, steps=7, seconds=0.0001) as process:
        process.wait()
        heart = Heartbeat(tmp_path, rank=0, seconds=0.05, node="node1")
        heart.begin()  # lives, and no step ends
        time.sleep(0.2)
        watching = watcher(tmp_path, inbox)
        found = two_looks_after(LIMIT, watching)
        heart.close()
    assert [each.kind for each in found] == [Kind.STALL]
    assert "every node's first rank lives: a collective hangs" in inbox.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB of its own."""
    there = tmp_path / "disk"
    there.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(there)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"may not mount a file system: {mounted.stderr.strip()}")
    yield there
    subprocess.run(["umount", "-l", str(there)], check=True)


def _fill(stream: RawIOBase) -> None:
    while True:
        stream.write(b"x" * 512)


def test_a_full_file_system_is_told_from_outside_of_it(small_disk: Path, inbox: Inbox) -> None:
    with training(small_disk) as process:
        watching = watcher(small_disk, inbox)
        watching.step(time.time())
        with (small_disk / "checkpoint").open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
            _fill(stream)
        assert process.wait(timeout=60) != 0  # its ledger has no room for a line
        watching.step(time.time())
        found = two_looks_after(LIMIT, watching)
    assert {Kind.STORAGE, Kind.STALL} <= {each.kind for each in found}
    assert re.search(r"0 % of the file system of .* are free", inbox.text)
    assert "no step has ended" in inbox.text


def test_an_orderly_end_is_no_stall(tmp_path: Path, inbox: Inbox) -> None:
    with training(tmp_path, steps=20) as process:
        assert process.wait(timeout=60) == 0
    watching = watcher(tmp_path, inbox)
    assert two_looks_after(LIMIT, watching) == []
    assert inbox.messages == []


def test_an_exception_is_no_orderly_end(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        writer.step(ledger, 1)
    heart = Heartbeat(tmp_path, rank=8, node="node2")
    heart.begin()
    with pytest.raises(ValueError), _closing(heart):
        raise ValueError("a sentence of the training text")
    beat = beats(tmp_path)["node2"]
    assert (beat.state, beat.error) == ("failed", "ValueError")
    (found,) = _findings(tmp_path)
    assert found.text == "rank 8 on node2 failed after step 0 (ValueError); its log says more"


@contextmanager
def _closing(heart: Heartbeat) -> Iterator[None]:
    try:
        yield
    finally:
        heart.close()


def _findings(folder: Path, began: float | None = None) -> list[Finding]:
    run = WatchedRun("runs/a", folder)
    run.look()
    options = command.parser().parse_args([str(folder)])
    return command.checks.findings(run, command.limits_of(options), time.time() if began is None else began)


def _episode(**fields: Any) -> Episode:
    values = {"incident": 4, "detector": "loss_spike", "first_step": 4, "last_step": 6, "tier": Tier.LARGE}
    values |= {"value": 9.0, "threshold": 3.0, "verdicts": 3, "grave": 3, "reason": "the loss is 9, above 3"}
    return Episode(**(values | fields))


def test_an_incident_that_pages_is_told_with_its_summary_and_command(tmp_path: Path, inbox: Inbox) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        writer.step(ledger, 1)
        watching = watcher(tmp_path, inbox, "--stall", "1000")
        assert watching.step(time.time()) == []
        writer.step(ledger, 2, Action.SKIP, "one step was withheld")
        watching.step(time.time())
        assert inbox.messages == []  # a single step waits for the digest
        ledger.write_episode(Change.WORSENED, _episode())
        for _ in range(3):
            watching.step(time.time())
    assert len(inbox.messages) == 1
    assert f"incident 4: {sentence(Change.WORSENED, _episode())}" in inbox.text
    assert f"Next: megatron-stability incident {tmp_path} 4" in inbox.text


def test_a_halt_is_told_and_a_new_process_ends_it(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        writer.step(ledger, 1, Action.HALT, "too many skips")
        ledger.ending(1, 18, "too many skips")
    texts = [each.text for each in _findings(tmp_path)]
    assert texts == [
        "the run left after step 1 with exit code 18: too many skips",
        "incident 1: step 1 HALT: too many skips",
    ]
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO):
        assert [each.kind for each in _findings(tmp_path)] == [Kind.INCIDENT]
        assert _findings(tmp_path, began=time.time() + 3600) == []  # what was over long before is not told


def test_nan_that_stays(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        for number in (1, 2):
            writer.step(ledger, number, loss=float("nan"))
        assert _findings(tmp_path) == []
        writer.step(ledger, 3, loss=float("inf"))
        assert [each.kind for each in _findings(tmp_path)] == [Kind.NON_FINITE]


def test_checkpoints_that_fail_or_do_not_come(tmp_path: Path) -> None:
    folder = tmp_path / "stability"
    with Ledger.open(folder, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        for number in range(1, 60):
            writer.step(ledger, number)
            if number in (10, 20, 30):
                ledger.saving(number)
                (tmp_path / f"iter_{number:07d}").mkdir()
                (tmp_path / f"iter_{number:07d}" / "stability_complete").touch()
        (late,) = _findings(folder)
        assert late.text == "no checkpoint since step 30, where one was begun every 10 steps; now 59"
        ledger.saving(59)
        run = WatchedRun("a", folder)
        run.look()
        assert run.saving is not None
        save = command.Limits(save=1e-9)
        (found,) = command.checks.findings(run, save, time.time())
        assert re.fullmatch(r"the checkpoint of step 59 was begun \d+ s ago and is not complete", found.text)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("59")  # Megatron's, where there is no manifest
        assert command.checks.findings(run, save, time.time()) == []


def test_the_dead_mans_switch_is_let_go_when_messages_do_not_arrive(tmp_path: Path, inbox: Inbox) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        writer.step(ledger, 1)
    watching = watcher(tmp_path, inbox, "--dead-man", f"http://{inbox.at}/ping", "--stall", "1000")
    watching.step(time.time())
    _until(lambda: inbox.pings == 1)
    inbox.refuses = True
    for number in range(2, 4):
        watching._dead_man._last = None  # a minute later
        with Ledger.open(tmp_path, resume_step=number, resume_sample=0, run_info=writer.INFO) as ledger:
            ledger.ending(number, 18, "halted")
        watching.step(time.time())
    time.sleep(0.2)
    assert inbox.pings == 1


def _until(true: Callable[[], bool]) -> None:
    for _ in range(200):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("did not come true in 10 s")


def test_a_ledger_is_followed_through_torn_and_damaged_lines_and_a_new_file(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        writer.step(ledger, 1)
        assert [each.kind for each in follower.new()] == ["run", "step"]
        assert list(follower.new()) == []
        path = tmp_path / "ledger.jsonl"
        whole = path.read_bytes()
        with path.open("ab") as stream:
            stream.write(b'{"kind":"step","to')
        assert list(follower.new()) == []
        with path.open("ab") as stream:
            stream.write(b"rn\n")
        writer.step(ledger, 2)
        assert [each.step for each in follower.new()] == [2]
        assert follower.damaged == 1
    (tmp_path / "other").write_bytes(whole)
    os.replace(tmp_path / "other", path)
    assert [each.kind for each in follower.new()] == ["run", "step"]


def test_once_prints_and_says_by_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        writer.step(ledger, 1)
        writer.step(ledger, 2)
        assert main(["watch", str(tmp_path), "--once"]) == 0
        assert "nothing is wrong" in capsys.readouterr().out
        ledger.write_episode(Change.OPENED, _episode())
        assert main(["watch", str(tmp_path), "--once", "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["step"], told["open_episodes"], told["over"]) == (2, ["loss_spike"], False)
    assert main(["watch", str(tmp_path / "nowhere"), "--once"]) == 2
    assert "holds no ledger.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--notify", "nothing://x"], "--notify: apprise knows no service `nothing://"),
        (["--notify-file", "nowhere"], "--notify-file: nowhere is no file"),
        (["--dead-man", "file:///etc/passwd"], "--dead-man: is no http"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(flags: list[str], sentence: str, tmp_path: Path) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO):
        pass
    with pytest.raises(UsageError, match=re.escape(sentence)):
        command.run([str(tmp_path), *flags])


def test_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        ledger.ending(0, 18, "halted")
    argv = [sys.executable, "-m", "megatron_stability", "watch", str(tmp_path), "--interval", "60"]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "exit code 18" in process.stderr.readline()
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_on_a_terminal_it_shows_the_run(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        for number in range(1, 8):
            writer.step(ledger, number, loss=2.125)
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "megatron_stability", "watch", str(tmp_path), "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "30"}
    with subprocess.Popen(argv, cwd=ROOT, stdout=theirs, stdin=theirs, stderr=theirs, env=environment) as process:
        shown = b""
        while b"nothing is wrong" not in shown:
            assert select.select([ours], [], [], 60)[0], shown
            shown += os.read(ours, 4096)
        process.terminate()
        assert process.wait(timeout=30) == 0
    os.close(ours)
    os.close(theirs)
    assert b"2.125" in shown


def test_it_needs_neither_torch_nor_megatron() -> None:
    told = "import sys, megatron_stability.watch.command as c, megatron_stability.watch.metrics; "
    told += "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
