"""The factor on a scheduler's value: how long it lasts, how it returns, that it survives a checkpoint."""

import json

import pytest

from megatron_stability.act.scale import Scale


def test_the_factor_lasts_its_steps_and_returns_by_a_ramp() -> None:
    scale = Scale()
    scale.begin(step=11, factor=0.5, steps=100)
    values = [scale.at(step) for step in range(1, 121)]
    assert values[:10] == [1.0] * 10
    assert values[10:100] == [0.5] * 90
    ramp = values[100:110]
    assert ramp == sorted(ramp)
    assert 0.5 < ramp[0] < ramp[-1] < 1.0
    steps = [after - before for before, after in zip([0.5, *ramp], [*ramp, 1.0], strict=True)]
    assert steps == pytest.approx([steps[0]] * 11)
    assert values[110:] == [1.0] * 10


def test_a_new_factor_takes_the_place_of_the_old() -> None:
    scale = Scale()
    scale.begin(step=1, factor=0.5, steps=10)
    scale.begin(step=3, factor=0.8, steps=10)
    assert scale.at(3) == 0.8


def test_state_goes_through_json() -> None:
    scale, restored = Scale(), Scale()
    scale.begin(step=7, factor=0.8, steps=50)
    restored.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert [restored.at(step) for step in range(70)] == [scale.at(step) for step in range(70)]
