"""Expected SNRs and the order of layers, by their definitions."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from megatron_stability import cli, extras
from megatron_stability.numerics.fp8.formats import E4M3, saturating_round
from megatron_stability.numerics.fp8.readiness import LayerReadiness, expected, most_sensitive_first, output_snr_db
from megatron_stability.numerics.fp8.recipes import Recipe

CURRENT = Recipe(name="current")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_expected_is_what_a_cast_with_that_amax_does() -> None:
    x = normal(64, 96)
    for amax in (float(x.abs().max()), 1.0):
        scale = E4M3.max / amax
        back = saturating_round(x * scale, E4M3) / scale
        got = expected(x, amax)
        assert got.snr_db == pytest.approx(10 * math.log10(float((x**2).sum() / ((back - x) ** 2).sum())), abs=1e-3)
        assert got.saturation == pytest.approx(float((x.abs() > amax).float().mean()), abs=1e-3)
    assert expected(x, 1.0).saturation > 0.3
    assert expected(torch.zeros(4), 0.0).saturation == 0.0
    assert math.isnan(expected(torch.zeros(4), 0.0).snr_db)


def test_an_outlier_feature_makes_a_layer_the_most_sensitive() -> None:
    weight, calm, hot = normal(32, 64) * 0.02, normal(128, 64), normal(128, 64)
    hot[:, 7] *= 3e6  # the others fall below E4M3's least value
    weight[:, 7] = 0.0
    clean, hurt = output_snr_db(calm, weight, CURRENT), output_snr_db(hot, weight, CURRENT)
    assert 20 < clean < 45
    assert hurt < clean - 15
    assert output_snr_db(hot, weight, Recipe(name="mxfp8")) > hurt, "a scale a block keeps what one scale loses"
    layers = [LayerReadiness(name, {}, {}, snr) for name, snr in (("a", clean), ("silent", math.nan), ("b", hurt))]
    assert [layer.name for layer in most_sensitive_first(layers)] == ["b", "a", "silent"]


def test_exact_and_empty_outputs() -> None:
    powers = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    assert output_snr_db(powers, powers, Recipe(name="block")) == math.inf
    assert math.isnan(output_snr_db(torch.zeros(2, 2), powers, CURRENT))


def test_fp8_readiness_asks_for_a_checkpoint_and_for_modelopt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    assert cli.main(["fp8-readiness", "--cpu", "--num-layers", "2"]) == 2
    assert "needs --load CHECKPOINT" in capsys.readouterr().err
    assert cli.main(["fp8-readiness", "--cpu", "--load", "x", "--forwards", "0"]) == 2
    assert "--forwards must be at least 1" in capsys.readouterr().err
    assert cli.main(["fp8-readiness", "--cpu", "--load", "x"]) == 2
    assert extras.command("modelopt") in capsys.readouterr().err
