"""Values that Bridge accepts and that end a run in a traceback on every rank, or train nonsense."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from megatron.bridge.training.config import ConfigContainer

from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.start.input_checks import check_writable

# What is divided by, or what a model can't do without; null is left to Bridge where it has a meaning.
COUNTS: Final = (
    *(f"model.{name}" for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")),
    *(f"model.{name}" for name in ("seq_length", "vocab_size", "kv_channels", "ffn_hidden_size", "num_moe_experts")),
    *(f"model.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")),
    *("model.expert_tensor_parallel_size", "train.micro_batch_size", "train.global_batch_size", "train.train_iters"),
    *("train.exit_interval", "logger.log_interval", "checkpoint.save_interval", "dist.distributed_timeout_minutes"),
)
MOST: Final = 2**31 - 1  # a C int, which sizes and steps are somewhere on their way


def refuse_late_failures(container: ConfigContainer, stability: StabilityConfig) -> None:
    """Judge sizes, numbers and output folders of a merged recipe.

    Args:
        container: the merged recipe.
        stability: the validated tree.

    Raises:
        UsageError: names the key and what it may be.
    """
    untrained = container.validation.skip_train or container.train.skip_train
    for name in COUNTS:
        value = None if name == "train.train_iters" and untrained else _of(container, name)
        if value is not None and not 1 <= value <= MOST:
            raise UsageError(f"{name} {value}: must be at least 1 and at most {MOST}")
    refuse_ranks(container.model, int(os.environ.get("WORLD_SIZE", "1")))
    for name, value in _numbers(container):
        if math.isnan(value):
            raise UsageError(f"{name} {value}: is not a number")
    for name in ("optimizer.lr", "optimizer.min_lr", "optimizer.clip_grad"):
        value = _of(container, name)
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} {value}: must be 0 or more, and finite")
    _refuse_misfit(container.model)
    folders = {"checkpoint.save": container.checkpoint.save, "logger.tensorboard_dir": container.logger.tensorboard_dir}
    for name, folder in (folders | {"stability.record.dir": stability.record.dir}).items():
        if folder is not None:
            check_writable(name, Path(folder))


def refuse_ranks(model: Any, world: int) -> None:
    """Raise where the ranks can't be shared out as the model wants it.

    Args:
        model: its parallel sizes.
        world: ranks of the run.

    Raises:
        UsageError: names the sizes and the ranks; Bridge would speak of heads, or of nothing.
    """
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = {f"model.{name}": getattr(model, name, 1) or 1 for name in names}
    if world % (wanted := math.prod(sizes.values())):
        said = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        ranks = f"{world} rank{'s' if world > 1 else ''}"
        raise UsageError(
            f"{said} needs a multiple of {wanted} ranks, and this run has {ranks}: give --nproc-per-node {wanted} (or "
            "torchrun's), or smaller sizes"
        )


def _refuse_misfit(model: Any) -> None:
    heads, groups = getattr(model, "num_attention_heads", None), getattr(model, "num_query_groups", None)
    if heads and groups and heads % groups:
        raise UsageError(f"model.num_attention_heads {heads} is not a multiple of model.num_query_groups {groups}")
    width = getattr(model, "hidden_size", None)
    if heads and width and not getattr(model, "kv_channels", None) and width % heads:
        raise UsageError(
            f"model.hidden_size {width} is not a multiple of model.num_attention_heads {heads}; change one, or give "
            "model.kv_channels"
        )


def _of(container: ConfigContainer, name: str) -> Any:
    """A number by its dotted name; None where this recipe's section has no such field, or no number in it."""
    section, _, field = name.partition(".")
    value = getattr(getattr(container, section), field, None)
    return value if isinstance(value, (int, float)) else None


def _numbers(container: ConfigContainer) -> Iterator[tuple[str, float]]:
    for section in dataclasses.fields(container):
        owner = getattr(container, section.name)
        for name, value in vars(owner).items() if dataclasses.is_dataclass(owner) else ():
            if isinstance(value, float):
                yield f"{section.name}.{name}", value
