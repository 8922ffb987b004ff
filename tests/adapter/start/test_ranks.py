"""The ranks of one machine, without Megatron: how they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = """
import os, signal, subprocess, sys, time
from megatron_stability.megatron.start.ranks import Ranks

def rank(job, prepared):
    if sys.argv[2:]:  # as Bridge's writer of checkpoints
        open(f"{job}/{subprocess.Popen(['sleep', '300']).pid}", "w").close()
    open(f"{job}/{os.getpid()}", "w").close()
    time.sleep(300)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    with Ranks(2, fork=True) as ranks:
        sys.exit(ranks.run(rank, sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("how", "writers"), [(signal.SIGKILL, ()), (signal.SIGTERM, ()), (signal.SIGINT, ("writers",))], ids=str
)
def test_a_launcher_that_is_ended_takes_its_ranks_along(
    tmp_path: Path, how: signal.Signals, writers: tuple[str, ...]
) -> None:
    script, pids = tmp_path / "launcher.py", tmp_path / "pids"
    script.write_text(LAUNCHER)
    pids.mkdir()
    deadline = time.monotonic() + 60
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, str(script), str(pids), *writers], env=environment) as launcher:
        try:
            while len(list(pids.iterdir())) < 2 + 2 * len(writers):
                assert time.monotonic() < deadline
                assert launcher.poll() is None
                time.sleep(0.05)
        finally:
            launcher.send_signal(how)
    left = [int(path.name) for path in pids.iterdir()]
    try:
        while left := [pid for pid in left if _runs(pid)]:
            assert time.monotonic() < deadline, f"ranks {left} go on without their launcher"
            time.sleep(0.05)
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether it is there and no zombie; a container's init may reap late, or never."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
