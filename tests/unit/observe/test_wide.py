"""Digests of replicas, norms of layers, the history of ranks, and the scores of a batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_stability.detect.config import BadBatch, Early, Switch
from megatron_stability.detect.data import BadBatch as Detector
from megatron_stability.detect.non_finite import NonFinite
from megatron_stability.detect.rank_agreement import RankAgreement
from megatron_stability.observe.batch import scores
from megatron_stability.observe.config import Replicas as Replicas_
from megatron_stability.observe.fingerprint import digest
from megatron_stability.observe.reduction import LocalSignals, Reduction, chained
from megatron_stability.observe.wide import Layers, Replicas, fold
from megatron_stability.records import Action, Decision, StepRecord, Tier
from tests.unit.steps import PROPERTY, feed, flagged, step

CPU = torch.device("cpu")
NONE = torch.zeros(0, 2)


def test_a_digest_shows_a_flipped_bit_and_the_order_and_is_exact_in_float64() -> None:
    weights = [torch.arange(24.0).bfloat16(), torch.ones(5)]
    same, swapped = digest(weights), digest(weights[::-1])
    flipped = weights[0].clone()
    flipped.view(torch.int16)[7] ^= 1
    values = {float(fold(each)) for each in (same, swapped, digest([flipped, weights[1]]))}
    assert len(values) == 3
    assert all(0 <= value < 2**52 and value == int(value) for value in values)
    assert float(fold(digest([w.clone() for w in weights]))) == float(fold(same))


def compared(groups: tuple[tuple[int, ...], ...], *values: float) -> tuple[dict[str, float], tuple[int, ...]]:
    """The signals of digests of replicas, one a rank, and who is named; NaN: the rank did not measure."""
    everyone = []
    for number, value in enumerate(values):
        reduction = Reduction(None, CPU, {"weights": Replicas(groups, number)})
        everyone.append(reduction.sent(rank(extra={"weights": torch.tensor([value], dtype=torch.float64)})))
    record = reduction.together(everyone)
    return dict(record.signals), record.disagreeing_ranks


@pytest.mark.parametrize(
    ("values", "outvoted"),
    [
        ((7, 7, 7, 7), ()),
        ((7, 7, 8, 7), (2,)),
        ((7, 8, 9, 9), (0, 1)),
        ((7, 7, 8, 8), (0, 1, 2, 3)),  # a tie: which half is right can't be told
        ((7, 7, 2**52 - 1, 7), (2,)),
        ((0, 0, 1, 0), (2,)),
    ],
)
def test_replicas_are_outvoted_by_the_majority(values: tuple[float, ...], outvoted: tuple[int, ...]) -> None:
    assert compared(((0, 1, 2, 3),), *values) == ({"ranks/weights": len(outvoted)}, outvoted)


def test_replicas_are_compared_within_their_group_and_on_steps_that_measured_only() -> None:
    pairs = ((0, 2), (1, 3))
    assert compared(pairs, 1, 2, 1, 2) == ({"ranks/weights": 0}, ())
    assert compared(pairs, 1, 2, 1, 3) == ({"ranks/weights": 2}, (1, 3))
    assert compared(pairs, *[math.nan] * 4) == ({}, ())
    assert compared(((0, 1),), 5, 5, 9) == ({"ranks/weights": 0}, ()), "rank 2 is nobody's replica"


def layers(*rows: list[float]) -> dict[str, float]:
    reduction = Reduction(None, CPU, {"norm": Layers(len(rows[0]))})
    given = [rank(extra={"norm": torch.tensor(row, dtype=torch.float64)}) for row in rows]
    return dict(reduction.together([reduction.sent(each) for each in given]).signals)


def test_layer_norms_are_roots_of_sums_over_ranks() -> None:
    found = layers([9.0, 1.0, math.nan, 16.0], [16.0, math.nan, 4.0, 0.0])
    assert found == {"norm_max": 5.0, "norm_max/at": 1.0, "norm_median": 2.0}
    assert layers([1.0, math.inf])["norm_max"] == math.inf
    assert layers(*[[math.nan] * 2] * 3) == {}


def test_wide_columns_travel_with_the_scalars_in_one_row() -> None:
    reduction = Reduction(None, CPU, {"a": "norm", "w": Replicas(((0,),), 0), "b": "min", "l": Layers(3)})
    extra = {"b": 2.0, "a": -3.0, "l": torch.tensor([4.0, 9.0, 1.0])}
    local = LocalSignals(step=5, first_sample=0, samples=8, loss_sums_n2=NONE, grad_norm=1.0, extra=extra)
    assert dict(reduction(local).signals) == {"a": 3.0, "b": 2.0, "l_max": 3.0, "l_median": 2.0, "l_max/at": 2.0}
    assert reduction.signals == {"a", "b", "ranks/w", "l_max", "l_median", "l_max/at"}


def test_a_rank_that_decided_otherwise_has_another_history() -> None:
    decisions = [Decision(step=1, action=a, advised=Action.SKIP, reason="") for a in (Action.SKIP, Action.APPLY)]
    one, other = (chained(0, step(1), decision) for decision in decisions)
    assert one != other
    assert chained(0, step(1, tokens=511.0), decisions[0]) != one
    assert chained(one, step(2), decisions[0]) != chained(other, step(2), decisions[0])
    assert chained(0, step(1), decisions[0]) == one < 2**53


@pytest.mark.parametrize(("signal", "words"), [("weights", "the weights of rank 2"), ("compute", "fixed micro-batch")])
def test_the_verdict_says_what_differs(signal: str, words: str) -> None:
    detector = RankAgreement(Switch(), Early())
    verdict = detector.inspect(step(5, disagreeing_ranks=(2,), signals={f"ranks/{signal}": 1.0}))
    assert verdict is not None
    assert words in verdict.reason
    assert "past decisions of rank 2" in detector.inspect(step(5, disagreeing_ranks=(2,))).reason


@given(rows=st.lists(st.lists(st.integers(0, 6), min_size=12, max_size=12), min_size=1, max_size=4))
@PROPERTY
def test_scores_equal_their_definitions(rows: list[list[int]]) -> None:
    repeated, entropy = scores(torch.tensor(rows), ngram=3).tolist()

    def share(row: list[int]) -> float:
        grams = [tuple(row[i : i + 3]) for i in range(10)]
        return 1 - len(set(grams)) / 10

    def nats(row: list[int]) -> float:
        return -sum(c / 12 * math.log(c / 12) for c in Counter(row).values())

    assert repeated == pytest.approx(max(map(share, rows)))
    assert entropy == pytest.approx(min(map(nats, rows)), abs=1e-12)


def test_a_repeated_page_is_a_bad_batch_by_the_runs_own_first_batches() -> None:
    draw = torch.Generator().manual_seed(3)
    ranks = torch.arange(1, 501, dtype=torch.float64)

    def record(number: int, page: bool = False):
        tokens = torch.multinomial(1 / ranks, 8 * 256, replacement=True, generator=draw).view(8, 256)
        if page:
            tokens[5] = tokens[5, :20].repeat(13)[:256]
        names = ("data/repeated", "data/entropy")
        return step(number, signals=dict(zip(names, scores(tokens, 8).tolist(), strict=True)))

    bad = {7, 8, 230, 400}  # the first two are in the calibration
    detector = Detector(BadBatch(calibration_steps=100), Early())
    assert flagged(feed(detector, [record(i, page=i in bad) for i in range(1, 601)])) == [230, 400]
    other = Detector(BadBatch(calibration_steps=100), Early())
    other.load_state_dict(detector.state_dict())
    assert other.inspect(record(601, page=True)) is not None
    assert detector.inspect(step(602)) is None, "a record without scores says nothing"


def test_a_nan_norm_is_no_small_norm_and_a_rank_with_an_empty_shard_sees_it_too() -> None:
    """Megatron-LM issue 3460: NaN compares as below every threshold, and each rank compared its own norm."""
    reduction = Reduction(None, CPU)
    rest = {"step": 5, "first_sample": 0, "samples": 8}
    speaks = LocalSignals(**rest, loss_sums_n2=torch.tensor([[8.0, 4.0]]), grad_norm=math.nan, grad_amax=math.nan)
    empty = LocalSignals(**rest, loss_sums_n2=NONE, grad_norm=None)
    for order in ((speaks, empty), (empty, speaks)):
        record = reduction.together([reduction.sent(local) for local in order])
        assert (record.nonfinite_grads, record.finite, record.loss) == (1, False, 2.0)
        verdict = NonFinite(Switch(), Early()).inspect(record)
        assert verdict is not None
        assert verdict.tier is Tier.NON_FINITE


def test_of_differences_that_follow_from_each_other_the_cause_is_named() -> None:
    """A flipped bit changes what its tensor-parallel peers compute as well."""
    pairs, everyone = ((0, 2), (1, 3)), ((0, 1, 2, 3),)
    sent = []
    for number, (weights, compute) in enumerate(((7.0, 1.0), (7.0, 2.0), (7.0, 3.0), (8.0, 4.0))):
        reduction = Reduction(None, CPU, {"weights": Replicas(everyone, number), "compute": Replicas(pairs, number)})
        extra = {"weights": torch.tensor([weights]), "compute": torch.tensor([compute])}
        local = LocalSignals(step=5, first_sample=0, samples=8, loss_sums_n2=NONE, grad_norm=1.0, extra=extra)
        sent.append(reduction.sent(local))
    record = reduction.together(sent)
    assert record.disagreeing_ranks == (3,)
    assert record.signals == {"ranks/weights": 1.0, "ranks/compute": 4.0}
    verdict = RankAgreement(Switch(), Early()).inspect(record)
    assert verdict is not None
    assert "the weights of rank 3" in verdict.reason


def reduced(*ranks: LocalSignals) -> StepRecord:
    reduction = Reduction(None, CPU)
    return reduction.together([reduction.sent(rank) for rank in ranks])


def rank(**fields) -> LocalSignals:
    return LocalSignals(**{"step": 5, "first_sample": 0, "samples": 8, "loss_sums_n2": NONE, "grad_norm": 1.0} | fields)


def test_the_norm_is_the_largest_that_any_rank_reported() -> None:
    """Rank 0 may have no gradient of its own."""
    assert reduced(rank(grad_norm=1.0), rank(grad_norm=7.0), rank(grad_norm=None)).grad_norm == 7.0
    assert reduced(rank(grad_norm=7.0), rank(grad_norm=1.0)).grad_norm == 7.0
    assert reduced(rank(learning_rate=0.0), rank(learning_rate=3e-4)).learning_rate == 3e-4


def test_a_nan_loss_is_the_culprit_and_not_the_gradients_that_follow_from_it() -> None:
    bad = torch.tensor([[math.nan, 4.0], [8.0, 4.0]])
    record = reduced(rank(grad_amax=math.nan), rank(loss_sums_n2=bad, grad_amax=math.nan), rank(grad_amax=math.nan))
    assert record.culprit_ranks == (1,)
    assert (record.nonfinite_losses, record.nonfinite_grads, record.tokens) == (1, 3, 8.0)
    assert math.isnan(record.loss)
    without = reduced(rank(), rank(grad_amax=1.0), rank(grad_amax=math.nan))
    assert without.culprit_ranks == (2,)


@pytest.mark.parametrize("amax", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_counts_though_the_norm_is_blind_to_it(amax: float) -> None:
    record = reduced(rank(), rank(grad_norm=1.0, grad_amax=torch.tensor(amax)))
    assert (record.nonfinite_grads, record.finite, record.culprit_ranks) == (1, False, (1,))
    assert math.isnan(record.grad_norm)
    assert reduced(rank(), rank(grad_amax=3e38)).finite


@pytest.mark.parametrize("field", ["step", "first_sample", "samples", "history"])
def test_a_rank_that_is_elsewhere_is_named(field: str) -> None:
    assert reduced(rank(), rank(), rank(**{field: 6})).disagreeing_ranks == (2,)
    assert reduced(rank(), rank()).disagreeing_ranks == ()


def test_losses_are_weighed_by_their_tokens_and_none_is_no_loss() -> None:
    record = reduced(rank(loss_sums_n2=torch.tensor([[6.0, 2.0]])), rank(loss_sums_n2=torch.tensor([[4.0, 8.0]])))
    assert (record.loss, record.tokens) == (1.0, 10.0)
    assert math.isnan(reduced(rank()).loss)
    assert reduced(rank(), rank(overflow=True)).overflow
    assert not reduced(rank()).overflow


def test_weights_are_compared_now_and_then_and_before_each_save() -> None:
    every = Replicas_(weights_every=1000)
    assert [every.weights_due(step, saves=False) for step in (999, 1000, 1001, 2000)] == [False, True, False, True]
    assert every.weights_due(1, saves=True)
    assert not Replicas_(weights_every=0).weights_due(1000, saves=True)
