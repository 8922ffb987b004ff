"""The attention softcap of a later Megatron: given to its configuration where there is a field, by a probe."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.megatron.model.attention import megatron_caps
from megatron_stability.numerics.config import Model

pytestmark = pytest.mark.megatron


def config(impl: str = "transformer_engine", **fields: float | None) -> SimpleNamespace:
    return SimpleNamespace(transformer_impl=impl, **fields)


def test_a_field_is_given_the_cap_and_it_is_said(capsys):
    theirs = config(attn_logit_softcapping=None)
    assert megatron_caps(Model(attention_softcap=37.5), theirs)
    assert megatron_caps(Model(attention_softcap=37.5), theirs)  # once for each layer
    assert theirs.attn_logit_softcapping == 37.5
    said = capsys.readouterr().out
    assert said.count("attention softcap 37.5 by Megatron's own attn_logit_softcapping") == 1


@pytest.mark.parametrize(
    ("theirs", "kernel"),
    [(config(), "auto"), (config("local", attn_logit_softcapping=None), "auto"), (config("local"), "flex")],
)
def test_without_a_field_or_on_another_kernel_the_cap_stays_ours(theirs, kernel):
    before = vars(theirs).copy()
    assert not megatron_caps(Model(attention_softcap=30.0, attention_softcap_kernel=kernel), theirs)
    assert vars(theirs) == before


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
def test_two_caps_are_refused(impl):
    with pytest.raises(UsageError, match=r"attn_logit_softcapping 20\.0: the logits would be capped twice"):
        megatron_caps(Model(attention_softcap=30.0), config(impl, attn_logit_softcapping=20.0))
