"""The slope of the logarithm of the largest logits."""

import math

import pytest
import torch

from megatron_stability.observe.logit_growth import LogitGrowth


def test_a_logit_that_doubles_every_100_steps_grows_by_ten_ln_2_in_1000():
    growth = LogitGrowth(size=4)
    found = [growth.add(step, torch.tensor([[2.0 ** (step / 100), 5.0]])) for step in range(100, 1100, 100)]
    assert found[0].isnan().all()
    for slope in found[1:]:
        assert slope[0, 0].item() == pytest.approx(10 * math.log(2), rel=1e-4)
        assert slope[0, 1].item() == pytest.approx(0.0, abs=1e-5)


def test_what_has_no_logarithm_makes_its_own_head_nan_and_is_forgotten():
    growth = LogitGrowth(size=2)
    bad = torch.tensor([[-1.0, 0.0, math.inf, math.nan, -math.inf, 4.0]])
    growth.add(1, torch.full((1, 6), 4.0))
    assert growth.add(2, bad).isnan().tolist() == [[True] * 5 + [False]]
    growth.add(3, torch.full((1, 6), 4.0))
    assert growth.add(4, torch.full((1, 6), 8.0)).isfinite().all()
