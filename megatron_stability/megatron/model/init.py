"""Initialisation rules in Megatron's model, and the table that reads them back from a built one."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_stability.errors import UsageError
from megatron_stability.numerics import init_std
from megatron_stability.numerics.config import Model


def qkv_layout(config: TransformerConfig) -> init_std.QKVLayout:
    """Rows of `linear_qkv` (`core/transformer/attention.py get_query_key_value_tensors`)."""
    groups = config.num_query_groups or config.num_attention_heads
    return init_std.QKVLayout(config.num_attention_heads // groups, config.kv_channels, config.attention_output_gate)


def qkv_builder(linear: Any, *args: Any, config: TransformerConfig, init_method: Any, **kwargs: Any) -> Any:
    """Builds `linear` with query and key rows of deviation hidden_size^-½; what a spec's `linear_qkv` is.

    Megatron fills either the whole weight (CPU initialisation) or a rank's shard; both hold whole query groups.
    """
    std = init_std.d_model_std(config.hidden_size)
    filled = init_std.with_qk_std(init_method, qkv_layout(config), std)
    return linear(*args, config=config, init_method=filled, **kwargs)


def expected_std(
    model: Sequence[torch.nn.Module], config: TransformerConfig, settings: Model
) -> Iterator[tuple[str, Tensor, float]]:
    """(name, weight or part of it, expected std) of every randomly initialised weight of this rank.

    Args:
        model: this rank's model chunks.
        config: their transformer configuration.
        settings: the `model` section.

    Raises:
        UsageError: a weight of two dimensions for which no rule is known (MLA's projections, for one); names it.
    """
    width = math.sqrt(config.mup_width_mult) if config.use_mup else 1.0
    sigma = config.init_method_std
    hidden, residual = sigma / width, init_std.residual_std(sigma, config.num_layers) / width
    embedding = config.embedding_init_method_std or sigma
    rules = {
        "word_embeddings.weight": embedding,
        "position_embeddings.weight": embedding,
        "linear_proj.weight": residual,
        "linear_fc2.weight": residual,
        "linear_fc1.weight": hidden,
        "router.weight": hidden,
        "eh_proj.weight": hidden,
    }
    for name, weight in ((n, p) for chunk in model for n, p in chunk.named_parameters() if p.dim() > 1):
        name = name.replace("module.", "")
        if name.endswith("linear_qkv.weight"):
            for part, rows in qkv_layout(config).parts(weight.detach()).items():
                own = part in ("q", "k") and settings.init.qk == "d_model"
                yield f"{name}[{part}]", rows, init_std.d_model_std(config.hidden_size) if own else hidden
        elif name.endswith("output_layer.weight"):
            tied_copy = getattr(weight, "shared_embedding", False)
            yield name, weight, embedding if tied_copy or config.use_mup else hidden
        else:
            rule = next((std for suffix, std in rules.items() if name.endswith(suffix)), None)
            if rule is None:
                raise UsageError(f"--stability-model-init-report: no rule is known for {name}; drop the setting")
            yield name, weight, rule


def report(model: Sequence[torch.nn.Module], config: TransformerConfig, settings: Model) -> str:
    """The table of this rank's shards."""
    return init_std.table(init_std.measure(expected_std(model, config, settings)))


def report_a_new_run(model: Sequence[torch.nn.Module], settings: Model, args: Namespace) -> None:
    """The table from one rank of each pipeline stage, before the first step of a new run.

    Args:
        model: this rank's model chunks.
        settings: the `model` section.
        args: Megatron's.

    Raises:
        UsageError: as `expected_std`.
    """
    ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    if settings.init.report and args.iteration == 0 and ranks == (0, 0):
        table = report(model, get_model_config(model[0]), settings)
        print(f"> megatron-stability: standard deviations, rank {args.rank}\n{table}", flush=True)
