"""Presets: what each says, how a section begins from one, and the command that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stability import cli, config
from megatron_stability.decide import presets
from megatron_stability.decide.config import Decide, Rule
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.errors import UsageError
from megatron_stability.records import Action, Tier, Verdict
from tests.unit.steps import step


def asks(preset: str, detector: str, tier: Tier) -> Action:
    found = Verdict(detector=detector, tier=tier, step=1, value=1.0, threshold=0.0, reason="found 1")
    return TablePolicy(Decide(preset=preset), "act").decide(step(1), [found]).action


def test_the_default_is_three_rules() -> None:
    assert Decide() == Decide(preset="safe")
    rows = [(rule.detector, rule.tier, rule.action) for rule in Decide().rules]
    assert rows == [
        ("rank_agreement", Tier.SYSTEM, Action.HALT),
        ("non_finite", Tier.NON_FINITE, Action.SKIP),
        ("grad_norm_spike", Tier.LARGE, Action.SKIP),
    ]
    assert (Decide().when_exhausted, Decide().max_rewinds) == ("halt", 2)


@pytest.mark.parametrize(
    ("detector", "tier", "actions"),  # under watch, safe, field, fp8, muon
    [
        ("rank_agreement", Tier.SYSTEM, "apply halt halt halt halt"),
        ("non_finite", Tier.NON_FINITE, "apply skip skip skip skip"),
        ("grad_norm_spike", Tier.LARGE, "apply skip skip skip skip"),
        ("grad_norm_spike", Tier.MEDIUM, "apply apply apply apply apply"),
        ("loss_spike", Tier.LARGE, "apply apply apply apply apply"),
        ("loss_divergence", Tier.LARGE, "apply apply rewind rewind rewind"),
        ("level_change", Tier.LARGE, "apply apply rewind rewind rewind"),
        ("loss_delta", Tier.MEDIUM, "apply apply scale_lr scale_lr scale_lr"),
        ("param_growth", Tier.SMALL, "apply apply scale_weight_decay scale_weight_decay scale_weight_decay"),
        ("fp8_saturation", Tier.MEDIUM, "apply apply apply scale_lr apply"),
        ("attention_logits", Tier.MEDIUM, "apply apply apply apply scale_lr"),
    ],
)
def test_what_each_preset_does(detector: str, tier: Tier, actions: str) -> None:
    assert [asks(preset, detector, tier).value for preset in presets.NAMES] == actions.split()


def test_what_is_given_goes_before_the_preset() -> None:
    own = Rule(detector="loss_spike", tier=Tier.LARGE, action=Action.HALT)
    mixed = Decide(preset="field", rules=(own,), max_rewinds=1)
    assert (mixed.rules, mixed.max_rewinds, mixed.when_exhausted) == ((own,), 1, "rewind")
    assert config.load(overrides={"stability_decide_preset": "watch"}).decide.rules == ()
    assert Decide.model_validate(mixed.model_dump()) == mixed  # as a run's record of it is read


def test_the_field_lowers_the_rate_more_with_each_rewind_and_then_halts() -> None:
    policy, seen = TablePolicy(Decide(preset="field"), "act"), []
    for number in (1, 1001, 2001, 3001):  # at other samples each
        found = Verdict(detector="loss_divergence", tier=Tier.LARGE, step=number, value=9, threshold=3, reason="up")
        decision = policy.decide(step(number), [found])
        policy.settle(decision)
        seen.append((decision.action, decision.parameters.get("factor"), decision.parameters.get("steps")))
    assert seen == [(Action.REWIND, factor, 500.0) for factor in (0.7, 0.5, 0.2)] + [(Action.HALT, None, None)]


def test_only_weight_decay_may_grow() -> None:
    Rule(detector="param_growth", tier=Tier.SMALL, action=Action.SCALE_WEIGHT_DECAY, factor=2.0, steps=5)
    for action in (Action.SCALE_LR, Action.REWIND):
        more = {"generations": 1, "skip_steps": 1} if action is Action.REWIND else {}
        with pytest.raises(ValueError, match="below 1"):
            Rule(detector="loss_delta", tier=Tier.SMALL, action=action, factor=2.0, steps=5, **more)
    with pytest.raises(ValueError, match="takes no level"):
        Rule(detector="loss_delta", tier=Tier.SMALL, action=Action.SKIP, level=True)


def test_an_unknown_preset_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="--stability-decide-preset = 'fields'"):
        config.load(overrides={"stability_decide_preset": "fields"})


def test_the_command_shows_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policy", "list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split(":")[0] for line in listed.splitlines()] == ["watch", "safe (default)", "field", "fp8", "muon"]
    assert cli.main(["policy", "show", "field"]) == 0
    assert capsys.readouterr().out == (Path(presets.FOLDER) / "field.yaml").read_text()
    assert cli.main(["policy", "--json", "show", "field"]) == 0
    assert Decide.model_validate(json.loads(capsys.readouterr().out)) == Decide(preset="field")
    assert cli.main(["policy", "show", "feild"]) == 2
    assert "did you mean field?" in capsys.readouterr().err
