"""Start a run again after each rewind: torchrun hides the ranks' exit codes, so `state.json` says what is to be done.

One supervisor a node, around that node's torchrun. All read the same file on the shared disk; a run can't begin, and so
can't change the file, before every node has started again. Needs neither torch nor Megatron.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_stability.checkpoints import generations, run_state
from megatron_stability.checkpoints.run_state import RunState
from megatron_stability.errors import EXIT_HALTED, EXIT_REWIND

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def supervise(command: Sequence[str], save: Path, ledger: Path, attempts: int) -> int:
    """Run the command, and again from an older checkpoint as long as its policy rewinds.

    Args:
        command: of one start; overrides are added at its end, in Bridge's grammar.
        save: `checkpoint.save`; what is gone back to lies there.
        ledger: the folder of the ledger and of `state.json`.
        attempts: restarts, at most.

    Returns:
        0 where the run has finished, 18 where its policy halted it, 19 where it would rewind once more than allowed or
        has nothing to go back to, else the command's own code.

    Raises:
        UsageError: `state.json` is damaged.
    """
    before, to_step = run_state.read(ledger), None
    for attempt in range(attempts + 1):
        to_step = _target(save, before, to_step)
        if to_step is None and before is not None and before.status == "rewind":
            _say(f"{save} holds no complete checkpoint to go back to")
            return EXIT_REWIND
        code, asked_to_end = _run([*command, *_overrides(save, to_step)])
        after = run_state.read(ledger)
        if after is None or after.status in ("running", "finished") or asked_to_end:
            return code
        if after.status == "halt":
            _say(f"the policy halted the run in step {after.step}: {after.reason}")
            return EXIT_HALTED
        if after != before:
            to_step = None  # it came as far as a rewind of its own; else it died before its first step: go further back
        before = after
        _say(f"attempt {attempt + 1} of {attempts}: rewind in step {after.step}: {after.reason}")
    return EXIT_REWIND


def _target(save: Path, state: RunState | None, failed: int | None) -> int | None:
    """The step to start from: the rewind's own, or the next older one where a start from `failed` came to nothing."""
    if state is None or state.status != "rewind" or state.rewound is None:
        return None
    newest = state.rewound.to_step if failed is None else failed - 1
    return next((each.step for each in generations.candidates(save) if each.step <= newest), None)


def _overrides(save: Path, step: int | None) -> list[str]:
    return [] if step is None else [f"checkpoint.load={save}", f"checkpoint.ckpt_step={step}"]


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """The exit code, and whether this process was asked to end meanwhile; signals are passed on."""
    asked: list[int] = []
    with subprocess.Popen(command) as child:

        def pass_on(number: int, frame: object) -> None:
            asked.append(number)
            child.send_signal(number)

        handlers = {number: signal.signal(number, pass_on) for number in SIGNALS}
        try:
            code = child.wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return (code if code >= 0 else 128 - code), bool(asked)


def _say(text: str) -> None:
    print(f"megatron-stability nemo: {text}", file=sys.stderr, flush=True)
