"""What a restart changed, from the run lines of a ledger."""

from __future__ import annotations

from megatron_stability.ledger import changes
from megatron_stability.ledger.entries import LedgerView, RunEntry, StepEntry
from megatron_stability.records import Action


def _run(generation: int, resumed: int, **fields: object) -> RunEntry:
    return RunEntry(generation=generation, schema_version=1, resumed_step=resumed, resumed_sample=resumed * 4, **fields)


def _step(number: int, generation: int) -> StepEntry:
    return StepEntry(
        generation=generation,
        step=number,
        first_sample=(number - 1) * 4,
        samples=4,
        tokens=64.0,
        loss=2.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        fate="trained",
        action=Action.APPLY,
        advised=Action.APPLY,
    )


def test_names_that_appear_vanish_or_differ_are_changes_and_equal_ones_are_not() -> None:
    old = _run(1, 0, settings={"lr": 1e-3, "adam_beta2": 0.95, "clip_grad": 1.0}, data={"seed": "1"})
    new = _run(2, 40, settings={"lr": 1e-3, "adam_beta2": 0.999, "model.z_loss": 1e-4}, data={"seed": "1"})
    said = [str(change) for change in changes.between(old, new)]
    assert said == [
        "adam_beta2: 0.95 -> 0.999 (restart after step 40)",
        "clip_grad: 1.0 -> default (restart after step 40)",
        "model.z_loss: default -> 0.0001 (restart after step 40)",
    ]


def test_a_line_of_an_older_version_changes_nothing() -> None:
    assert changes.between(_run(1, 0), _run(2, 40, settings={"lr": 1e-3})) == ()


def test_before_a_step_the_latest_restart_comes_first_and_later_ones_do_not_count() -> None:
    runs = (
        _run(1, 0, settings={"lr": 1.0}),
        _run(2, 10, settings={"lr": 2.0}),
        _run(3, 20, settings={"lr": 3.0}),
        _run(4, 20, settings={"lr": 4.0}),
    )
    step = _step(25, 3)
    view = LedgerView((*runs, step))
    assert [change.new for change in changes.before(view, step)] == ["3.0", "2.0"]
    assert changes.before(view, _step(10, 3)) == ()
