"""Window, non-finite, rank agreement, gradient-norm and loss spikes."""

from __future__ import annotations

import json
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stability.detect import build
from megatron_stability.detect import grad_norm as grad_norm_module
from megatron_stability.detect import loss as loss_module
from megatron_stability.detect import non_finite as non_finite_module
from megatron_stability.detect.config import Detect, Early, GradNormSpike, LossSpike, SpikeScore, Switch, detector_names
from megatron_stability.detect.window import Window
from megatron_stability.records import Tier
from tests.unit.steps import PROPERTY, feed, flagged, gauss, step

LATE = Early(steps=0)  # no looseness


def noisy(number: int, seed: int = 0, **fields):
    rng = random.Random(seed * 1_000_003 + number)
    return step(number, loss=2.0 + rng.gauss(0, 0.02), grad_norm=math.exp(rng.gauss(0, 0.2)), **fields)


def test_detectors_come_in_their_fixed_order_with_finiteness_first() -> None:
    names = [detector.name for detector in build(Detect())]
    assert names[:2] == ["non_finite", "rank_agreement"]
    assert names == list(detector_names())
    assert "loss_spike" not in [d.name for d in build(Detect(loss_spike=LossSpike(enabled=False)))]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
def test_window_equals_a_recomputation_after_many_pushes_with_outliers(scale: float) -> None:
    rng = random.Random(1)
    window = Window(50)
    for i in range(2000):
        window.push(3.0 * scale + rng.gauss(0, 1e-4 * scale) + (1e12 * scale if i % 97 == 0 else 0))
        if i % 97 > 60:  # the outlier has left: what remains must not be its rounding error
            assert window.mean == pytest.approx(statistics.fmean(window.values), rel=1e-12)
            assert window.std == pytest.approx(statistics.pstdev(window.values), rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": math.nan}, "micro-batch losses"),
        ({"grad_norm": math.inf}, "gradient norm"),
        ({"overflow": True}, "loss scaler"),
        ({"tokens": 0.0}, "0 valid tokens"),
    ],
)
def test_non_finite_judges_the_counts(fields, words: str) -> None:
    detector = non_finite_module.NonFinite(Switch(), Early())
    verdict = detector.inspect(step(7, **fields))
    assert verdict is not None
    assert verdict.tier is Tier.NON_FINITE
    assert verdict.step == 7
    assert words in verdict.reason
    assert detector.inspect(step(8)) is None


def test_non_finite_names_the_culprit() -> None:
    verdict = non_finite_module.NonFinite(Switch(), Early()).inspect(step(1, grad_norm=math.nan, culprit_ranks=(3,)))
    assert "ranks 3" in verdict.reason


def test_rank_agreement_names_the_ranks() -> None:
    detector = build(Detect())[1]
    assert detector.inspect(step(5)) is None
    verdict = detector.inspect(step(5, disagreeing_ranks=(1, 3)))
    assert (verdict.tier, verdict.value) == (Tier.SYSTEM, 2.0)
    assert "1, 3" in verdict.reason


def test_grad_norm_tiers_follow_the_ratio_and_flags_stay_out_of_the_mean() -> None:
    detector = grad_norm_module.GradNormSpike(GradNormSpike(warmup_steps=20), LATE)
    records = [step(i) for i in range(1, 21)] + [
        step(21, grad_norm=4.9),
        step(22, grad_norm=7.0),
        step(23, grad_norm=50.0),
        step(24, grad_norm=50.0),
        step(25),
    ]
    verdicts = feed(detector, records)
    assert flagged(verdicts) == [22, 23, 24]
    assert [v.tier for v in verdicts if v] == [Tier.MEDIUM, Tier.LARGE, Tier.LARGE]
    assert detector.window.mean < 1.3


def test_grad_norm_waits_for_warm_up_and_ignores_the_skipped() -> None:
    detector = grad_norm_module.GradNormSpike(GradNormSpike(warmup_steps=20), LATE)
    assert flagged(feed(detector, [step(i, grad_norm=10.0 ** (i % 2 * 3)) for i in range(1, 20)])) == []
    before = detector.state_dict()
    detector.learn(step(30, grad_norm=1.0), applied=False)
    assert detector.state_dict() == before


def test_grad_norm_near_zero_is_no_spike_below_the_floor() -> None:
    detector = grad_norm_module.GradNormSpike(GradNormSpike(warmup_steps=5, floor=1e-6), LATE)
    feed(detector, [step(i, grad_norm=0.0) for i in range(1, 21)])
    assert detector.inspect(step(21, grad_norm=1e-9)) is None
    assert detector.inspect(step(21, grad_norm=1e-3)).tier is Tier.LARGE


def test_an_implausible_value_is_flagged_even_during_warm_up() -> None:
    for detector in build(Detect())[2:]:
        if detector.name in ("grad_norm_spike", "loss_spike"):
            assert detector.inspect(step(1, loss=1e200, grad_norm=1e200)).tier is Tier.LARGE


def test_loss_spike_by_sigma_with_tier_by_nats() -> None:
    detector = loss_module.LossSpike(LossSpike(persistence=1), LATE)
    feed(detector, [noisy(i) for i in range(1, 201)])
    assert detector.inspect(step(201, loss=2.05)) is None
    assert detector.inspect(step(201, loss=9.0)).tier is Tier.WATCH
    for rise, worst in ((2.0, Tier.LARGE), (0.4, Tier.MEDIUM), (0.2, Tier.SMALL)):
        other = loss_module.LossSpike(LossSpike(persistence=1), LATE)
        feed(other, [noisy(i) for i in range(1, 201)])
        tiers = [v.tier for v in feed(other, [step(200 + i, loss=2.0 + rise) for i in range(1, 31)]) if v]
        assert (tiers[0], tiers[18], tiers[19]) == (Tier.WATCH, Tier.SMALL, worst)
    assert detector.inspect(step(201, loss=1.0)) is None


def test_loss_spike_on_a_constant_loss_needs_more_than_rounding() -> None:
    detector = loss_module.LossSpike(LossSpike(), LATE)
    feed(detector, [step(i) for i in range(1, 101)])
    assert detector.inspect(step(101, loss=2.0 + 1e-9)) is None
    assert detector.inspect(step(101, loss=2.1)) is not None


def test_persistence_delays_the_verdict_but_not_the_protection_of_the_baseline() -> None:
    detector = loss_module.LossSpike(LossSpike(persistence=3, k_at_once=1000), LATE)
    feed(detector, [noisy(i) for i in range(1, 101)])
    mean = detector.window.mean
    verdicts = feed(detector, [step(i, loss=3.0) for i in range(101, 105)], skip=False)
    assert flagged(verdicts) == [103, 104]
    assert detector.window.mean == mean
    feed(detector, [noisy(105)])
    assert flagged(feed(detector, [step(i, loss=3.0) for i in (106, 107)])) == []


def test_a_slow_burn_with_normal_gradients_is_found_by_the_loss() -> None:
    """marin issue 1368: the gradient norm never moves."""
    detectors = build(Detect())
    found = set()
    for i in range(1, 401):
        record = step(i, loss=noisy(i).loss + max(0, i - 300) ** 2 * 2e-3, grad_norm=noisy(i).grad_norm)
        for detector in detectors:
            verdict = detector.inspect(record)
            detector.learn(record, applied=True)
            if verdict:
                found.add(detector.name)
    assert "loss_spike" in found
    assert "grad_norm_spike" not in found


def test_healthy_steps_after_a_nan_are_not_flagged() -> None:
    """OLMo-core issues 43 and 424: one NaN must not poison the mean."""
    for detector in build(Detect()):
        records = [noisy(i) for i in range(1, 50)] + [step(50, loss=math.nan, grad_norm=math.nan)]
        feed(detector, records)
        assert flagged(feed(detector, [noisy(i) for i in range(51, 151)])) == [], detector.name


def test_a_spike_three_steps_after_resume_is_flagged() -> None:
    for kind, section in ((grad_norm_module.GradNormSpike, GradNormSpike()), (loss_module.LossSpike, LossSpike())):
        before, after = kind(section, LATE), kind(section, LATE)
        feed(before, [noisy(i) for i in range(1, 101)])
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        records = [noisy(101), noisy(102), step(103, loss=9.0, grad_norm=500.0)]
        assert flagged(feed(after, records)) == [103]
        assert flagged(feed(kind(section, LATE), records)) == []


def test_a_loss_from_2_to_9_nats_is_flagged_while_token_counts_vary() -> None:
    detector = loss_module.LossSpike(LossSpike(), LATE)
    feed(detector, [noisy(i, tokens=float(random.Random(i).randint(1, 4096))) for i in range(1, 101)])
    assert detector.inspect(step(101, loss=9.0, tokens=17.0)) is not None
    before = detector.state_dict()
    feed(detector, [step(101, loss=0.0, tokens=0.0)])
    assert detector.state_dict() == before


def test_a_level_shift_is_reported_and_learned() -> None:
    detector = grad_norm_module.GradNormSpike(GradNormSpike(warmup_steps=5, relearn_after=10), LATE)
    feed(detector, [step(i) for i in range(1, 31)])
    shifted = [step(i, grad_norm=math.nan if i == 35 else 8.0) for i in range(31, 61)]  # between half the ratio and it
    verdicts = feed(detector, shifted, skip=False)
    assert flagged(verdicts) == [i for i in range(31, 42) if i != 35]  # the NaN step neither counts nor interrupts
    assert [v.step for v in verdicts if v and "level shift" in v.reason] == [41]
    assert detector.window.mean == 8.0


def spikes(norms: list[float], **config: Any) -> tuple[Any, list[str | None]]:
    """The detector after 30 norms of about 1 and then these, of which flagged ones are withheld but for a level."""
    detector = grad_norm_module.GradNormSpike(GradNormSpike(**config), LATE)
    feed(detector, [step(i, grad_norm=1.0 + gauss(i, 0.1)) for i in range(1, 31)])
    names: list[str | None] = []
    for i, norm in enumerate(norms, 31):
        record = step(i, grad_norm=norm)
        verdict = detector.inspect(record)
        names.append(verdict and verdict.detector)
        detector.learn(record, applied=record.finite and names[-1] != "grad_norm_spike")
    return detector, names


def test_a_norm_that_stays_is_a_level_before_the_skip_budget_ends() -> None:
    detector, names = spikes([12.0 + gauss(i, 1.0) for i in range(60)])
    assert names == ["grad_norm_spike"] * 4 + ["level_change"] + [None] * 55
    assert detector.window.mean == pytest.approx(12.0, rel=0.05)
    assert spikes([12.0, math.nan, 11.0, 13.0, 12.0, 12.0])[1][-1] == "level_change"
    assert spikes([15.0] * 5 + [200.0])[1][-1] == "grad_norm_spike"  # the new level is judged by at once


def test_norms_unlike_each_other_and_single_ones_are_no_level() -> None:
    assert set(spikes([12.0, 40.0, 170.0, 700.0, 3000.0, 12000.0] * 3)[1]) == {"grad_norm_spike"}
    assert "level_change" not in spikes([15.0, 15.0, 15.0, 15.0, 1.0] * 5)[1]


def test_a_level_that_is_not_applied_is_not_learned() -> None:
    detector, _ = spikes([12.0] * 4)
    mean, record = detector.window.mean, step(35, grad_norm=12.0)
    assert detector.inspect(record).detector == "level_change"
    detector.learn(record, applied=False)
    assert detector.window.mean == mean
    assert detector.inspect(step(36, grad_norm=12.0)).detector == "level_change"


anything = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(min_value=0.1, max_value=10.0),
    st.sampled_from([0.0, 1e99, 1e100, 1e101, 1.7e308, -1.7e308, 5e-324]),
)


@PROPERTY
@given(values=st.lists(st.tuples(anything, anything, st.booleans()), max_size=120))
def test_no_input_puts_a_non_finite_number_into_a_state(values) -> None:
    detectors = build(
        Detect(
            grad_norm_spike=GradNormSpike(warmup_steps=3, window=7, relearn_after=5),
            loss_spike=LossSpike(warmup_steps=8, window=9, relearn_after=5, persistence=2),
        )
    )
    for i, (loss, grad_norm, applied) in enumerate(values, 1):
        record = step(i, loss=loss, grad_norm=grad_norm)
        for detector in detectors:
            detector.inspect(record)
            detector.learn(record, applied=applied)
            json.dumps(detector.state_dict(), allow_nan=False)


@PROPERTY
@given(values=st.lists(st.tuples(anything, anything), min_size=2, max_size=80), cut=st.integers(1, 79))
def test_a_restored_detector_judges_as_the_uninterrupted_one(values, cut: int) -> None:
    config = Detect(
        grad_norm_spike=GradNormSpike(warmup_steps=3, window=7, relearn_after=5),
        loss_spike=LossSpike(warmup_steps=8, window=9, relearn_after=5, persistence=2),
    )
    records = [step(i, loss=loss, grad_norm=norm) for i, (loss, norm) in enumerate(values, 1)]
    for whole, restored in zip(build(config), build(config), strict=True):
        feed(whole, records[:cut])
        restored.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
        assert repr(feed(whole, records[cut:])) == repr(feed(restored, records[cut:]))
        assert whole.state_dict() == restored.state_dict()
        whole.reset()
        assert whole.state_dict() == type(whole)(getattr(config, whole.name), config.early).state_dict()


def test_the_moving_averages_of_the_log_norm_begin_as_plain_ones() -> None:
    logs = [gauss(i, 0.3) for i in range(30)]  # fewer than 1 / (1 - alpha)
    detector = grad_norm_module.GradNormZ(Detect().grad_norm_z, LATE)
    feed(detector, [step(i, grad_norm=math.exp(log)) for i, log in enumerate(logs, 1)])
    assert detector.mean == pytest.approx(statistics.fmean(logs), rel=1e-9)
    assert detector.variance == pytest.approx(statistics.pvariance(logs), rel=1e-9)
    feed(detector, [step(i, grad_norm=math.exp(0.1)) for i in range(31, 500)])
    assert detector.mean == pytest.approx(0.1, abs=1e-4)  # later the past counts for less and less
    before = detector.state_dict()
    feed(detector, [step(500, grad_norm=0.0)])
    assert detector.state_dict() == before  # no logarithm


def test_the_log_norms_tiers_follow_sigma() -> None:
    config = Detect().grad_norm_z
    detector = grad_norm_module.GradNormZ(config, LATE)
    state = {"run": 0, "count": 100, "mean": math.log(2.0), "variance": 0.04}
    detector.load_state_dict(state)

    def tier(sigmas: float) -> Tier | None:
        verdict = detector.inspect(step(101, grad_norm=2.0 * math.exp(0.2 * sigmas)))
        return verdict and verdict.tier

    found = [tier(sigmas) for sigmas in (5.9, 6.1, 11.9, 12.1, -20)]
    assert found == [None, Tier.SMALL, Tier.SMALL, Tier.MEDIUM, None]
    detector.load_state_dict(state | {"count": config.warmup_steps - 1})
    assert tier(12.1) is None


@pytest.mark.parametrize(
    ("nats", "row", "tier"),
    [
        (9.0, 1, Tier.WATCH),
        (9.0, 2, Tier.SMALL),
        (0.51, 19, Tier.SMALL),
        (0.51, 20, Tier.LARGE),
        (0.5, 20, Tier.MEDIUM),
        (0.3, 20, Tier.MEDIUM),
        (0.29, 199, Tier.SMALL),
        (0.29, 200, Tier.MEDIUM),
        (0.15, 200, Tier.SMALL),
    ],
)
def test_a_tier_follows_nats_and_how_long_they_last(nats: float, row: int, tier: Tier) -> None:
    assert loss_module.nats_tier(nats, row) is tier


def test_a_spike_leaves_the_share_when_its_window_has_passed() -> None:
    config = SpikeScore(window=10, warmup_steps=5, alert=0.15)
    detector = loss_module.LossSpikeScore(config, LATE)
    feed(detector, [*(noisy(i) for i in range(1, 21)), step(21, loss=9.0)])
    assert [detector.score(at) for at in (21, 30, 31)] == [0.1, 0.1, 0.0]
    for second, found in ((30, [30]), (31, [])):  # two in ten steps are above the alert, one is not
        other = loss_module.LossSpikeScore(config, LATE)
        other.load_state_dict(detector.state_dict())
        feed(other, [noisy(i) for i in range(22, second)])
        assert flagged(feed(other, [step(second, loss=9.0)])) == found
        assert list(other.spikes) == ([21, 30] if found else [31])
