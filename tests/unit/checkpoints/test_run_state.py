"""What `state.json` says once a process is gone."""

from __future__ import annotations

import pytest

from megatron_stability.checkpoints.run_state import RunState, at_the_end

RUNNING = RunState()


@pytest.mark.parametrize("error", [None, SystemExit(), SystemExit(0)])
def test_a_run_that_took_its_last_step_is_finished(error: BaseException | None) -> None:
    ended = at_the_end(RUNNING, 100, 100, error)
    assert (ended.status, ended.step) == ("finished", 100)


@pytest.mark.parametrize(
    ("state", "step", "steps", "error"),
    [
        (RUNNING, 99, 100, None),  # an exit interval, or a signal
        (RUNNING, 0, 0, None),  # --skip-train
        (RUNNING, 100, None, None),
        (RUNNING, 100, 100, RuntimeError("the last save failed")),
        (RUNNING, 100, 100, SystemExit(18)),
        (RunState(status="halt"), 100, 100, None),
        (RunState(status="rewind"), 100, 100, None),
    ],
)
def test_any_other_end_leaves_what_was_said(
    state: RunState, step: int, steps: int | None, error: BaseException | None
) -> None:
    assert at_the_end(state, step, steps, error) is state
