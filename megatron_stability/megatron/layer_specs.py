"""The layer spec behind `--spec megatron_stability`.

Two forms, since Megatron's releases take different things where `--spec` is read:

    0.19  a callable (model config, vp_stage) -> block spec; our own `pretrain` calls `block_spec` in every release
    0.18  a ModuleSpec whose class picks each layer's spec by its number when the block builds it

`stability_layer_spec` is the one that fits the installed release: Megatron looks it up in `vars(module)`, so it is a
plain global. Source of the contracts: `core/transformer/transformer_block.py`, `training/models/gpt.py`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.package_info import __version__ as megatron_core_version
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    TransformerLayer,
    get_transformer_layer_offset,
)
from packaging.version import Version


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage and chunk, dense or MoE, local or Transformer Engine.

    Args:
        config: the model's transformer configuration.
        vp_stage: virtual pipeline chunk, None without virtual pipeline.

    Returns:
        One spec a layer, and the final norm.
    """
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )


def layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """The spec of every decoder layer of the whole model, in order."""
    return get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )


class LayerByNumber(BaseTransformerLayer):
    """Stands in a ModuleSpec for all layers of a block and builds, for each, the layer of its number.

    Needed where a release takes one ModuleSpec for the whole block although dense and MoE layers alternate.
    """

    def __new__(
        cls, config: TransformerConfig, layer_number: int = 1, vp_stage: int | None = None, **kwargs: Any
    ) -> TransformerLayer:
        """The layer with 1-based `layer_number` within this pipeline stage and chunk."""
        offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
        spec = layer_specs(config)[offset + layer_number - 1]
        return spec.module(
            config, submodules=spec.submodules, layer_number=layer_number, vp_stage=vp_stage, **spec.params, **kwargs
        )


def _from_model_config(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The callable form: `config` is the GPTModelConfig, which holds the transformer configuration."""
    return block_spec(getattr(config, "transformer", config), vp_stage=vp_stage)


stability_layer_spec = (
    _from_model_config if Version(megatron_core_version) >= Version("0.19.0") else ModuleSpec(module=LayerByNumber)
)
