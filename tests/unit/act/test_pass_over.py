"""Windows of samples: whole steps, whatever the batch size, after any number of restarts; and the run's state file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stability import config
from megatron_stability.act.pass_over import PassOver
from megatron_stability.checkpoints import run_state
from megatron_stability.checkpoints.run_state import Rewound, RunState
from megatron_stability.errors import UsageError
from tests.unit.steps import PROPERTY


def passed(windows: PassOver, batch: int, steps: int) -> list[int]:
    return [s for s in range(1, steps + 1) if windows.reason(s, (s - 1) * batch, s * batch) is not None]


@PROPERTY
@given(first=st.integers(0, 60), length=st.integers(1, 20), batch=st.integers(1, 16))
def test_a_step_is_passed_over_if_it_reads_one_sample_of_a_window(first: int, length: int, batch: int) -> None:
    bad = set(range(first, first + length))
    expected = [s for s in range(1, 100) if bad & set(range((s - 1) * batch, s * batch))]
    assert passed(PassOver([(first, first + length)]), batch, 99) == expected


def test_a_step_named_by_its_number_is_its_samples_from_then_on() -> None:
    """`--iterations-to-skip 5` is given again at every restart: with another batch size that is not another batch."""
    before = PassOver(steps=[5])
    assert passed(before, 4, 8) == [5]  # samples 16 to 19
    after = PassOver(steps=[5])
    after.merge(json.loads(json.dumps(before.state_dict())))
    assert passed(after, 8, 8) == [3]
    assert passed(PassOver(steps=[5]), 8, 8) == [5]


def test_a_step_that_was_not_met_is_still_to_come() -> None:
    before = PassOver(steps=[5])
    assert passed(before, 4, 4) == []
    after = PassOver(steps=[5])
    after.merge(before.state_dict())
    assert passed(after, 8, 8) == [5]


def test_a_window_is_kept_once() -> None:
    windows = PassOver([(4, 8)])
    windows.merge(windows.state_dict())
    assert len(windows.windows) == 1


@pytest.mark.parametrize("windows", [[[5, 5]], [[-1, 3]], [[7, 3]]])
def test_a_window_that_is_none_is_refused(windows: Any) -> None:
    with pytest.raises(UsageError, match="--stability-decide-skip-samples"):
        config.load(overrides={"stability_decide_skip_samples": json.dumps(windows)})
    tree = config.load(overrides={"stability_decide_skip_samples": "[[3, 7], [9, 10]]"})
    assert tree.decide.skip_samples == ((3, 7), (9, 10))


def test_the_state_is_read_back_and_damage_is_said(tmp_path: Path) -> None:
    assert run_state.read(tmp_path) is None
    rewound = Rewound(to_step=8, to_sample=32, attempt=1, policy={"rewinds": 1}, scales={})
    state = RunState(status="rewind", step=11, reason="NaN", exit_code=19, rewound=rewound, pass_over={"met": []})
    run_state.write(tmp_path / "new", state)
    assert run_state.read(tmp_path / "new") == state
    (tmp_path / "new" / run_state.FILE).write_text('{"status": "resting"}')
    with pytest.raises(UsageError, match=r"state\.json"):
        run_state.read(tmp_path / "new")
