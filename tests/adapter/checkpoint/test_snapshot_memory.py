"""A snapshot is written over the one before it: a rank never holds two."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.megatron


def test_the_next_snapshot_takes_the_memory_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_stability.megatron.access import rank_state
    from megatron_stability.megatron.checkpoint.snapshot import COUNTERS, Snapshot

    monkeypatch.setattr(rank_state, "generators", dict)
    model = torch.nn.Linear(3, 2)
    optimizer = SimpleNamespace(optimizer=torch.optim.Adam(model.parameters()))
    live = [model], optimizer, SimpleNamespace(state_dict=dict)
    args = Namespace(curr_iteration=1, **dict.fromkeys(COUNTERS, 0))
    first = Snapshot.take(live, args, {})
    where = [each.data_ptr() for each in first.tensors]
    before = [each.clone() for each in first.tensors]
    with torch.no_grad():
        model.weight.add_(1)
    second = Snapshot.take(live, args, {}, first)
    assert [each.data_ptr() for each in second.tensors] == where
    assert torch.equal(second.tensors[0], before[0] + 1)
    model(torch.ones(3)).sum().backward()
    optimizer.optimizer.step()  # which makes the moments
    third = Snapshot.take(live, args, {}, second)
    assert len(third.tensors) > len(where)
    assert second.tensors == []  # let go before the new memory was taken
    assert torch.equal(third.tensors[0], model.weight)
