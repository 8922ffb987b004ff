"""The policy table and its budgets."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stability.config import load
from megatron_stability.decide.config import Decide, Rule
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.errors import UsageError
from megatron_stability.records import Action, Tier, Verdict
from tests.unit.steps import PROPERTY, step


def verdict(detector: str = "non_finite", tier: Tier = Tier.NON_FINITE) -> Verdict:
    return Verdict(detector=detector, tier=tier, step=1, value=1.0, threshold=0.0, reason="found 1")


def run(policy: TablePolicy, bad: list[bool]) -> list[Action]:
    actions = []
    for i, is_bad in enumerate(bad, 1):
        decision = policy.decide(step(i), [verdict()] if is_bad else [])
        policy.settle(decision)
        actions.append(decision.advised)
    return actions


def test_no_verdict_applies() -> None:
    decision = TablePolicy(Decide(), "act").decide(step(3), [])
    assert (decision.action, decision.advised, decision.step) == (Action.APPLY, Action.APPLY, 3)


@pytest.mark.parametrize(
    ("detector", "tier", "action"),
    [
        ("non_finite", Tier.NON_FINITE, Action.SKIP),
        ("grad_norm_spike", Tier.LARGE, Action.SKIP),
        ("grad_norm_spike", Tier.MEDIUM, Action.APPLY),
        ("loss_spike", Tier.LARGE, Action.APPLY),
        ("rank_agreement", Tier.SYSTEM, Action.HALT),
    ],
)
def test_the_default_table(detector: str, tier: Tier, action: Action) -> None:
    decision = TablePolicy(Decide(), "act").decide(step(1), [verdict(detector, tier)])
    assert decision.action is action
    assert detector in decision.reason
    assert decision.reason.startswith("advice only") == (action is Action.APPLY)


def test_the_worst_matching_rule_wins_whatever_the_order() -> None:
    found = [verdict("rank_agreement", Tier.SYSTEM), verdict()]
    for verdicts in (found, found[::-1]):
        decision = TablePolicy(Decide(), "act").decide(step(1), verdicts)
        assert decision.action is Action.HALT
        assert decision.reason.startswith("rank_agreement")
        assert decision.verdicts == tuple(verdicts)


def test_a_star_rule_matches_every_detector_at_its_tier_or_above() -> None:
    policy = TablePolicy(Decide(rules=(Rule(detector="*", tier=Tier.MEDIUM, action=Action.SKIP),)), "act")
    assert policy.decide(step(1), [verdict("loss_spike", Tier.SMALL)]).action is Action.APPLY
    assert policy.decide(step(1), [verdict("loss_spike", Tier.MEDIUM)]).action is Action.SKIP
    assert policy.decide(step(1), [verdict("loss_spike", Tier.LARGE)]).action is Action.SKIP


def test_one_skip_too_many_in_a_row_halts() -> None:
    policy = TablePolicy(Decide(max_consecutive_skips=2), "act")
    assert run(policy, [True, True, False, True, True]) == [Action.SKIP] * 2 + [Action.APPLY] + [Action.SKIP] * 2
    decision = policy.decide(step(6), [verdict()])
    assert decision.action is Action.HALT
    assert "2 steps in a row" in decision.reason


def test_one_skip_too_many_in_a_thousand_steps_halts() -> None:
    pattern = ([True] + [False] * 99) * 10  # 10 skips in 1000 steps
    assert Action.HALT not in run(TablePolicy(Decide(max_skips_per_1000_steps=10), "act"), pattern * 3)
    tight = TablePolicy(Decide(max_skips_per_1000_steps=9), "act")
    assert Action.HALT not in run(tight, pattern[:900])
    halt = tight.decide(step(901), [verdict()])
    assert halt.action is Action.HALT
    assert "9 of the last 1000" in halt.reason


def test_decide_changes_no_budget() -> None:
    policy = TablePolicy(Decide(max_consecutive_skips=1), "act")
    before = policy.state_dict()
    for _ in range(5):
        assert policy.decide(step(1), [verdict()]).action is Action.SKIP
    assert policy.state_dict() == before


def test_the_scalers_own_overflow_is_outside_the_budget() -> None:
    policy = TablePolicy(Decide(max_consecutive_skips=1, max_skips_per_1000_steps=1), "act")
    for i in range(1, 41):
        decision = policy.decide(step(i, grad_norm=math.inf, overflow=True), [verdict()])
        policy.settle(decision)
        assert decision.action is Action.SKIP
    assert run(policy, [True, True]) == [Action.SKIP, Action.HALT]


def test_a_non_finite_loss_under_fp16_is_not_the_scalers_own() -> None:
    """The scaler multiplies the loss after it was computed, so no scale makes a NaN loss finite."""
    policy = TablePolicy(Decide(max_consecutive_skips=1), "act")
    actions = []
    for i in (1, 2):
        decision = policy.decide(step(i, loss=math.nan, grad_norm=math.inf, overflow=True), [verdict()])
        policy.settle(decision)
        actions.append(decision.action)
    assert actions == [Action.SKIP, Action.HALT]


def test_observe_applies_and_says_what_act_would_do() -> None:
    observe, act = (
        TablePolicy(Decide(max_consecutive_skips=2), "observe"),
        TablePolicy(Decide(max_consecutive_skips=2), "act"),
    )
    for i in range(1, 6):
        seen, done = (p.decide(step(i, loss=math.nan), [verdict()]) for p in (observe, act))
        assert seen.action is Action.APPLY
        assert seen.updates_weights
        assert seen.advised is done.action
        assert f"would {done.action}" in seen.reason
        observe.settle(seen)
        act.settle(done)
    assert observe.decide(step(6), []).action is Action.APPLY


@PROPERTY
@given(
    before=st.lists(st.booleans(), max_size=60),
    after=st.lists(st.booleans(), max_size=60),
    mode=st.sampled_from(["observe", "act"]),
)
def test_a_restored_policy_decides_as_the_uninterrupted_one(before, after, mode) -> None:
    config = Decide(max_consecutive_skips=3, max_skips_per_1000_steps=8)
    whole, restored = TablePolicy(config, mode), TablePolicy(config, mode)
    run(whole, before)
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
    assert run(whole, after) == run(restored, after)


def test_budgets_do_not_cross_from_observe_to_act() -> None:
    observe = TablePolicy(Decide(), "observe")
    run(observe, [True] * 50)
    act = TablePolicy(Decide(), "act")
    act.load_state_dict(observe.state_dict())
    assert run(act, [True]) == [Action.SKIP]


def test_detectors_and_policy_skip_the_nan_and_nothing_after_it() -> None:
    """OLMo-core issue 43, through detectors and policy together."""
    detectors, policy = build(Detect()), TablePolicy(Decide(), "act")
    skipped = []
    for i in range(1, 121):
        record = step(i, loss=math.nan if i == 50 else 2.0 + 0.01 * (i % 3), grad_norm=60.0 if i == 80 else 1.0)
        decision = policy.decide(record, [v for d in detectors if (v := d.inspect(record))])
        for detector in detectors:
            detector.learn(record, decision.updates_weights)
        policy.settle(decision)
        if decision.action is Action.SKIP:
            skipped.append(i)
    assert skipped == [50, 80]


def test_a_rule_for_an_unknown_detector_is_refused_with_a_suggestion(tmp_path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("decide: {rules: [{detector: loss_spikes, tier: large, action: skip}]}")
    with pytest.raises(UsageError, match="did you mean loss_spike"):
        load(file)


def test_a_window_too_small_for_its_warm_up_is_refused() -> None:
    with pytest.raises(UsageError, match="warmup_steps 20 is more than window 10"):
        load(None, {"stability_detect_grad_norm_spike_window": "10"})


LR = {"action": Action.SCALE_LR, "factor": 0.8, "steps": 500}
BACK = {"action": Action.REWIND, "generations": 1, "skip_steps": 8, "factor": 0.8, "steps": 500}


def rule(detector: str, tier: Tier, **fields) -> Rule:
    return Rule(detector=detector, tier=tier, **fields)


def quiet(policy: TablePolicy, steps: int) -> None:
    for i in range(steps):
        policy.settle(policy.decide(step(i + 1), []))


def test_scale_lr_carries_its_parameters_and_cools_down() -> None:
    policy = TablePolicy(Decide(rules=(rule("loss_spike", Tier.MEDIUM, **LR),), cooldown_steps=100), "act")
    medium = [verdict("loss_spike", Tier.MEDIUM)]
    first = policy.decide(step(1), medium)
    assert (first.action, dict(first.parameters)) == (Action.SCALE_LR, {"factor": 0.8, "steps": 500.0})
    assert first.updates_weights
    policy.settle(first)
    again = policy.decide(step(2), medium)
    assert again.action is Action.APPLY
    assert "cool-down" in again.reason
    quiet(policy, 99)
    assert policy.decide(step(101), medium).action is Action.APPLY
    quiet(policy, 1)
    assert policy.decide(step(102), medium).action is Action.SCALE_LR


def test_each_rewind_goes_further_back_with_a_lower_rate_and_then_halts() -> None:
    policy = TablePolicy(Decide(rules=(rule("loss_spike", Tier.LARGE, **BACK),), max_rewinds=2), "act")
    seen = []
    for i in (1, 2, 3):
        decision = policy.decide(step(i), [verdict("loss_spike", Tier.LARGE)])
        policy.settle(decision)
        seen.append((decision.action, dict(decision.parameters)))
    assert seen == [
        (Action.REWIND, {"generations": 1.0, "skip_steps": 8.0, "attempt": 1.0, "factor": 0.8, "steps": 500.0}),
        (Action.REWIND, {"generations": 2.0, "skip_steps": 8.0, "attempt": 2.0, "factor": 0.4, "steps": 500.0}),
        (Action.HALT, {}),
    ]
    assert "2 rewinds were not enough" in decision.reason


def test_exhausted_skips_may_rewind_before_they_halt() -> None:
    config = Decide(max_consecutive_skips=2, when_exhausted="rewind", max_rewinds=1)
    assert run(TablePolicy(config, "act"), [True] * 6) == [
        Action.SKIP,
        Action.SKIP,
        Action.REWIND,
        Action.SKIP,
        Action.SKIP,
        Action.HALT,
    ]


def test_probation_raises_finite_tiers_by_one_but_never_towards_a_skip() -> None:
    rules = (
        rule("loss_spike", Tier.MEDIUM, **LR),
        rule("grad_norm_spike", Tier.LARGE, action=Action.SKIP),
        rule("non_finite", Tier.NON_FINITE, action=Action.SKIP),
        rule("lr_peak", Tier.NON_FINITE, action=Action.HALT),
    )
    policy = TablePolicy(Decide(rules=rules, probation_steps=50), "act")

    def action(detector: str, tier: Tier) -> Action:
        return policy.decide(step(1), [verdict(detector, tier)]).action

    assert not policy.on_probation
    assert action("loss_spike", Tier.SMALL) is Action.APPLY
    run(policy, [True])
    assert policy.on_probation
    assert action("loss_spike", Tier.SMALL) is Action.SCALE_LR
    assert action("loss_spike", Tier.WATCH) is Action.APPLY
    assert action("grad_norm_spike", Tier.MEDIUM) is Action.APPLY
    assert action("lr_peak", Tier.LARGE) is Action.APPLY  # large is not raised to non-finite
    quiet(policy, 50)
    assert action("loss_spike", Tier.SMALL) is Action.APPLY


def test_joined_detectors_must_agree_within_the_given_steps() -> None:
    joined = rule("loss_spike+grad_norm_spike", Tier.MEDIUM, action=Action.SKIP, within=3)
    policy = TablePolicy(Decide(rules=(joined,)), "act")
    loss, norm = verdict("loss_spike", Tier.MEDIUM), verdict("grad_norm_spike", Tier.LARGE)

    def action(*verdicts: Verdict) -> Action:
        decision = policy.decide(step(1), verdicts)
        policy.settle(decision)
        return decision.action

    assert action(loss) is Action.APPLY
    assert action(loss, norm) is Action.SKIP
    quiet(policy, 3)
    assert action(norm) is Action.APPLY
    assert action(verdict("loss_spike", Tier.SMALL)) is Action.APPLY
    assert action(loss) is Action.SKIP  # two steps after the norm
    quiet(policy, 3)
    assert action(loss) is Action.APPLY


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"action": "scale_lr"}, "needs factor and steps"),
        ({"action": "rewind"}, "needs generations and skip_steps"),
        ({"action": "rewind", "generations": 1, "skip_steps": 1, "factor": 0.5}, "together or not at all"),
        ({"action": "skip", "factor": 0.5, "steps": 3}, "takes no factor"),
        ({"action": "skip", "generations": 2}, "takes no generations"),
        ({"action": "scale_lr", "factor": 1.5, "steps": 3}, "below 1"),
        ({"action": "skip", "detector": "loss_spike+nothing"}, "no such detector: nothing"),
    ],
)
def test_a_rule_without_or_with_wrong_parameters_is_refused(fields, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rule(**{"detector": "*", "tier": "large", **fields})


def test_a_table_with_every_action_survives_a_restart(tmp_path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        """
decide:
  max_rewinds: 3
  probation_steps: 0
  rules:
    - {detector: loss_spike+grad_norm_spike, tier: medium, within: 5, action: scale_weight_decay, factor: 0.5, steps: 9}
    - {detector: loss_spike, tier: large, action: rewind, generations: 1, skip_steps: 4}
    - {detector: "*", tier: system, action: halt}
"""
    )
    config = load(file).decide
    whole, restored = TablePolicy(config, "act"), TablePolicy(config, "act")
    loss, norm, large = (
        verdict("loss_spike", Tier.MEDIUM),
        verdict("grad_norm_spike", Tier.MEDIUM),
        verdict("loss_spike", Tier.LARGE),
    )
    for found in ([norm], [large]):
        whole.settle(whole.decide(step(1), found))
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
    expected = [Action.SCALE_WEIGHT_DECAY, Action.REWIND, Action.REWIND, Action.HALT]
    for policy in (whole, restored):
        taken = []
        for found in ([loss], [large], [large], [large]):
            decision = policy.decide(step(2), found)
            policy.settle(decision)
            taken.append(decision.action)
        assert taken == expected


@pytest.mark.parametrize("within", [1, 3])
def test_joined_verdicts_agree_up_to_the_step_before_within(within: int) -> None:
    joined = rule("loss_spike+grad_norm_spike", Tier.MEDIUM, action=Action.SKIP, within=within)
    for apart in range(5):
        policy = TablePolicy(Decide(rules=(joined,)), "act")
        first = [verdict("grad_norm_spike", Tier.MEDIUM)]
        if apart:
            policy.settle(policy.decide(step(1), first))
            quiet(policy, apart - 1)
        found = [verdict("loss_spike", Tier.MEDIUM), *(first if not apart else ())]
        action = policy.decide(step(9), found).action
        assert action is (Action.SKIP if apart < within else Action.APPLY), apart


def test_a_lower_tier_does_not_agree_and_does_not_hide_a_higher_one() -> None:
    joined = rule("loss_spike+grad_norm_spike", Tier.MEDIUM, action=Action.SKIP, within=3)
    policy = TablePolicy(Decide(rules=(joined,)), "act")
    policy.settle(policy.decide(step(1), [verdict("grad_norm_spike", Tier.SMALL)]))
    assert policy.decide(step(2), [verdict("loss_spike", Tier.MEDIUM)]).action is Action.APPLY
    policy.settle(policy.decide(step(2), [verdict("grad_norm_spike", Tier.LARGE)]))
    policy.settle(policy.decide(step(3), [verdict("grad_norm_spike", Tier.SMALL)]))
    assert policy.decide(step(4), [verdict("loss_spike", Tier.MEDIUM)]).action is Action.SKIP


def test_probation_ends_after_so_many_steps_and_not_one_earlier() -> None:
    policy = TablePolicy(Decide(probation_steps=50), "act")
    run(policy, [True])
    quiet(policy, 49)
    assert policy.on_probation
    quiet(policy, 1)
    assert not policy.on_probation


def test_a_rewind_gives_skips_their_budget_back() -> None:
    rules = (
        rule("non_finite", Tier.NON_FINITE, action=Action.SKIP),
        rule("loss_spike", Tier.LARGE, **{**BACK, "factor": None, "steps": None}),
    )
    in_a_row = TablePolicy(Decide(rules=rules, max_consecutive_skips=2, probation_steps=0), "act")
    in_all = TablePolicy(Decide(rules=rules, max_skips_per_1000_steps=2, probation_steps=0), "act")
    for policy in (in_a_row, in_all):
        assert run(policy, [True, True]) == [Action.SKIP] * 2
        back = policy.decide(step(3), [verdict("loss_spike", Tier.LARGE)])
        policy.settle(back)
        assert back.action is Action.REWIND
        assert run(policy, [True, True, True]) == [Action.SKIP, Action.SKIP, Action.HALT]


def test_a_halt_gives_nothing_back_and_uses_nothing_up() -> None:
    """A run that is started again after a halt, without a look at its cause, halts again."""
    for config in (Decide(max_consecutive_skips=2), Decide(max_skips_per_1000_steps=2)):
        policy = TablePolicy(config, "act")
        assert run(policy, [True] * 5) == [Action.SKIP] * 2 + [Action.HALT] * 3
    assert run(policy, [False] * 994 + [True])[-1] is Action.HALT  # the first skip is 999 steps ago
    assert run(policy, [True])[-1] is Action.SKIP
    rewinding = TablePolicy(Decide(rules=(rule("loss_spike", Tier.LARGE, **BACK),), max_rewinds=0), "act")
    for _ in range(2):
        decision = rewinding.decide(step(1), [verdict("loss_spike", Tier.LARGE)])
        rewinding.settle(decision)
        assert decision.action is Action.HALT
        assert "0 rewinds were not enough" in decision.reason


def test_a_system_verdict_halts_whatever_rewind_rules_stand_beside_its_own() -> None:
    """A rewind needs ranks that agree: the halt wins, in whatever order rules and verdicts come."""
    rules = (rule("*", Tier.LARGE, **BACK), rule("rank_agreement", Tier.SYSTEM, action=Action.HALT))
    found = [verdict("rank_agreement", Tier.SYSTEM), verdict("loss_spike", Tier.LARGE)]
    for order in (found, found[::-1]):
        for table in (rules, rules[::-1]):
            decision = TablePolicy(Decide(rules=table), "act").decide(step(1), order)
            assert decision.action is Action.HALT
            assert decision.reason.startswith("rank_agreement")


WINDOWS = [((3, 8), True), ((0, 1), True), ((8, 3), False), ((3, 3), False), ((-1, 3), False)]


@pytest.mark.parametrize(("window", "fine"), WINDOWS)
def test_a_window_of_samples_has_an_order(window: tuple[int, int], fine: bool) -> None:
    if fine:
        assert Decide(skip_samples=(window,)).skip_samples == (window,)
    else:
        with pytest.raises(ValueError, match="is not a window of samples"):
            Decide(skip_samples=(window,))


def test_a_rule_for_a_detector_unlike_any_other_lists_them_all() -> None:
    with pytest.raises(ValueError, match="known: non_finite, rank_agreement, expect, grad_norm_spike"):
        rule("zzz", Tier.LARGE, action=Action.SKIP)
