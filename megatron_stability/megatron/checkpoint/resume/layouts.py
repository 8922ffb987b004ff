"""Which checkpoint's optimizer state fits another parallel layout, before Megatron looks for what is not there."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.optimizer import DistributedOptimizer

from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import collectives, rank_state

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def refuse_unfit_optimizer_state(folder: Path, saved: Manifest, args: Namespace) -> None:
    """Raise where the distributed optimizer's state was saved for one model-parallel layout, and this is another.

    Megatron compares TP and PP, and raises; with other experts' ranks it ends in a KeyError, for the optimizer is
    another chain of optimizers there. Collective.

    Args:
        folder: of the checkpoint.
        saved: its manifest.
        args: Megatron's, now.

    Raises:
        UsageError: on every rank alike; names the sizes and the way out.
    """
    now = rank_state.layout_of(args)
    changed = [name for name in _SIZES if saved.layout.get(name, now[name]) != now[name]]
    if not changed or not args.use_distributed_optimizer or args.no_load_optim or args.ckpt_format != "torch_dist":
        return
    kind = collectives.from_rank_0(lambda: _sharding_type(folder))
    if kind is None or kind in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    sizes = "; ".join(f"--{name.replace('_', '-')} {saved.layout[name]} -> {now[name]}" for name in changed)
    raise UsageError(
        f"--load: {folder.name} holds the optimizer's state as {kind}, which fits its own model-parallel layout only "
        f"({sizes}); give the checkpoint's sizes, or --no-load-optim, or save it there once with "
        "--dist-ckpt-optim-fully-reshardable"
    )


def _sharding_type(folder: Path) -> str | None:
    kind = (load_content_metadata(str(folder)) or {}).get("distrib_optim_sharding_type")
    return None if kind is None else str(kind)
