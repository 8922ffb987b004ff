"""Which of Megatron's arguments change what is learnt, and what its tokenizer files hold, for a manifest."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from megatron_stability.checkpoints import manifest as manifests
from megatron_stability.config import StabilityConfig
from megatron_stability.megatron.patching import install_digest

DATA = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
    *("per_split_data_args_path", "split", "mock_data", "seed", "seq_length", "dataloader_type", "eod_mask_loss"),
    *("reset_position_ids", "reset_attention_mask", "fim_data"),
)
TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "padded_vocab_size")
BATCH = ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule", "train_iters", "train_samples")
OPTIMIZER = (
    *("optimizer", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
    *("lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "adam_beta1", "adam_beta2"),
    *("adam_eps", "sgd_momentum", "clip_grad", "muon_momentum", "muon_num_ns_steps", "muon_scale_mode"),
)
NUMERICS = (
    *("bf16", "fp16", "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "hidden_dropout"),
    "attention_dropout",
)
NAMES = (*DATA, *TOKENIZER, *BATCH, *OPTIMIZER, *NUMERICS)


def training(args: Namespace) -> dict[str, Any]:
    """The arguments of `NAMES` that this Megatron has, as JSON primitives."""
    values = {name: getattr(args, name) for name in NAMES if hasattr(args, name)}
    return dict(json.loads(json.dumps(values, default=str)))


def hashes(args: Namespace, config: StabilityConfig) -> dict[str, str]:
    """Hashes of configuration, code and tokenizer files; data files have fingerprints of their own.

    Args:
        args: Megatron's.
        config: the validated tree.

    Returns:
        xxh3-128 by name; of an absent kind of file, of nothing.

    Raises:
        OSError: a file can't be read.
    """
    return {
        "config": _of(json.dumps(config.model_dump(mode="json"), sort_keys=True)),
        "code": _of(json.dumps(install_digest.versions(), sort_keys=True)),
        "tokenizer": _of_files(_named(args, ("tokenizer_model", "vocab_file", "merge_file"))),
    }


def _of(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _of_files(files: Iterator[Path]) -> str:
    """Names of files are left out: moved files are the same."""
    entries = (manifests.hash_files(path.parent, [path.name])[path.name] for path in files)
    return _of(json.dumps([(entry.size, entry.xxh3_128) for entry in entries]))


def _named(args: Namespace, names: tuple[str, ...]) -> Iterator[Path]:
    for name in names:
        value = getattr(args, name, None)
        path = Path(value) if value else None
        if path is not None and path.is_dir():
            yield from (file for file in sorted(path.iterdir()) if file.is_file())
        elif path is not None and path.is_file():
            yield path
