"""Every other detector: what it finds, what it leaves alone; and what holds for all of them."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import PROPERTY, feed, flagged, step

from megatron_stability.detect import DETECTORS, build, grad_norm, growth, limits, loss, trend
from megatron_stability.detect import config as c
from megatron_stability.detect.adam import excess, steps_to_forget
from megatron_stability.detect.curves import synthesize
from megatron_stability.detect.signals import SIGNALS, silent
from megatron_stability.detect.window import SortedWindow
from megatron_stability.records import StepRecord, Tier

LATE = c.Early(steps=0)  # no looseness
SECTIONS = c.Detect()


def gauss(number: int, sigma: float, seed: int = 0) -> float:
    return random.Random(seed * 1_000_003 + number).gauss(0, sigma)


def test_time_to_forget_has_the_known_figures() -> None:
    assert round(excess(50, 0.999, 0), 2) == 3.50
    assert round(excess(50, 0.999, 300), 2) == 2.85
    assert round(excess(50, 0.999, 693), 2) == 2.25
    assert steps_to_forget(50, 0.999) == 3217
    assert excess(50, 0.999, 3217) <= 1.1 < excess(50, 0.999, 3216)
    assert steps_to_forget(1.0, 0.999) == 0


def test_time_to_forget_equals_adams_recursion() -> None:
    v, beta2 = 1.0, 0.95
    for k in range(60):
        gradient = 20.0 if k == 0 else 1.0
        v = beta2 * v + (1 - beta2) * gradient**2
        assert v == pytest.approx(excess(20.0, beta2, k), rel=1e-12)


def test_a_grad_norm_spike_reports_the_time_to_forget_after_clipping() -> None:
    detector = grad_norm.GradNormSpike(SECTIONS.grad_norm_spike, LATE)
    feed(detector, [step(i, grad_norm=0.5) for i in range(1, 31)])
    assert "for 3217 steps" in detector.inspect(step(31, grad_norm=25.0)).reason
    clipped = detector.inspect(step(31, grad_norm=25.0, signals={"clip_grad": 1.0})).reason
    assert "second moment" not in clipped  # r = 2 lifts v by 0.3 %


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
@PROPERTY
def test_mad_and_median_equal_their_definitions(values) -> None:
    window = SortedWindow(23)
    for value in values:
        window.push(value)
        last = sorted(window.values)
        assert window.median == last[len(last) // 2]
        assert window.mad == sorted(abs(x - window.median) for x in last)[len(last) // 2]


def test_robust_spike_is_not_blinded_by_outliers_in_its_window() -> None:
    plain = loss.LossSpike(SECTIONS.loss_spike, LATE)
    robust = loss.LossMad(SECTIONS.loss_mad, LATE)
    for i in range(1, 101):  # outliers from before the first verdict stay in the window
        record = step(i, loss=2.0 + gauss(i, 0.02) + (3.0 if i in (10, 20, 30) else 0.0))
        for detector in (plain, robust):
            detector.inspect(record)
            detector.learn(record, applied=True)
    spike = [step(i, loss=2.4) for i in (101, 102)]
    assert flagged(feed(robust, spike)) == [101, 102]
    assert flagged(feed(plain, spike)) == []


def test_delta_in_nats_from_watch_over_mild_to_severe() -> None:
    def after(rise: float, steps: int) -> list[tuple[int, Tier]]:
        detector = loss.LossDelta(SECTIONS.loss_delta.model_copy(update={"k": 100.0}), LATE)
        feed(detector, [step(i, loss=2.0 + gauss(i, 0.02)) for i in range(1, 401)])
        verdicts = feed(detector, [step(400 + i, loss=2.0 + rise + gauss(i, 0.02)) for i in range(1, steps + 1)])
        return [(v.step - 400, v.tier) for v in verdicts if v]

    assert after(0.1, 300) == []
    mild = after(0.2, 210)
    assert mild[0] == (55, Tier.WATCH)  # the 51st step on which the median of 9 is above
    assert [tier for _, tier in mild].index(Tier.MEDIUM) == 149  # the 200th
    assert after(0.4, 60)[0] == (55, Tier.MEDIUM)
    assert after(0.8, 10)[0] == (5, Tier.LARGE)
    assert after(0.8, 4) == []  # one bad batch, or four, is no change of the median


def test_delta_watches_a_small_but_significant_rise_and_one_that_ramps() -> None:
    detector = loss.LossDelta(SECTIONS.loss_delta, LATE)
    feed(detector, [step(i, loss=2.0 + gauss(i, 0.01)) for i in range(1, 401)])
    ramp = feed(detector, [step(400 + i, loss=2.0 + 0.001 * i + gauss(i, 0.01)) for i in range(1, 301)])
    assert 25 < flagged(ramp)[0] - 400 < 80
    assert detector.window.mean < 2.01


def test_ratio_tiers() -> None:
    detector = loss.LossRatio(SECTIONS.loss_ratio, LATE)
    feed(detector, [step(i) for i in range(1, 101)])
    tiers = [detector.inspect(step(101, loss=x)) for x in (3.9, 5.0, 11.0, 41.0)]
    assert [v and v.tier for v in tiers] == [None, Tier.SMALL, Tier.MEDIUM, Tier.LARGE]
    row = feed(detector, [step(i, loss=5.0) for i in range(101, 113)])
    assert [v.tier for v in row] == [Tier.SMALL] * 10 + [Tier.MEDIUM] * 2


def test_spike_score_counts_seven_sigma_and_reports_a_high_share_only() -> None:
    config = c.SpikeScore(window=200, warmup_steps=50, alert=0.02)
    detector = loss.LossSpikeScore(config, LATE)
    records = [step(i, loss=3.0 if i > 100 and i % 25 == 0 else 2.0 + gauss(i, 0.02)) for i in range(1, 301)]
    verdicts = feed(detector, records)
    assert detector.score(300) == 8 / 200
    assert flagged(verdicts) == [225, 250, 275, 300]  # the fifth spike is 2.5 %
    feed(detector, [step(i, loss=2.0 + gauss(i, 0.02)) for i in range(301, 601)])
    assert detector.score(500) == 0.0


def test_z_score_of_the_log_norm_needs_sigma_and_ratio() -> None:
    detector = grad_norm.GradNormZ(SECTIONS.grad_norm_z, LATE)
    feed(detector, [step(i, grad_norm=math.exp(gauss(i, 0.1))) for i in range(1, 201)])
    assert detector.mean == pytest.approx(0.0, abs=0.1)
    assert math.sqrt(detector.variance) == pytest.approx(0.1, rel=0.4)
    tiers = [detector.inspect(step(201, grad_norm=x)) for x in (2.5, 3.3, 20.0)]
    assert [v and v.tier for v in tiers] == [None, Tier.SMALL, Tier.MEDIUM]
    feed(detector, [step(201, grad_norm=0.0)])
    assert detector.inspect(step(202, grad_norm=0.0)) is None


def test_calibration_takes_percentiles_and_mean_plus_three_sigma() -> None:
    norms = [float(i) for i in range(1, 1001)]
    random.Random(0).shuffle(norms)
    clip, alert, spike = grad_norm.calibrate(norms)
    assert (clip, alert) == (950.0, 990.0)
    assert spike == pytest.approx(500.5 + 3 * statistics.pstdev(norms))
    for bad in (norms[:99], [*norms, math.nan]):
        with pytest.raises(ValueError, match="at least 100 finite"):
            grad_norm.calibrate(bad)


def test_calibrated_detector_leaves_the_first_norms_out_and_then_judges() -> None:
    config = c.GradNormCalibrated(skip_steps=50, calibration_steps=200, persistence=3)
    detector = grad_norm.GradNormCalibrated(config, LATE)
    records = [step(i, grad_norm=100.0 if i <= 50 else 1.0 + gauss(i, 0.05)) for i in range(1, 251)]
    assert flagged(feed(detector, records)) == []
    assert detector.calibration.clip == pytest.approx(1.08, abs=0.05)
    assert detector.inspect(step(251, grad_norm=6.0)).tier is Tier.MEDIUM
    verdicts = feed(detector, [step(i, grad_norm=1.5) for i in range(251, 255)])
    assert [v and v.tier for v in verdicts] == [None, None, Tier.WATCH, Tier.WATCH]
    given_ = grad_norm.GradNormCalibrated(c.GradNormCalibrated(clip=1.0, spike=2.0), LATE)
    assert given_.inspect(step(1, grad_norm=5.5)).tier is Tier.MEDIUM


def test_clip_fraction_reports_each_limit_once_until_it_re_arms() -> None:
    detector = grad_norm.ClipFraction(c.ClipFraction(window=100, after_step=200), LATE)

    def run(first: int, share: float, steps: int) -> list[tuple[int, Tier]]:
        records = [
            step(i, grad_norm=2.0 if (i * 7) % 10 < share * 10 else 0.5, signals={"clip_grad": 1.0})
            for i in range(first, first + steps)
        ]
        return [(v.step, v.tier) for v in feed(detector, records, skip=False) if v]

    assert run(1, 1.0, 200) == []  # early training
    assert run(201, 0.0, 200)[1:] == []
    assert detector.fraction == 0.0
    assert [tier for _, tier in run(401, 0.4, 200)] == [Tier.WATCH]
    assert [tier for _, tier in run(601, 0.8, 200)] == [Tier.SMALL]
    assert run(801, 0.0, 200) == []
    assert [tier for _, tier in run(1001, 0.4, 200)] == [Tier.WATCH]


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


def test_early_training_is_looser() -> None:
    early = c.Early(steps=500, factor=2.0)
    assert [early.looseness(i) for i in (0, 250, 500, 9000)] == [2.0, 1.5, 1.0, 1.0]
    loose, strict = (loss.LossSpike(SECTIONS.loss_spike, e) for e in (early, LATE))
    for detector in (loose, strict):
        feed(detector, [step(i, loss=2.0 + gauss(i, 0.02)) for i in range(1, 101)])
    records = [step(i, loss=2.14) for i in (101, 102)]
    assert (flagged(feed(loose, records)), flagged(feed(strict, records))) == ([], [102])


def test_every_required_signal_is_documented_and_silence_can_be_told() -> None:
    for kind in DETECTORS:
        assert set(kind.requires) <= set(SIGNALS), kind.name
    lacking = silent(build(SECTIONS), {"clip_grad", "step_seconds", "grad_norm/layer_max"})
    assert lacking["layer_outlier"] == ("grad_norm/layer_median",)
    assert "clip_fraction" not in lacking
    assert "loss_spike" not in lacking
    assert silent(build(SECTIONS), set(SIGNALS)) == {}


@pytest.mark.parametrize("seed", [11, 12])
def test_no_false_alarm_on_a_healthy_curve(seed: int) -> None:
    detectors = build(SECTIONS)
    alarms = []
    for record in synthesize(seed, 20000, faults=False).records:
        found = {d.name: v for d in detectors if (v := d.inspect(record)) is not None}
        for detector in detectors:
            detector.learn(record, applied=True)
        alarms += found.values()
    assert alarms == []
    assert len(json.dumps({d.name: d.state_dict() for d in detectors})) <= 100_000


number = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0.0, 20.0),
    st.sampled_from([0.0, 1e100, 1.7e308, -1.7e308, math.nan, -math.inf, 5e-324]),
)
names = sorted(name.replace("<set>", "web") for name in SIGNALS)
observations = st.lists(
    st.tuples(number, number, st.dictionaries(st.sampled_from(names), number, max_size=8), st.booleans()), max_size=60
)
SMALL = c.Detect(
    early=c.Early(steps=10),
    grad_norm_spike=c.GradNormSpike(window=5, warmup_steps=2, relearn_after=4),
    grad_norm_z=c.GradNormZ(warmup_steps=2, relearn_after=4),
    grad_norm_calibrated=c.GradNormCalibrated(skip_steps=0, clip=1.0, spike=2.0, persistence=2, relearn_after=4),
    grad_norm_spike_score=c.SpikeScore(window=6, warmup_steps=2, alert=0.1, relearn_after=4),
    grad_norm_drift=c.Trend(block=2, blocks=10, rise=0.1),
    clip_fraction=c.ClipFraction(window=10, after_step=0),
    loss_spike=c.LossSpike(window=5, warmup_steps=2, relearn_after=4),
    loss_mad=c.LossMad(window=5, warmup_steps=2, relearn_after=4),
    loss_delta=c.LossDelta(window=5, warmup_steps=2, lag=3, smooth=3, watch_steps=2, relearn_after=6),
    loss_ratio=c.LossRatio(window=5, warmup_steps=2, relearn_after=4),
    loss_spike_score=c.SpikeScore(window=6, warmup_steps=2, alert=0.1, relearn_after=4),
    loss_drift=c.Trend(block=2, blocks=10, rise=0.1),
    plateau=c.Plateau(block=2, blocks=4),
    lr_peak=c.LrPeak(window=5, warmup_steps=2, relearn_after=4),
    held_out=c.HeldOut(relearn_after=3),
    param_growth=c.Growth(window=5, warmup_steps=2, after_step=0, relearn_after=4),
    attention_logit_growth=c.Trend(block=1, blocks=10, rise=0.1),
)


def observed(values) -> list[tuple[StepRecord, bool]]:
    return [
        (step(i, loss=x, grad_norm=norm, signals=signals, learning_rate=i % 7), applied)
        for i, (x, norm, signals, applied) in enumerate(values, 1)
    ]


@PROPERTY
@given(values=observations, cut=st.integers(0, 60))
def test_states_stay_finite_and_restored_detectors_judge_alike(values, cut: int) -> None:
    for whole, restored in zip(build(SMALL), build(SMALL), strict=True):
        fresh = whole.state_dict()
        for at, (record, applied) in enumerate(observed(values)):
            if at == cut:
                restored.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
            verdict = whole.inspect(record)
            if at >= cut:
                assert repr(restored.inspect(record)) == repr(verdict)
                restored.learn(record, applied)
            whole.learn(record, applied)
            json.dumps(whole.state_dict(), allow_nan=False)
        if cut < len(values):
            assert restored.state_dict() == whole.state_dict()
        whole.reset()
        assert whole.state_dict() == fresh
        restored.load_state_dict(fresh)
        assert restored.state_dict() == fresh


@PROPERTY
@given(values=observations)
def test_inspect_changes_no_state(values) -> None:
    for detector in build(SMALL):
        for record, applied in observed(values):
            before = detector.state_dict()
            verdict = detector.inspect(record)
            assert detector.state_dict() == before
            assert repr(detector.inspect(record)) == repr(verdict)
            detector.learn(record, applied)
