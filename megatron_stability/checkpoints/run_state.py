"""`state.json` in the ledger's folder: what a supervisor should do when the run has ended, and its next start will.

torchrun returns 1 whatever a worker's exit code was, so the code alone does not reach a supervisor. Rank 0 replaces the
file atomically at every change of `status`:

    running    training; found after the process has gone, it ended before its last step, as the exit code says
    finished   every step was taken and the process ended by itself
    rewind     start again: the newest good checkpoint is the one to go back to, and `pass_over` is what to leave out
    halt       don't start again until someone has looked
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_stability import files
from megatron_stability.checkpoints.lineage import Place
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import Said, strict

FILE = "state.json"
SCHEMA = 1


class Rewound(BaseModel):
    """The last rewind: a start from its checkpoint, or an older one, takes these over, since they are newer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    to_step: int
    to_sample: int
    attempt: int
    policy: dict[str, Any]  # its budgets just after the decision
    scales: dict[str, Any]  # of learning rate and weight decay


class Attempt(BaseModel):
    """Starts from one checkpoint that withheld their first step and have applied none since."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: Place
    starts: int


class RunState(BaseModel):
    """The content of `state.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA
    status: Literal["running", "finished", "rewind", "halt"] = "running"
    step: int = 0  # of the decision, 1-based
    reason: Said = ""
    exit_code: int | None = None  # of the worker, where it ends by the decision
    rewound: Rewound | None = None
    attempt: Attempt | None = None
    pass_over: dict[str, Any] = {"windows": [], "met": []}  # `PassOver.state_dict`


def at_the_end(state: RunState, step: int, steps: int | None, error: BaseException | None) -> RunState:
    """The state as a process leaves it.

    Args:
        state: as it is.
        step: the last that was computed; 0 where there was none.
        steps: of the whole run; None where nobody knows.
        error: what ends the process, an exit included; None where its program came to its end.

    Returns:
        "finished" where a run that was training took its last step and nothing went wrong after it; else as it was.
    """
    clean = error is None or (isinstance(error, SystemExit) and not error.code)
    done = state.status == "running" and steps is not None and step >= steps > 0
    return state.model_copy(update={"status": "finished", "step": step}) if clean and done else state


def read(folder: Path) -> RunState | None:
    """The state in a ledger's folder; None where there is none.

    Raises:
        UsageError: the file can't be read as one.
    """
    path = folder / FILE
    try:
        return RunState.model_validate_json(files.read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        raise UsageError(f"{path}: is not a run's state; restore it, or remove it to forget its rewinds") from None


def write(folder: Path, state: RunState) -> None:
    """Replace the file, atomically and on stable storage.

    Raises:
        OSError: it can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(strict(state.model_dump(mode="json")), indent=1, allow_nan=False)
    files.write_atomically(folder / FILE, text.encode())
