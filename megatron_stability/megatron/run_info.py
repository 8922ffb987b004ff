"""What a run is, as its ledger and its incident bundles say it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import megatron_stability
from megatron_stability.config import StabilityConfig
from megatron_stability.ledger.bundle import Context, plain_args
from megatron_stability.ledger.ledger import RunInfo
from megatron_stability.megatron.access.flags import argument_table
from megatron_stability.megatron.access.flags.argument_table import given
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.checkpoint.resume.training_args import training
from megatron_stability.megatron.patching import install_digest

# What two runs must share to have seen the same samples in the same order.
_DATA = (
    *("seed", "data_path", "train_data_path", "data_args_path", "mock_data", "split", "seq_length"),
    *("global_batch_size", "rampup_batch_size", "step_batch_size_schedule", "tokenizer_type", "tokenizer_model"),
    "padded_vocab_size",
)


def run_info(config: StabilityConfig, args: Namespace) -> RunInfo:
    """Mode, versions, layout, data and settings, for the ledger."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    layout = {name: int(getattr(args, name)) for name in names} | {"world_size": int(args.world_size)}
    versions = {"megatron_stability": megatron_stability.__version__, "torch": torch.__version__}
    data = {name: str(given(args, name)) for name in _DATA}
    versions |= install_digest.versions()
    return RunInfo(mode=config.mode, versions=versions, layout=layout, data=data, settings=_settings(config, args))


def _settings(config: StabilityConfig, args: Namespace) -> dict[str, Any]:
    """What decides what is learnt, save what is at its default: a line of the ledger, not a copy of the parser."""
    table, own = argument_table.table(), argument_table.own_settings(StabilityConfig())
    default = {name: row.newest_default for name, row in table.items()} | own
    return {name: value for name, value in training(args, config).items() if value != default.get(name)}


def bundle_context(config: StabilityConfig, args: Namespace, host: Host) -> Context:
    """What every bundle of the run says alike."""
    info = run_info(config, args)
    return Context(
        versions=dict(info.versions),
        layout=dict(info.layout),
        args=plain_args(host.arguments(args)),
        patch_digest=info.versions["patches"],
    )


def opening(config: StabilityConfig, folder: Path) -> Iterator[str]:
    """What the log says when training begins.

    Args:
        config: the validated tree.
        folder: of the ledger.
    """
    yield f"mode {config.mode}, ledger in {folder}"
    if tree := install_digest.versions().get("megatron_tree"):
        yield tree
