"""The batch that comes next: looked at without being lost, and passed over where it is bad."""

from collections.abc import Iterator

import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron_stability.act.pass_over import PassOver
from megatron_stability.decide.config import Decide, Rule
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect.config import BadBatch, Early
from megatron_stability.detect.data import BadBatch as Detector
from megatron_stability.megatron.access.data_iterators import DataIterators, LookAhead
from megatron_stability.megatron.observers.batches import BatchHook, skip_ahead
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, StepRecord, Tier

pytestmark = pytest.mark.megatron

SKIP = Decide(rules=(Rule(detector="bad_batch", tier=Tier.MEDIUM, action=Action.SKIP),))


@pytest.fixture
def two_micro_batches() -> Iterator[None]:
    """A global batch of 8 in two micro-batches of 4."""
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 8, 4, 1)
    yield
    num_microbatches_calculator.unset_num_microbatches_calculator()


def test_looking_ahead_gives_every_item_once_and_in_order() -> None:
    items = LookAhead(iter(range(7)))
    assert items.peek(2) == [0, 1]
    assert items.peek(3) == [0, 1, 2]
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    assert items.peek(9) == [4, 5, 6]
    assert list(items) == [4, 5, 6]
    assert items.peek(1) == []


@pytest.mark.usefixtures("two_micro_batches")
def test_the_next_batchs_score_is_that_of_its_worst_row_and_the_end_of_the_data_has_none() -> None:
    batches = [{"tokens": torch.arange(64).view(1, 64) + i} for i in range(4)]
    batches[3]["tokens"] = torch.full((1, 64), 7)
    source = RerunDataIterator(iter(batches))
    first_stage, other = (torch.nn.Module() for _ in range(2))
    first_stage.pre_process, other.pre_process = True, False
    device = torch.device("cpu")
    data = DataIterators()
    data.given(source)
    hook = BatchHook(8, [first_stage], device, data)
    found, drawn = [], []
    for _ in range(2):
        found.append(hook.observe())
        drawn += [next(source), next(source)]
    assert [batch["tokens"][0, 0] for batch in drawn] == [0, 1, 2, 7], "looking ahead loses no batch"
    assert float(found[0]["data/next/repeated"]) == 0.0
    assert float(found[1]["data/next/repeated"]) == pytest.approx(56 / 57)
    assert float(found[1]["data/next/entropy"]) == pytest.approx(0.0)
    assert hook.observe() == {}
    assert BatchHook(8, [other], device, data).observe() == {}


def record(step: int, repeated: float, ahead: float) -> StepRecord:
    signals = {"data/repeated": repeated, "data/entropy": 3.0, "data/next/repeated": ahead, "data/next/entropy": 3.0}
    rest = {"first_sample": 8 * step, "samples": 8, "tokens": 64.0, "loss": 2.0, "grad_norm": 1.0}
    return StepRecord(step=step, **rest, signals=signals)


@pytest.mark.usefixtures("two_micro_batches")
@pytest.mark.parametrize("mode", ["act", "observe"])
def test_a_bad_batch_becomes_a_window_within_the_budgets(mode: str) -> None:
    detector = Detector(BadBatch(calibration_steps=10), Early())
    policy = TablePolicy(SKIP.model_copy(update={"max_consecutive_skips": 2}), mode)
    pipeline = Pipeline(
        observe=lambda local: local, detectors=[detector], policy=policy, sinks=[], episodes=Episodes([detector], 50)
    )
    windows = PassOver()
    for step in range(1, 12):
        pipeline.finish(*pipeline.decide(record(step, 0.1, 0.1)))
        assert skip_ahead(pipeline, record(step, 0.1, 0.1), 8 * step + 8, windows) is None
    seen = record(12, 0.1, 0.9)
    assert skip_ahead(pipeline, seen, 8 * 20, windows) is None, "the cursor is elsewhere, after a rewind"
    taken = [skip_ahead(pipeline, seen, 8 * 13, windows) for _ in range(3)]
    if mode == "observe":
        assert taken == [None] * 3
        assert windows.windows == []
        return
    assert [decision and decision.action for decision in taken] == [Action.SKIP, Action.SKIP, None]
    assert "bad_batch (medium)" in windows.reason(13, 8 * 13, 8 * 14)
    assert windows.reason(14, 8 * 14, 8 * 15) is None
