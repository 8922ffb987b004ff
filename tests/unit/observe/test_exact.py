"""Sums and maxima that travel as integers: equal to the exact ones, to the bit, in any order and over any world."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from functools import partial

import pytest
import torch

from megatron_stability.observe import exact
from megatron_stability.observe.reduction import NAMED, LocalSignals, Reduction
from megatron_stability.observe.wide import Layers, Replicas
from megatron_stability.records import StepRecord

CPU = torch.device("cpu")
WAYS = {"a": "max", "b": "min", "c": "sum", "d": "norm"}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def summed(values: list[float]) -> float:
    return exact.from_limbs(exact.to_limbs(tensor(*values)).sum(0).tolist())


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [1.0, -1.0],
        [1e16, 1.0, -1e16],
        [0.1] * 10,
        [2.0**239, -(2.0**239), 2.0**-300],
        [2.0**-347 * 1.7, 2.0**-347],
        [-0.3, 1e-9, 7e12, -7e12],
        [1 / 3] * 1000,
        [-(2.0**200), -1.5],
    ],
)
def test_a_sum_is_rounded_once(values: list[float]) -> None:
    total = float(sum(map(Fraction, values)))
    assert summed(values) == total
    assert summed(values[::-1]) == total


def test_a_sum_is_the_exact_one_on_random_values_of_all_sizes() -> None:
    draw = random.Random(5)
    for _ in range(200):
        values = [draw.gauss(0, 1) * 2.0 ** draw.uniform(-300, 200) for _ in range(draw.randint(1, 40))]
        assert summed(values) == float(sum(map(Fraction, values)))


def test_a_limb_holds_131072_ranks_of_the_largest_value() -> None:
    world = 131_072
    value = 2.0**40 - 2.0**-10
    limbs = exact.to_limbs(tensor(value))[0] * world
    assert int(limbs.abs().max()) < 2**62
    assert exact.from_limbs(limbs.tolist()) == value * world


@pytest.mark.parametrize("value", [math.inf, -math.inf, 2.0**240, 1e300])
def test_what_is_beyond_is_not_finite_and_nan_is_nothing(value: float) -> None:
    assert summed([value, 1.0]) == math.inf
    assert summed([math.nan, 3.0]) == 3.0
    assert summed([2.0**240 * (1 - 2**-53)]) == 2.0**240 * (1 - 2**-53)
    assert summed([2.0**-460]) == 0.0


def test_keys_are_in_the_order_of_the_numbers_and_nan_is_below_all() -> None:
    values = [-math.inf, -1e308, -1.0, -5e-324, -0.0, 0.0, 5e-324, 1.0, 1 + 2**-52, 1e308, math.inf]
    keys = exact.to_keys(tensor(math.nan, *values)).tolist()
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    back = exact.from_keys(torch.tensor(keys)).tolist()
    assert math.isnan(back[0])
    assert [math.copysign(1, v) for v in back[1:]] == [math.copysign(1, v) for v in values]
    assert back[1:] == values
    assert exact.to_keys(torch.tensor([-1], dtype=torch.int64).view(torch.float64)).item() == exact.NONE


# --- the whole record against one gathered from all ranks -------------------------------------------------------------


def gathered(everyone: list[LocalSignals]) -> dict[str, object]:
    """What a gather of all ranks' numbers would say, in plain Python."""
    pairs = [pair for each in everyone for pair in each.loss_sums_n2.tolist()]
    bad = [not all(map(math.isfinite, pair)) for pair in pairs]
    columns = [list(zip(*each.loss_sums_n2.tolist(), strict=True)) or [(), ()] for each in everyone]
    kept = [[math.fsum(filter(math.isfinite, column)) for column in part] for part in columns]
    tokens = math.fsum(part[1] for part in kept)
    found: dict[str, object] = {"tokens": tokens, "nonfinite_losses": sum(bad)}
    if not any(bad) and tokens > 0:
        found["loss"] = math.fsum(part[0] for part in kept) / tokens
    combine = {"max": max, "min": min, "sum": math.fsum, "norm": lambda parts: math.hypot(*parts)}
    for name, way in WAYS.items():
        values = [float(each.extra[name]) for each in everyone if name in each.extra]
        if values:
            found[name] = combine[way](values)
    return found


def local(draw: random.Random, step: int) -> LocalSignals:
    extra = {name: draw.choice([float, torch.tensor])(draw.gauss(0, 3)) for name in WAYS if draw.random() < 0.7}
    losses = [[draw.uniform(1, 9) * 64, 64.0] for _ in range(draw.randint(0, 3))]
    if losses and draw.random() < 0.02:
        losses[0][0] = math.nan
    sums = torch.tensor(losses, dtype=torch.float64).reshape(-1, 2)
    return LocalSignals(
        step=step, first_sample=8 * step, samples=8, loss_sums_n2=sums, grad_norm=draw.uniform(0, 5), extra=extra
    )


@pytest.mark.parametrize("world", [1, 2, 7, 64])
def test_the_record_is_that_of_a_gather_and_the_same_in_any_order(world: int) -> None:
    draw = random.Random(world)
    reduction = Reduction(None, CPU, WAYS)
    for step in range(1, 40):
        everyone = [local(draw, step) for _ in range(world)]
        record = reduction.together([reduction.sent(each) for each in everyone])
        shuffled = everyone[:]
        draw.shuffle(shuffled)
        other = reduction.together([reduction.sent(each) for each in shuffled])
        assert (repr(record.loss), dict(record.signals)) == (repr(other.loss), dict(other.signals))
        want = gathered(everyone)
        for name in ("tokens", "nonfinite_losses", "loss"):
            if name in want:
                assert getattr(record, name) == pytest.approx(want[name], rel=4 * 2**-52, abs=0)
        assert set(record.signals) == set(want) & set(WAYS)
        for name in record.signals:
            assert record.signals[name] == pytest.approx(want[name], rel=4 * 2**-52, abs=0)
        assert record.grad_norm == max(float(each.grad_norm) for each in everyone)


def test_what_travels_does_not_grow_with_the_world_and_names_are_asked_for_only_where_there_is_blame() -> None:
    sizes = set()
    for world in (8, 4096):
        groups = tuple(tuple(range(stage, world, 8)) for stage in range(8))
        reduction = Reduction(None, CPU, {**WAYS, "weights": Replicas(groups, 3), "norm": Layers(32)})
        sent = reduction.sent(local(random.Random(1), 5))
        sizes.add((sent.sums_s.numel(), sent.keys_k.numel()))
        asked: list[int] = []
        reduction.record(sent, partial(_asked, asked))
        assert asked == []
        with pytest.raises(LookupError):
            reduction.record(reduction.sent(_broken()), partial(_asked, asked))
        assert asked == [1]
    assert len(sizes) == 1


def _asked(asked: list[int]) -> torch.Tensor:
    asked.append(1)
    raise LookupError


def _broken() -> LocalSignals:
    return LocalSignals(step=5, first_sample=0, samples=8, loss_sums_n2=torch.zeros(0, 2), grad_norm=math.nan)


def test_the_first_sixteen_are_named() -> None:
    reduction = Reduction(None, CPU)
    fine = {"step": 5, "first_sample": 0, "samples": 8, "loss_sums_n2": torch.tensor([[8.0, 4.0]]), "grad_norm": 1.0}
    apart = [LocalSignals(**fine)] + [LocalSignals(**{**fine, "history": 7, "grad_amax": math.nan})] * 40
    record: StepRecord = reduction.together([reduction.sent(each) for each in apart])
    assert record.disagreeing_ranks == record.culprit_ranks == tuple(range(1, NAMED + 1))
    assert record.nonfinite_grads == 40
