"""What a host keeps in configurations alone, without a flag, is compared at a resume as flags are."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_stability.config import StabilityConfig
from megatron_stability.megatron.access.flags import argument_table
from megatron_stability.megatron.access.flags.argument_table import Effect
from megatron_stability.megatron.checkpoint.resume import changes
from megatron_stability.megatron.checkpoint.resume.training_args import CONFIG_FIELDS, training

pytestmark = pytest.mark.megatron


def kept(**fields: Any) -> dict[str, Any]:
    found = training(Namespace(lr=1e-3, **fields), StabilityConfig())
    return {name: value for name, value in found.items() if name in CONFIG_FIELDS}


def differ(was: dict[str, Any], now: dict[str, Any]) -> list[changes.Change]:
    saved: Any = SimpleNamespace(training=was, versions={"megatron_core": "0.19.2"})
    return [each for each in changes.changes(saved, now) if each.was != each.now]


def test_fields_without_a_flag_are_kept_functions_by_name() -> None:
    assert kept(gated_linear_unit=True, activation_func=torch.nn.functional.silu, other=1) == {
        "gated_linear_unit": True,
        "activation_func": "torch.nn.functional.silu",
    }
    assert kept(activation_func=lambda x: x) == {}, "a function without a name can't be told from another"
    assert kept() == {}, "Megatron's own namespace has none of them"


def test_a_changed_field_is_a_change_of_the_model() -> None:
    (found,) = differ(
        {"gated_linear_unit": True, "softmax_scale": None}, {"gated_linear_unit": False, "softmax_scale": None}
    )
    assert (found.name, found.was, found.now, found.effect) == ("gated_linear_unit", True, False, Effect.MODEL)


def test_what_one_side_does_not_say_is_not_guessed() -> None:
    assert differ({}, {"gated_linear_unit": True}) == [], "a manifest from before fields were kept"
    assert differ({"gated_linear_unit": True}, {}) == [], "the other host has a flag for it"


def test_no_field_has_a_row_already_and_each_is_one_of_a_configuration() -> None:
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)} | set(changes._config_defaults())
    assert set(CONFIG_FIELDS) - known == {"share_embeddings_and_output_weights"}, "a field of Bridge's provider"
    assert not set(CONFIG_FIELDS) & set(argument_table.table())
