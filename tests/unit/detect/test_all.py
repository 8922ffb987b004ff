"""Every other detector: what it finds, what it leaves alone; and what holds for all of them."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stability.detect import DETECTORS, build, grad_norm, loss
from megatron_stability.detect import config as c
from megatron_stability.detect.adam import excess, steps_to_forget
from megatron_stability.detect.base import silent
from megatron_stability.detect.curves import synthesize
from megatron_stability.detect.window import SortedWindow
from megatron_stability.records import StepRecord, Tier
from megatron_stability.signals import SIGNALS
from tests.unit.steps import PROPERTY, feed, flagged, gauss, step

LATE = c.Early(steps=0)  # no looseness
SECTIONS = c.Detect()


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
    severe = after(0.8, 30)
    assert severe[0] == (5, Tier.WATCH)
    assert severe[[tier for _, tier in severe].index(Tier.LARGE)][0] == 24  # the 20th
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
    loss_divergence=c.LossDivergence(warmup_steps=2, steps=4, relearn_after=12),
    loss_ratio=c.LossRatio(window=5, warmup_steps=2, relearn_after=4),
    loss_spike_score=c.SpikeScore(window=6, warmup_steps=2, alert=0.1, relearn_after=4),
    loss_drift=c.Trend(block=2, blocks=10, rise=0.1),
    plateau=c.Plateau(block=2, blocks=4),
    lr_peak=c.LrPeak(window=5, warmup_steps=2, relearn_after=4),
    held_out=c.HeldOut(relearn_after=3),
    param_growth=c.Growth(window=5, warmup_steps=2, after_step=0, relearn_after=4),
    attention_logit_growth=c.Trend(block=1, blocks=10, rise=0.1),
    qk_gain_drift=c.Trend(block=1, blocks=10, rise=0.1),
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
