"""The one collective on real ranks: what it names, and that every rank gets the same record from it."""

from __future__ import annotations

import pytest
import torch

from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.numerics.fp8.formats import E4M3
from megatron_stability.numerics.fp8.stats import tensor_stats
from megatron_stability.observe.fingerprint import digest
from megatron_stability.observe.fp8.samples import AMAX, gather
from megatron_stability.observe.reduction import LocalSignals, Reduction, chained
from megatron_stability.observe.wide import Layers, Replicas, fold
from megatron_stability.records import Action, Decision, Verdict
from tests.dist.pool import Context, Pool


def three_steps(context: Context) -> list[tuple[str, str | None]]:
    """Equal replicas; then one flipped bit on the last rank; then a rank that went another way than the others."""
    rank, world = context.rank, context.world
    everyone = Replicas((tuple(range(world)),), rank)
    reduction = Reduction(context.group, torch.device("cpu"), {"n": "norm", "w": everyone, "l": Layers(2)})
    weight = torch.arange(1000.0).bfloat16()
    history, seen = 0, list[tuple[str, str | None]]()
    for step in (1, 2, 3):
        if step == 2 and rank == world - 1:
            weight.view(torch.int16)[500] ^= 1
        record = reduction(
            LocalSignals(
                step=step,
                first_sample=8 * step,
                samples=8,
                loss_sums_n2=torch.tensor([[2.0 + rank, 1.0]]),
                grad_norm=1.0,
                history=history,
                extra={
                    "n": torch.tensor(float(rank)),
                    "l": torch.tensor([4.0, 9.0]) / world,
                    **({"w": fold(digest([weight]))} if step < 3 else {}),
                },
            )
        )
        found = [detector.inspect(record) for detector in build(Detect())]
        verdict: Verdict | None = next(filter(None, found), None)
        seen.append((repr(record), verdict and verdict.reason))
        action = Action.SKIP if step == 2 and rank == 1 else Action.APPLY
        history = chained(history, record, Decision(step=step, action=action, advised=Action.APPLY, reason=""))
    return seen


@pytest.mark.parametrize(("world", "named"), [(2, "ranks 0, 1"), (4, "rank 3")])
def test_every_rank_names_the_rank_with_a_flipped_bit_and_the_one_that_went_apart(
    ranks: Pool, world: int, named: str
) -> None:
    answers = ranks.run(three_steps, world=world, timeout=60)
    assert answers == [answers[0]] * world
    (first, fine), (_, flipped), (_, apart) = answers[0]
    assert fine is None
    assert "'ranks/w': 0.0" in first
    assert "'l_max': 3.0" in first
    assert flipped is not None
    assert apart is not None
    assert f"of {named} differ" in flipped
    assert "past decisions of rank 1" in apart


def fp8_counts(context: Context) -> tuple[tuple[float, ...], ...]:
    """Ranks 0, 1 are one pipeline stage, 2, 3 the next; each rank has its own shard of its stage's tensors."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    stage, shard = divmod(context.rank, 2)
    values = torch.full((10 + 90 * shard,), 900.0 if stage == 0 and shard == 0 else 1.0)
    counts = torch.stack([tensor_stats(values, torch.ones(1), E4M3)])
    found = gather(counts, counts[:, AMAX], torch.tensor([2.0 + shard]), groups[stage])
    (stats,) = found.stats
    return (float(stats.elements), stats.saturation), found.amax, found.scale


def test_fp8_counts_are_of_one_stage_and_by_elements(ranks: Pool) -> None:
    first, second = ((110.0, 10 / 110), (900.0,), (2.0,)), ((110.0, 0.0), (1.0,), (2.0,))
    assert ranks.run(fp8_counts, world=4, timeout=60) == [first, first, second, second]
