"""Levels against spikes: what is expected, what diverges, what is told of odd input and of blind detectors."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from megatron_stability import config, yaml_text
from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect import config as c
from megatron_stability.detect.base import blind
from megatron_stability.detect.data import TokenDrop
from megatron_stability.detect.expected import ExpectedChange, allow
from megatron_stability.detect.level import LossDivergence
from megatron_stability.detect.loss import LossMad
from megatron_stability.detect.odd import OddInput
from megatron_stability.errors import UsageError
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Decision, StepRecord, Tier
from tests.unit.steps import feed, flagged, gauss, step

LATE = c.Early(steps=0)


def pipeline(preset: str = "safe", **expect: object) -> Pipeline[StepRecord]:
    settings = c.Detect.model_validate({"expect": expect, "early": {"steps": 0}})
    detectors = build(settings)
    policy = TablePolicy(Decide(preset=preset), "act")
    reset = settings.expect.reset
    return Pipeline(lambda record: record, detectors, policy, (), Episodes(detectors, 50), reset)


def run(of: Pipeline[StepRecord], records: list[StepRecord]) -> list[Decision]:
    decisions = []
    for record in records:
        decisions.append(of.decide(record)[1])
        of.finish(record, decisions[-1])
    return decisions


def curve(
    first: int, last: int, rise: float = 0.0, norm: float = 1.0, sigma: float = 0.02, **fields
) -> list[StepRecord]:
    return [
        step(i, loss=2.0 + rise + gauss(i, sigma), grad_norm=norm * math.exp(gauss(i, 0.15, seed=1)), **fields)
        for i in range(first, last + 1)
    ]


def taken(decisions: list[Decision]) -> list[tuple[int, Action]]:
    return [(decision.step, decision.action) for decision in decisions if decision.action is not Action.APPLY]


def test_a_norm_that_stays_halts_nothing_nor_does_a_start_from_any_state_in_between() -> None:
    one, shifted = pipeline(), curve(201, 400, norm=12.0)
    run(one, curve(1, 200))
    seen = taken(run(one, shifted[:3]))
    again = pipeline()
    again.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
    seen += taken(run(again, shifted[3:]))
    assert seen == [(step, Action.SKIP) for step in (201, 202, 203, 204)]


def test_under_the_field_a_level_costs_one_rewind_and_what_comes_back_there_is_taken() -> None:
    one = pipeline("field")
    run(one, curve(1, 200))
    saved = json.dumps(one.state_dict(), allow_nan=False)
    decisions = run(one, curve(201, 205, norm=12.0, rise=1.5))
    assert taken(decisions)[-1] == (205, Action.REWIND)
    assert decisions[-1].parameters["level"] == 1.0
    live = one.policy.state_dict()
    one.load_state_dict(json.loads(saved) | {"policy": live})
    after = run(one, curve(206, 700, norm=12.0, rise=1.5))  # the window is passed over, the level is still there
    assert {action for _, action in taken(after)} == {Action.SKIP}
    assert "taken as a level" in next(decision.reason for decision in after if decision.parameters.get("level"))


@pytest.mark.parametrize(("announced", "actions"), [("201:data", set()), ("", {Action.SKIP, Action.REWIND})])
def test_an_announced_change_is_not_acted_on(announced: str, actions: set[Action]) -> None:
    one = pipeline("field", announced=announced) if announced else pipeline("field")
    run(one, curve(1, 200))
    assert {action for _, action in taken(run(one, curve(201, 260, rise=3.0, norm=15.0)))} == actions


def test_the_record_itself_shows_a_change_of_batch_or_rate() -> None:
    detector = ExpectedChange(c.Expect(), LATE)
    rates = {1: 1e-4, 2: 2e-4, 30: 3e-4, 31: 9e-4}
    records = [step(i, learning_rate=rates.get(i, 9e-4 if i > 30 else 3e-4)) for i in range(1, 41)]
    assert flagged(feed(detector, records, skip=False)) == [31]  # a warm-up from zero is none
    assert flagged(feed(detector, [step(41, samples=16, learning_rate=9e-4)], skip=False)) == [41]


def test_what_a_resume_was_allowed_to_change_has_its_grace() -> None:
    one, other = pipeline("field"), pipeline("field")
    run(one, curve(1, 200))
    other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
    allow(other.detectors, ("seq_length", "lr"))
    decisions = run(other, curve(201, 240, rise=1.5))
    assert taken(decisions) == []
    assert "seq_length, lr may differ" in decisions[0].verdicts[0].reason
    assert [v.detector for d in decisions[1:] for v in d.verdicts if v.detector == "expect"] == []
    assert Action.REWIND in {action for _, action in taken(run(one, curve(201, 240, rise=1.5)))}


def test_what_is_announced_is_step_and_kind() -> None:
    flags = {"stability_detect_expect_announced": "6001:data,7001:sequence_length"}
    assert config.load(overrides=flags).detect.expect.announced == ((6001, "data"), (7001, "sequence_length"))
    assert c.Detect.model_validate({"expect": ["6001:data"]}).expect.announced == ((6001, "data"),)
    for wrong in ("6001", "data:6001", "6001:date", "6001:data;"):
        with pytest.raises(UsageError, match="is not STEP:KIND; KIND is one of batch_size, sequence_length, data"):
            config.load(overrides={"stability_detect_expect_announced": wrong})


def test_a_baseline_is_reset_by_name_and_said_in_the_first_step() -> None:
    one = pipeline()
    run(one, curve(1, 200))
    saved = json.loads(json.dumps(one.state_dict(), allow_nan=False))
    other = pipeline(reset=["grad_norm_spike"])
    other.load_state_dict(saved)
    decisions = run(other, curve(201, 210, norm=12.0))
    assert taken(decisions) == []
    assert "baselines of grad_norm_spike" in decisions[0].verdicts[0].reason
    assert other.state_dict()["detectors"]["loss_spike"]["window"]["values"][0] != 0
    with pytest.raises(ValueError, match="no such detector: nothing"):
        c.Expect(reset=("nothing",))


def divergence(records: list[StepRecord]) -> list[int]:
    detector = LossDivergence(c.LossDivergence(), LATE)
    feed(detector, curve(1, 300))
    return flagged(feed(detector, records, skip=False))


def test_a_rewind_waits_for_a_loss_that_lasts_or_for_one_with_the_norm() -> None:
    assert divergence(curve(301, 350, rise=0.8))[0] == 320
    assert divergence(curve(301, 350, rise=1.5, norm=6.0))[0] in range(310, 316)
    assert divergence(curve(301, 350, rise=0.45)) == []
    assert divergence(curve(301, 315, rise=3.0) + curve(316, 400)) == []


@pytest.mark.parametrize("tail", [5, 15, 40])
def test_a_spike_that_heals_is_no_divergence(tail: int) -> None:
    heals = [
        step(301 + i, loss=2.0 + 2.0 * math.exp(-i / tail) + gauss(i, 0.02), grad_norm=1 + 9 * math.exp(-i / 5))
        for i in range(200)
    ]
    assert divergence(heals) == []


def test_a_slow_rise_does_not_drag_its_level_along() -> None:
    ramp = [step(300 + i, loss=2.0 + min(0.01 * i, 2.0) + gauss(i, 0.02)) for i in range(1, 301)]
    assert 300 + 50 < divergence(ramp)[0] < 300 + 100


def mad(records: list[StepRecord], early: c.Early = LATE) -> list[int]:
    return flagged(feed(LossMad(c.LossMad(), early), records, skip=False))


@pytest.mark.parametrize("nats", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("fall", ["exponential", "slow", "straight", "power", "sigmoid"])
def test_a_lone_spike_on_a_curve_that_falls_from_11_to_3_is_seen(fall: str, nats: float) -> None:
    falls = {
        "exponential": lambda i: 3.3 + 7.7 * math.exp(-i / 40),
        "slow": lambda i: 3.3 + 7.7 * math.exp(-i / 80),
        "straight": lambda i: max(3.3, 11.0 - 7.7 * i / 150),
        "power": lambda i: 3.3 + 7.7 * i**-0.5,
        "sigmoid": lambda i: 3.3 + 7.7 / (1.0 + math.exp((i - 60) / 12)),
    }[fall]
    found = []
    for seed in range(20):  # the noise at step 60 is 0.08 nats
        noise = [0.02 * (1 + 4 * math.exp(-i / 200)) * gauss(i, 1.0, seed) for i in range(1, 200)]
        losses = [falls(i) + noise[i - 1] + (nats if i == 60 else 0.0) for i in range(1, 200)]
        found.append(mad([step(i, loss=loss) for i, loss in enumerate(losses, 1)], c.Early()))
    steepest_there = fall == "sigmoid"
    assert sum(60 in steps for steps in found) >= (20 if nats > 1.0 else 10 if steepest_there else 17)
    assert all(set(steps) <= {60} for steps in found)


@pytest.mark.parametrize("nats", [2.0, 3.0, 8.0])
def test_a_spike_while_the_loss_still_falls_is_seen(nats: float) -> None:
    def falls(i: int) -> float:
        return 3.3 + 7.7 * math.exp(-i / 25) + gauss(i, 0.05)

    records = [step(i, loss=falls(i) + (nats if i == 60 else 0.0)) for i in range(1, 200)]
    assert mad(records, c.Early()) == [60]


def test_a_lone_step_of_ten_sigma_on_a_flat_curve_is_seen() -> None:
    found = [mad([step(i, loss=2.0 + gauss(i, 0.1, s) + (i == 300)) for i in range(1, 400)]) for s in range(20)]
    assert sum(steps == [300] for steps in found) >= 18
    assert all(set(steps) <= {300} for steps in found)


def test_a_level_in_the_first_steps_is_not_learned_as_normal() -> None:
    assert mad(curve(5001, 5009) + curve(5010, 5030, rise=2.0))[0] == 5010
    falls = [step(i, loss=60.0 if i > 20 else 11.0 - 0.1 * i + gauss(i, 0.02)) for i in range(1, 60)]
    assert mad(falls, c.Early())[0] == 21


def test_a_few_quiet_losses_are_no_measure_of_the_noise() -> None:
    quiet = [step(i, loss=2.0 + gauss(i, 0.001)) for i in range(1, 100)]
    bump = [0.3, 0.3, 0.3]
    assert mad(quiet[:12] + [step(13 + i, loss=2.0 + rise) for i, rise in enumerate(bump)]) == []
    assert mad(quiet + [step(100 + i, loss=2.0 + rise) for i, rise in enumerate(bump)])[0] == 100


def test_a_state_of_the_former_window_is_taken_over() -> None:
    detector = LossMad(c.LossMad(), LATE)
    detector.load_state_dict({"run": 0, "window": {"values": [record.loss for record in curve(1, 100)]}})
    assert detector.inspect(step(101, loss=2.5)) is not None


@pytest.mark.parametrize(("factor", "norm", "told"), [(1.0, 1.0, []), (1024.0, 1.0, [21]), (1.0, 0.0, [21])])
def test_odd_input_is_told_once(factor: float, norm: float, told: list[int]) -> None:
    records = [step(i, loss=factor * record.loss, grad_norm=norm) for i, record in enumerate(curve(1, 300), 1)]
    assert flagged(feed(OddInput(c.OddInput(), LATE), records)) == told


def test_a_sum_is_judged_by_its_own_scatter() -> None:
    scaled = [step(i, loss=1024 * record.loss, grad_norm=1.0) for i, record in enumerate(curve(1, 3000), 1)]
    verdicts = [verdict for decision in run(pipeline("field"), scaled) for verdict in decision.verdicts]
    assert [(verdict.detector, verdict.step) for verdict in verdicts] == [("odd_input", 21)]


def test_steps_withheld_with_a_period_name_their_data() -> None:
    one, records = pipeline(), curve(1, 300)
    for at in range(100, 181, 20):
        records[at - 1] = step(at, loss=2.0, grad_norm=60.0)
    told = [v for d in run(one, records) for v in d.verdicts if v.detector == "odd_input"]
    assert [verdict.step for verdict in told] == [161]
    assert "every 20 steps, first samples 792, 952, 1112, 1272" in told[0].reason


def test_tokens_that_shrink_are_told_before_none_is_left() -> None:
    detector = TokenDrop(c.TokenDrop(), LATE)
    full = [step(i, tokens=1e6) for i in range(1, 101)]
    shrink = [step(100 + i, tokens=1e6 * 0.99**i) for i in range(1, 601)]  # to 2.4e3, by 1 % a step
    found = [v for v in feed(detector, full + shrink, skip=False) if v is not None]
    assert found[0].tier is Tier.WATCH
    assert 0.45e6 / 8 < found[0].value < 0.5e6 / 8
    assert [v.tier for v in found if v.tier is not Tier.WATCH][:1] == [Tier.SMALL]
    assert found[-1].tier is Tier.MEDIUM
    varied = [step(i, tokens=1e6 * (1.0 + gauss(i, 0.1))) for i in range(1, 400)]
    ramp = [step(i, samples=8 + i // 50, tokens=1e3 * (8 + i // 50)) for i in range(1, 400)]
    assert flagged(feed(TokenDrop(c.TokenDrop(), LATE), varied, skip=False)) == []
    assert flagged(feed(TokenDrop(c.TokenDrop(), LATE), ramp, skip=False)) == []
    lone = [step(i, tokens=1e4 if i == 60 else 1e6) for i in range(1, 100)]
    assert flagged(feed(TokenDrop(c.TokenDrop(), LATE), lone, skip=False)) == []


def test_blind_detectors_say_until_which_step() -> None:
    detectors = build(c.Detect())
    begins = blind(detectors, 5001)
    assert (begins["grad_norm_spike"], begins["loss_spike"], begins["loss_mad"]) == (5021, 5051, 5010)
    assert begins["grad_norm_calibrated"] == 5001 + 1200
    assert begins["loss_delta"] == 5151
    records = curve(5001, 5150)
    for detector in detectors:
        feed(detector, records)
    assert not {"grad_norm_spike", "loss_spike", "loss_mad", "loss_delta"} & set(blind(detectors, 5151))


def test_growth_by_the_same_share_every_step_is_no_spike_in_early_training() -> None:
    for rate in (1.12, 1.2):
        records = [step(i, grad_norm=min(1e-4 * rate**i, 1.0)) for i in range(1, 200)]
        early = build(c.Detect())
        spike = next(detector for detector in early if detector.name == "grad_norm_spike")
        assert [v for v in feed(spike, records) if v and v.tier is Tier.LARGE] == []


ROOT = Path(__file__).parents[3]
RECORDED = json.loads((ROOT / "benchmarks" / "data" / "recorded.json").read_text())["curves"]


@pytest.mark.parametrize("table", ["docs/rewind.md", "field"])
@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_no_fault_of_a_recorded_run_is_rewound_for_all_heal(number: int, table: str) -> None:
    text = re.search(r"```yaml\n(decide:\n.*?)```", (ROOT / "docs" / "rewind.md").read_text(), re.DOTALL)
    settings = yaml_text.parse(text[1])["decide"] if text and table != "field" else {"preset": "field"}
    detectors = build(c.Detect())
    policy = TablePolicy(Decide.model_validate(settings), "act")
    one: Pipeline[StepRecord] = Pipeline(lambda record: record, detectors, policy, (), Episodes(detectors, 50))
    losses, norms = RECORDED[number]["loss"], RECORDED[number]["grad_norm"]
    records = [step(i, loss=loss, grad_norm=norm) for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)]
    assert {action for _, action in taken(run(one, records))} <= {Action.SKIP, Action.SCALE_LR}
