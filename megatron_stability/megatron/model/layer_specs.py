"""The layer spec behind `--spec megatron_stability`: Megatron's own, with what the `model` settings put in its place.

Two forms, since Megatron's releases take different things where `--spec` is read:

    0.19  a callable (model config, vp_stage) -> block spec; our own `pretrain` calls `block_spec` in every release
    0.18  a ModuleSpec whose class picks each layer's spec by its number when the block builds it

`stability_layer_spec` is the one that fits the installed release: Megatron looks it up in `vars(module)`, so it is a
plain global. The local spec always gets norms of our own (see `model/norms.py`), the final norm included, which is why
a block spec is returned: a layer's ModuleSpec can't carry it. Source of the contracts:
`core/transformer/transformer_block.py`, `core/models/gpt/gpt_layer_specs.py`, `training/models/gpt.py`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
    get_gpt_mtp_block_spec_for_backend,
)
from megatron.core.package_info import __version__ as megatron_core_version
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    TransformerLayer,
    get_transformer_layer_offset,
)
from packaging.version import Version

from megatron_stability.megatron.access import handle
from megatron_stability.megatron.attention.core_attention import CoreAttention
from megatron_stability.megatron.fp8.linear import fp8_linears, recipe_of
from megatron_stability.megatron.model.attention import megatron_caps, softcap_attention
from megatron_stability.megatron.model.init import qkv_builder
from megatron_stability.megatron.model.norms import LayerNorm, QKNormBuilder
from megatron_stability.numerics.config import Model
from megatron_stability.numerics.fp8.config import Fp8


def settings() -> Model:
    """The `model` section of the installed runtime, or its defaults where none is."""
    runtime = handle.installed()
    return Model() if runtime is None else runtime.config.model


def emulated(specs: list[ModuleSpec], config: TransformerConfig, offset: int = 0) -> list[ModuleSpec]:
    """The layers' specs with emulated FP8 linears, if the runtime asks for them, but for Megatron's BF16 layers.

    Args:
        specs: of consecutive layers.
        config: the model's transformer configuration.
        offset: layers of the model before the first of them.
    """
    runtime = handle.installed()
    recipe = recipe_of(Fp8() if runtime is None else runtime.config.fp8, config)
    kept = [is_first_last_bf16_layer(config, offset + i) for i in range(len(specs))]
    return [spec if bf16 else fp8_linears(spec, recipe) for spec, bf16 in zip(specs, kept, strict=True)]


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None, model: Model | None = None
) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage and chunk, dense or MoE, local or Transformer Engine.

    Args:
        config: the model's transformer configuration.
        vp_stage: virtual pipeline chunk, None without virtual pipeline.
        model: the settings; None for the installed runtime's.

    Returns:
        One spec a layer, and the final norm.
    """
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    specs = [prevent(spec, config, model or settings()) for spec in block.layer_specs]
    block.layer_specs = emulated(specs, config, get_transformer_layer_offset(config, vp_stage=vp_stage))
    if _local(config):
        block.layer_norm = LayerNorm
    return block


def layer_specs(config: TransformerConfig, model: Model | None = None) -> list[ModuleSpec]:
    """The spec of every decoder layer of the whole model, in order."""
    specs = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    return emulated([prevent(spec, config, model or settings()) for spec in specs], config)


def mtp_block_spec(config: TransformerConfig, vp_stage: int | None = None, model: Model | None = None) -> Any:
    """The multi-token-prediction block of this stage, whose layers are the last decoder layer's; None where none is."""
    if config.mtp_num_layers is None:
        return None
    last = layer_specs(config, model)[-1]
    if _local(config):
        return get_gpt_mtp_block_spec_for_backend(config, last, LocalBackend(), vp_stage=vp_stage)
    return get_gpt_mtp_block_spec(config, last, use_transformer_engine=True, vp_stage=vp_stage)


class LocalBackend(LocalSpecProvider):
    """Megatron's local modules with our norms, for what Megatron builds from a backend."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Our norm, whatever it is for."""
        del rms_norm, for_qk, has_residual
        return LayerNorm


def prevent(spec: ModuleSpec, config: TransformerConfig, model: Model) -> ModuleSpec:
    """A layer's spec with the settings in it; the spec given is left as it is.

    Args:
        spec: of a TransformerLayer.
        config: the model's transformer configuration.
        model: the settings.
    """
    layer = spec.submodules
    attention = layer.self_attention
    changes: dict[str, Any] = {}
    if model.qk_norm != "none" and not _norm_of_transformer_engine_fits(config, model):
        changes |= {"q_layernorm": QKNormBuilder(model, query=True), "k_layernorm": QKNormBuilder(model, query=False)}
    if config.multi_latent_attention and _local(config):
        changes["core_attention"] = CoreAttention  # Megatron's local one refuses MLA's key and value sizes
    if model.attention_softcap is not None and not megatron_caps(model, config):
        changes["core_attention"] = softcap_attention(model, config)
    if model.init.qk != "megatron":
        changes["linear_qkv"] = partial(qkv_builder, attention.submodules.linear_qkv)
    if changes:
        inner = dataclasses.replace(attention.submodules, **changes)
        layer = dataclasses.replace(layer, self_attention=dataclasses.replace(attention, submodules=inner))
    if _local(config):
        names = [name for name in ("input_layernorm", "pre_mlp_layernorm") if getattr(layer, name) is not IdentityOp]
        layer = dataclasses.replace(layer, **dict.fromkeys(names, LayerNorm))
    return dataclasses.replace(spec, submodules=layer)


def _local(config: TransformerConfig) -> bool:
    return config.transformer_impl == "local"


def _norm_of_transformer_engine_fits(config: TransformerConfig, model: Model) -> bool:
    """TENorm is what `config.normalization` says, per head; Megatron's TE spec has it where `qk_layernorm` is set."""
    return (
        config.transformer_impl == "transformer_engine"
        and model.qk_norm == config.normalization.lower()
        and model.qk_norm_scale == 1.0
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
