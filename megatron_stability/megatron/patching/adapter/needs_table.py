"""The attributes of Megatron's objects that the adapter reads, by class, and where its arguments are declared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attributes:
    """Attributes of one class of Megatron's, and the file of ours that reads them."""

    module: str
    owner: str
    names: tuple[str, ...]
    read_by: str


_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_DDP = "megatron.core.distributed"

_ATTENTION = "megatron.core.transformer.attention"
_LATENT = "megatron.core.transformer.multi_latent_attention"
_CORE = "megatron.core.transformer.dot_product_attention"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_RERUN = "megatron.core.rerun_state_machine"

ATTRIBUTES = (
    Attributes(_OPTIMIZER, "ChainedOptimizer", ("chained_optimizers",), "megatron/access/master_weights.py"),
    Attributes(_OPTIMIZER, "MegatronOptimizer", ("param_groups", "config"), "megatron/access/optimizer_state.py"),
    Attributes(
        _DISTRIBUTED,
        "DistributedOptimizer",
        (
            *("optimizer", "buffers", "model_param_gbuf_map", "model_param_group_index_map"),
            "_get_model_param_range_map",
        ),
        "megatron/access/master_weights.py",
    ),
    Attributes(
        _DDP,
        "DistributedDataParallel",
        ("buffers", "expert_parallel_buffers"),
        "megatron/access/optimizer_state.py",
    ),
    Attributes(_DDP, "DistributedDataParallel", ("remove_forward_pre_hook_handles",), "megatron/checkpoint/rewind.py"),
    Attributes(_BUFFERS, "_ParamAndGradBuffer", ("grad_data",), "megatron/access/optimizer_state.py"),
    Attributes(_BUFFERS, "_ParamAndGradBuffer", ("param_index_map",), "megatron/access/master_weights.py"),
    Attributes(_RERUN, "RerunStateMachine", ("should_run_forward_backward",), "megatron/access/data_iterators.py"),
    Attributes(_RERUN, "RerunDataIterator", ("iterable",), "megatron/access/data_iterators.py"),
    Attributes(
        "megatron.core.optimizer_param_scheduler",
        "OptimizerParamScheduler",
        ("num_steps", "state_dict", "load_state_dict"),
        "megatron/checkpoint/snapshot.py",
    ),
    Attributes(
        _ATTENTION,
        "SelfAttention",
        ("hidden_size_per_attention_head", "q_layernorm", "k_layernorm", "config", "layer_number", "pg_collection"),
        "megatron/attention/attention_layers.py",
    ),
    Attributes(_ATTENTION, "SelfAttention", ("core_attention", "attn_mask_type"), "megatron/attention/monitor.py"),
    Attributes(_LATENT, "MLASelfAttention", ("softmax_scale",), "megatron/attention/attention_layers.py"),
    Attributes(
        "megatron.core.transformer.transformer_config",
        "MLATransformerConfig",
        (
            *("q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_query_groups"),
            *("num_attention_heads", "layernorm_zero_centered_gamma"),
        ),
        "megatron/attention/attention_layers.py",
    ),
    Attributes(
        _CORE,
        "DotProductAttention",
        (
            *("scale_mask_softmax", "attn_mask_type", "hidden_size_per_partition"),
            "num_attention_heads_per_partition",
        ),
        "megatron/attention/core_attention.py",
    ),
    Attributes("megatron.core.transformer.moe.router", "Router", ("gating",), "megatron/observers/experts.py"),
    Attributes("megatron.core.transformer.moe.router", "TopKRouter", ("topk",), "megatron/observers/experts.py"),
)

# What the adapter itself puts on the arguments.
OURS = frozenset({"drill_fault"})

# Where an argument of Megatron's is declared or set.
ARGUMENT_SOURCES = (
    "megatron/training/*.py",
    "megatron/training/config/*.py",
    "megatron/core/transformer/transformer_config.py",
    "megatron/core/model_parallel_config.py",
    "megatron/core/optimizer/optimizer_config.py",
    "megatron/core/distributed/distributed_data_parallel_config.py",
)
