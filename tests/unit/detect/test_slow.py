"""Limits, trends and growth: what they find, and what they leave alone."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from megatron_stability.detect import config as c
from megatron_stability.detect import growth, limits, trend
from megatron_stability.records import StepRecord, Tier
from tests.unit.steps import feed, flagged, gauss, step

LATE = c.Early(steps=0)  # no looseness
SECTIONS = c.Detect()


def test_vanishing_needs_a_row() -> None:
    detector = limits.Vanishing(SECTIONS.vanishing, LATE)
    assert flagged(feed(detector, [step(i, grad_norm=0.0) for i in range(1, 5)])) == [3, 4]
    assert flagged(feed(detector, [step(i, grad_norm=1e-3) for i in range(5, 9)])) == []


def test_slope_test_knows_a_slope_from_noise() -> None:
    rise, t = trend.slope_test([0.1 * i + gauss(i, 0.05) for i in range(50)])
    assert rise == pytest.approx(4.9, rel=0.05)
    assert t > 30
    assert max(abs(trend.slope_test([gauss(i, 1.0, s) for i in range(50)])[1]) for s in range(40)) < 4
    assert trend.slope_test([1.0] * 10) == (0.0, 0.0)
    assert trend.slope_test([float(i) for i in range(10)]) == (pytest.approx(9.0), math.inf)


def test_slope_test_discounts_autocorrelation() -> None:
    rng, walk = random.Random(3), [0.0]
    for _ in range(199):
        walk.append(0.9 * walk[-1] + rng.gauss(0, 1))
    n, mean = len(walk), statistics.fmean(walk)
    slope = sum((i - (n - 1) / 2) * (y - mean) for i, y in enumerate(walk)) / (n * (n * n - 1) / 12)
    residuals = [y - mean - slope * (i - (n - 1) / 2) for i, y in enumerate(walk)]
    naive = slope / math.sqrt(sum(r * r for r in residuals) / (n - 2) / (n * (n * n - 1) / 12))
    assert 0 < abs(trend.slope_test(walk)[1]) < 0.5 * abs(naive)


def test_drift_of_the_loss_is_found_while_no_step_is_a_spike() -> None:
    detector = trend.LossDrift(SECTIONS.loss_drift, LATE)
    assert flagged(feed(detector, [step(i, loss=3.0 - i * 1e-4 + gauss(i, 0.02)) for i in range(1, 2001)])) == []
    found = feed(detector, [step(i, loss=2.8 + (i - 2000) * 1e-4 + gauss(i, 0.02)) for i in range(2001, 4001)])
    assert 2400 < flagged(found)[0] < 3300
    assert len(flagged(found)) <= 2  # a standing trend isn't reported every block


def test_drift_of_the_gradient_norm() -> None:
    detector = trend.GradNormDrift(SECTIONS.grad_norm_drift, LATE)
    records = [step(i, grad_norm=math.exp(i * 1e-3 + gauss(i, 0.15))) for i in range(1, 1101)]
    assert flagged(feed(detector, records)) == [1001]


def test_plateau() -> None:
    config = c.Plateau(block=10, blocks=20, progress=0.01, repeat_blocks=10)
    detector = trend.Plateau(config, LATE)
    falling = [step(i, loss=3.0 - i * 1e-3 + gauss(i, 0.01)) for i in range(1, 501)]
    assert flagged(feed(detector, falling)) == []
    flat = flagged(feed(detector, [step(i, loss=2.5 + gauss(i, 0.01)) for i in range(501, 1001)], skip=False))
    assert 600 < flat[0] < 760
    assert flat[1] - flat[0] == 100  # repeated after ten blocks


@pytest.mark.parametrize(
    ("kind", "name", "fine", "bad", "tier"),
    [
        (limits.AttentionLogits, "attention/max_logit", -3.0, 101.0, Tier.WATCH),
        (limits.AttentionLogits, "attention/max_logit", 50.0, 1001.0, Tier.MEDIUM),
        (limits.AttentionEntropy, "attention/min_entropy", 0.5, 0.0, Tier.SMALL),
        (limits.Fp8Saturation, "fp8/saturation", 1e-4, 0.02, Tier.MEDIUM),
        (limits.Fp8Underflow, "fp8/underflow", 0.05, 0.2, Tier.WATCH),
        (limits.Fp8Binades, "fp8/binades", 14.8, 6.8, Tier.WATCH),
        (limits.Fp8ScaleStuck, "fp8/scale_age", 10.0, 2000.0, Tier.WATCH),
        (limits.MoeLoad, "moe/max_load", 1.5, 20.0, Tier.SMALL),
        (limits.MoeDrops, "moe/dropped", 0.0, 0.2, Tier.WATCH),
    ],
)
def test_limits(kind, name: str, fine: float, bad: float, tier: Tier) -> None:
    config = getattr(SECTIONS, kind.name)
    detector = kind(config, LATE)
    assert flagged(feed(detector, [step(i, signals={name: fine}) for i in range(1, 51)])) == []
    records = [step(i, signals={name: bad}) for i in range(51, 51 + config.persistence)]
    records.insert(1, step(49))  # without the signal: neither counts nor interrupts
    verdicts = [v for v in feed(detector, records) if v]
    assert [v.tier for v in verdicts] == [tier]
    assert verdicts[0].value == bad
    detector.reset()
    assert detector.inspect(step(99, signals={name: math.nan})).tier is Tier.LARGE


def test_one_layer_far_above_the_rest() -> None:
    detector = limits.LayerOutlier(SECTIONS.layer_outlier, LATE)

    def tier(largest: float, median: float) -> Tier | None:
        verdict = detector.inspect(step(1, signals={"grad_norm/layer_max": largest, "grad_norm/layer_median": median}))
        return verdict and verdict.tier

    assert [tier(9.0, 1.0), tier(11.0, 1.0), tier(101.0, 1.0)] == [None, Tier.SMALL, Tier.MEDIUM]
    assert [tier(0.0, 0.0), tier(1.0, 0.0)] == [None, Tier.LARGE]
    assert detector.inspect(step(1, signals={"grad_norm/layer_max": 5.0})) is None


def test_growing_norms() -> None:
    for kind, name in ((growth.ParamGrowth, "param_norm"), (growth.EmbeddingGrowth, "embedding_norm")):
        detector = kind(getattr(SECTIONS, kind.name), LATE)
        early = [step(i, signals={name: 1.0 + i}) for i in range(200, 2001, 200)]
        assert flagged(feed(detector, early)) == []
        detector.reset()
        steady = [step(i, signals={name: 100.0 * (1 + i * 1e-5)}) for i in range(2200, 8000, 200)]
        assert flagged(feed(detector, steady)) == []
        growing = [step(i, signals={name: 106.0 * math.exp((i - 8000) * 3e-4)}) for i in range(8000, 16000, 200)]
        assert 8000 < flagged(feed(detector, growing, skip=False))[0] < 14000


def test_throughput_drop_in_seconds_a_token() -> None:
    detector = growth.Throughput(SECTIONS.throughput, LATE)
    healthy = [step(i, signals={"step_seconds": 1.0 + gauss(i, 0.05)}) for i in range(1, 201)]
    assert flagged(feed(detector, healthy)) == []
    twice = [step(i, tokens=1024.0, signals={"step_seconds": 2.0}) for i in range(201, 221)]
    assert flagged(feed(detector, twice)) == []  # twice the tokens
    slow = feed(detector, [step(i, signals={"step_seconds": 1.8}) for i in range(221, 241)])
    assert flagged(slow)[0] == 230


def test_router_logits_and_attention_logits_grow() -> None:
    detector = growth.MoeRouterZ(SECTIONS.moe_router_z, LATE)
    feed(detector, [step(i, signals={"moe/router_z": 5.0}) for i in range(1, 601)])
    assert flagged(feed(detector, [step(i, signals={"moe/router_z": 9.0}) for i in (601, 602, 603)])) == [603]
    trend_ = trend.AttentionLogitGrowth(SECTIONS.attention_logit_growth, LATE)
    flat = [step(i, signals={"attention/max_logit": 12.0 + gauss(i, 1.0)}) for i in range(1, 1001)]
    assert flagged(feed(trend_, flat)) == []
    up = [step(i, signals={"attention/max_logit": 12.0 * math.exp(i * 2e-3) + gauss(i, 1.0)}) for i in range(1, 501)]
    assert flagged(feed(trend_, up))


def test_a_qk_norm_gain_that_drifts_up_is_told_and_one_that_settles_is_not() -> None:
    def told(gain: Callable[[int], float]) -> list[int]:
        detector = trend.QkGainDrift(SECTIONS.qk_gain_drift, LATE)
        records = [step(i, signals={"qk_norm/max_gain": gain(i) * math.exp(gauss(i, 0.01))}) for i in range(1, 1501)]
        return flagged(feed(detector, records, skip=False))

    assert told(lambda i: 1.5 + 0.3 * math.exp(-i / 300)) == []
    assert 100 < told(lambda i: math.exp(i * 1e-3))[0] < 600
    assert told(lambda i: 0.0) == []


def test_spike_at_the_lr_peak_and_not_long_after() -> None:
    def spikes_at(at: int) -> list[int]:
        detector = growth.LrPeak(SECTIONS.lr_peak, LATE)
        records = [
            step(i, loss=2.0 + gauss(i, 0.02) + (1.0 if at <= i < at + 3 else 0.0), learning_rate=min(i / 500, 1.0))
            for i in range(1, 1001)
        ]
        return flagged(feed(detector, records))

    assert spikes_at(550) == [550, 551, 552]
    assert spikes_at(300)
    assert spikes_at(900) == []


def test_held_out_losses_against_each_sets_own_best() -> None:
    detector = growth.HeldOut(SECTIONS.held_out, LATE)

    def evaluated(number: int, code: float, prose: float) -> StepRecord:
        return step(number, signals={"held_out": 2.0, "held_out/code": code, "held_out/prose": prose})

    records = [evaluated(100, 1.0, 3.0), step(150), evaluated(200, 0.9, 2.9), evaluated(300, 0.95, 2.95)]
    assert flagged(feed(detector, records)) == []
    assert detector.inspect(evaluated(400, 1.2, 2.8)).tier is Tier.SMALL
    assert detector.inspect(evaluated(400, 0.9, 3.5)).tier is Tier.LARGE
    assert detector.inspect(evaluated(400, 0.9, math.nan)).tier is Tier.LARGE


def test_a_baseline_from_before_the_learning_rate_stood_still_is_too_old() -> None:
    """Restarted warm-up: what the loss was on the old plateau says nothing of a spike at the new peak."""
    config = SECTIONS.lr_peak.model_copy(update={"near_steps": 30, "warmup_steps": 10, "persistence": 1})

    def records(pause: int) -> list[StepRecord]:
        first = [step(i, loss=6.0 + gauss(i, 0.02), learning_rate=i / 100) for i in range(1, 21)]
        still = [step(i, loss=6.0 + gauss(i, 0.02), learning_rate=0.2) for i in range(21, 21 + pause)]
        at = 21 + pause
        again = [step(i, loss=2.0 + gauss(i, 0.02), learning_rate=0.3 + i / 100) for i in range(at, at + 20)]
        return [*first, *still, *again, step(at + 20, loss=3.0, learning_rate=1.0 + at)]

    assert flagged(feed(growth.LrPeak(config, LATE), records(40))) == [81]
    assert flagged(feed(growth.LrPeak(config, LATE), records(20))) == []  # the old losses are still the baseline
