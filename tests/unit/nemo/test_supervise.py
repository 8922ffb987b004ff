"""The supervisor of a run under Megatron-Bridge, with a stand-in for torchrun that always ends with code 1."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.checkpoints import manifest
from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.errors import EXIT_HALTED, EXIT_REWIND
from megatron_stability.nemo.supervise import SIGNALS, supervise

RUN = """
import json, pathlib, sys
ledger, script = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
log = ledger / "starts.json"
starts = json.loads(log.read_text()) if log.exists() else []
log.write_text(json.dumps([*starts, sys.argv[3:]]))
state, code = script[len(starts)]
if state is not None:
    (ledger / "state.json").write_text(json.dumps(state))
sys.exit(code)
"""


def rewind(step: int, to_step: int, attempt: int = 1) -> dict[str, Any]:
    rewound = {"to_step": to_step, "to_sample": 0, "attempt": attempt, "policy": {}, "scales": {}}
    return {"status": "rewind", "step": step, "reason": "NaN", "exit_code": EXIT_REWIND, "rewound": rewound}


def starts(tmp_path: Path, script: list[Any], attempts: int = 3, saved: tuple[int, ...] = (2, 4, 6)) -> tuple[int, Any]:
    """Supervise runs that leave, one after the other, these states and exit codes; what each start was given more."""
    for step in saved:
        folder = tmp_path / f"iter_{step:07d}"
        folder.mkdir()
        manifest.write(folder, Manifest(step=step, samples=step, tokens=step))
    command = (sys.executable, "-c", RUN, str(tmp_path), json.dumps(script))
    code = supervise(command, tmp_path, tmp_path, attempts)
    return code, json.loads((tmp_path / "starts.json").read_text())


def at(tmp_path: Path, step: int) -> list[str]:
    return [f"checkpoint.load={tmp_path}", f"checkpoint.ckpt_step={step}"]


def test_a_rewind_starts_again_from_its_checkpoint(tmp_path: Path) -> None:
    code, seen = starts(tmp_path, [(rewind(5, 4), 1), ({"status": "running"}, 0)])
    assert (code, seen) == (0, [[], at(tmp_path, 4)])


def test_a_start_that_came_to_nothing_is_followed_by_one_further_back(tmp_path: Path) -> None:
    script = [(rewind(7, 6), 1), (None, 1), (None, 1), ({"status": "running"}, 0)]
    code, seen = starts(tmp_path, script)
    assert (code, seen) == (0, [[], *(at(tmp_path, step) for step in (6, 4, 2))])


def test_each_rewind_counts_and_there_is_a_last_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = [(rewind(7, 6), 1), (rewind(7, 4, 2), 1), (rewind(7, 2, 3), 1)]
    code, seen = starts(tmp_path, script, attempts=2)
    assert (code, seen) == (EXIT_REWIND, [[], at(tmp_path, 6), at(tmp_path, 4)])
    assert "attempt 2 of 2: rewind in step 7: NaN" in capfd.readouterr().err


def test_nothing_to_go_back_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, seen = starts(tmp_path, [(rewind(5, 4), 1)], saved=())
    assert (code, seen) == (EXIT_REWIND, [[]])
    assert "no complete checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("state", "code", "answer"),
    [
        ({"status": "halt", "step": 3, "reason": "too many skips"}, 1, EXIT_HALTED),
        ({"status": "running"}, 7, 7),
        (None, 2, 2),
    ],
)
def test_a_halt_a_crash_and_bad_input_are_not_started_again(tmp_path: Path, state: Any, code: int, answer: int) -> None:
    assert starts(tmp_path, [(state, code)]) == (answer, [[]])


def test_a_rewind_of_an_earlier_job_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(rewind(5, 4)))
    assert starts(tmp_path, [({"status": "running"}, 0)]) == (0, [at(tmp_path, 4)])


ASKED = """
import pathlib, signal, sys
from megatron_stability.nemo.supervise import SIGNALS
ledger = pathlib.Path(sys.argv[1])
got = []
for number in SIGNALS:
    signal.signal(number, lambda number, frame: got.append(int(number)))
with (ledger / "starts").open("a") as log:
    log.write("start ")
(ledger / "ready").touch()
while not got:
    signal.sigtimedwait([], 0.01)
(ledger / "got").write_text(str(got))
sys.exit(3)
"""
SUPERVISOR = """
import pathlib, signal, sys
from megatron_stability.nemo.supervise import SIGNALS, supervise
before = [signal.getsignal(number) for number in SIGNALS]
folder = pathlib.Path(sys.argv[1])
code = supervise((sys.executable, "-c", sys.argv[2], str(folder)), folder, folder, 3)
assert [signal.getsignal(number) for number in SIGNALS] == before, "the handlers are not what they were"
sys.exit(code)
"""


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_passed_on_and_nothing_is_started_after_it(tmp_path: Path, number: signal.Signals) -> None:
    """Not even though a rewind is asked for: who ends a job wants it ended."""
    folder = tmp_path / "iter_0000004"
    folder.mkdir()
    manifest.write(folder, Manifest(step=4, samples=4, tokens=4))
    (tmp_path / "state.json").write_text(json.dumps(rewind(5, 4)))
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), ASKED]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as supervisor:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "ready").exists():
                assert supervisor.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            supervisor.send_signal(number)
            _, said = supervisor.communicate(timeout=60)
        finally:
            supervisor.kill()
    assert supervisor.returncode == 3, said
    assert json.loads((tmp_path / "got").read_text()) == [int(number)]
    assert (tmp_path / "starts").read_text() == "start "


def test_a_run_that_a_signal_killed_has_the_shells_code(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert supervise(command, tmp_path, tmp_path, 0) == 137
