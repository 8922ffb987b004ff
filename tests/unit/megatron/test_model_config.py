"""The `model` section: bad values are refused by name."""

from __future__ import annotations

import pytest

from megatron_stability.config import load
from megatron_stability.errors import UsageError
from megatron_stability.numerics.config import Init, Model


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan", "-.inf", "fifty"])
@pytest.mark.parametrize("setting", ["attention_softcap", "final_softcap", "embedding_norm_clip", "qk_norm_scale"])
def test_case_13_a_cap_is_positive_and_finite(setting: str, value: str) -> None:
    flag = f"--stability-model-{setting.replace('_', '-')}"
    with pytest.raises(UsageError, match=flag):
        load(overrides={f"stability_model_{setting}": value})


@pytest.mark.parametrize("value", ["-1e-4", ".nan", ".inf", "2.0"])
def test_beta_is_a_small_number(value: str) -> None:
    with pytest.raises(UsageError, match="--stability-model-z-loss"):
        load(overrides={"stability_model_z_loss": value})


@pytest.mark.parametrize(
    "setting", ["qk_norm", "attention_softcap_kernel", "init_embedding", "init_qk"], ids=lambda setting: setting
)
def test_an_unknown_variant_is_named(setting: str) -> None:
    with pytest.raises(UsageError, match=f"--stability-model-{setting.replace('_', '-')}.*rms_norm"):
        load(overrides={f"stability_model_{setting}": "rms_norm"})


def test_what_is_active() -> None:
    assert Model().active() == ()
    model = load(overrides={"stability_model_z_loss": "1e-4", "stability_model_init_qk": "d_model"}).model
    assert model.active() == ("z_loss", "init")
    assert model.changes_loss
    assert model.needs_spec
    assert not Model(init=Init(embedding="d_model"), embedding_norm_clip=1.0).needs_spec
