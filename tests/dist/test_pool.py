"""The harness itself: order, failures, hangs, and no leftovers between jobs."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megatron_stability.errors import UsageError
from tests.dist.pool import Context, Pool, RankDied, RankTimeout


def rank_and_sum(context: Context, scale: float) -> tuple[int, int, torch.Tensor, bool]:
    total = torch.full((3,), scale * (context.rank + 1))
    dist.all_reduce(total, group=context.group)
    return context.rank, context.world, total, any(name.partition(".")[0] == "megatron" for name in sys.modules)


def raise_on(context: Context, rank: int) -> None:
    if context.rank == rank:
        raise UsageError("the flag --x is wrong")
    dist.all_reduce(torch.ones(1), group=context.group)


def raise_unpicklable(context: Context) -> None:
    error = ValueError("odd")
    error.handle = lambda: None  # type: ignore[attr-defined]
    raise error


def loiter_on(context: Context, rank: int) -> None:
    if context.rank == rank:
        while True:
            time.sleep(0.1)
    dist.all_reduce(torch.ones(1), group=context.group)


def die_on(context: Context, rank: int) -> None:
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1), group=context.group)


def leave_mark(context: Context) -> bool:
    marked = "POOL_MARK" in os.environ
    os.environ["POOL_MARK"] = "1"
    return marked


def model_parallel_sum(context: Context, tp: int, pp: int) -> tuple[int, int, float]:
    context.megatron(tp=tp, pp=pp)
    from megatron.core import parallel_state

    one = torch.ones(1, device=torch.cuda.current_device())
    dist.all_reduce(one, group=parallel_state.get_tensor_model_parallel_group())
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        one.item(),
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_in_rank_order_without_megatron(ranks: Pool, world: int) -> None:
    results = ranks.run(rank_and_sum, 0.5, world=world)
    expected = torch.full((3,), 0.5 * world * (world + 1) / 2)
    assert [result[:2] for result in results] == [(rank, world) for rank in range(world)]
    assert all(torch.equal(result[2], expected) for result in results)
    assert not any(result[3] for result in results)


def test_an_exception_keeps_its_type_rank_and_traceback_and_frees_the_others(ranks: Pool) -> None:
    with pytest.raises(UsageError, match="--x is wrong") as caught:
        ranks.run(raise_on, 2, world=4, timeout=60)
    (note,) = caught.value.__notes__
    assert "on rank 2 of 4" in note
    assert "in raise_on" in note
    assert ranks.run(rank_and_sum, 1.0, world=2)[1][2][0] == 3.0


def test_an_exception_that_cannot_travel_is_quoted(ranks: Pool) -> None:
    with pytest.raises(RuntimeError, match="ValueError: odd"):
        ranks.run(raise_unpicklable, world=1)


def test_a_hang_is_named_with_rank_and_stack(ranks: Pool) -> None:
    with pytest.raises(RankTimeout) as caught:
        ranks.run(loiter_on, 1, world=2, timeout=8)
    assert caught.value.ranks == [1]
    assert "loiter_on" in caught.value.stacks[1]
    assert "all_reduce" in caught.value.stacks[0]
    assert "stuck: rank 1; ranks [0] wait in a collective" in str(caught.value)
    assert ranks.run(rank_and_sum, 1.0, world=2)[0][2][0] == 3.0


def test_a_killed_rank_is_named(ranks: Pool) -> None:
    with pytest.raises(RankDied, match="rank 0 ended"):
        ranks.run(die_on, 0, world=2, timeout=60)


def test_no_job_sees_what_another_left(ranks: Pool) -> None:
    assert ranks.run(leave_mark, world=2) == [False, False]
    assert ranks.run(leave_mark, world=2) == [False, False]


@pytest.mark.megatron
def test_layouts_follow_one_another(megatron_ranks: Pool) -> None:
    assert megatron_ranks.run(model_parallel_sum, 2, 1, world=2) == [(0, 0, 2.0), (1, 0, 2.0)]
    assert megatron_ranks.run(model_parallel_sum, 1, 2, world=2) == [(0, 0, 1.0), (0, 1, 1.0)]
    assert megatron_ranks.run(model_parallel_sum, 2, 2, world=4) == [(0, 0, 2.0), (1, 0, 2.0), (0, 1, 2.0), (1, 1, 2.0)]
