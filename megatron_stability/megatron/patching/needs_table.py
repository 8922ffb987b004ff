"""The attributes of Megatron's objects that the adapter reads, by class, and what else it can't read from our source."""

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
        _DDP, "DistributedDataParallel", ("buffers", "expert_parallel_buffers"), "megatron/access/optimizer_state.py"
    ),
    Attributes(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBuffer",
        ("grad_data", "param_index_map"),
        "megatron/access/optimizer_state.py",
    ),
    Attributes(
        "megatron.core.rerun_state_machine",
        "RerunStateMachine",
        ("should_run_forward_backward", "current_iteration"),
        "megatron/access/data_iterators.py",
    ),
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
