"""Which of Megatron's arguments change what is learnt, and what its tokenizer files hold, for a manifest."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch
import xxhash

from megatron_stability.checkpoints import manifest as manifests
from megatron_stability.config import StabilityConfig
from megatron_stability.megatron.access.flags import argument_table
from megatron_stability.megatron.access.flags.argument_table import Effect, argument
from megatron_stability.megatron.patching import install_digest

#: Fields of the model's, optimizer's and gradient reduction's configuration that decide what is learnt and have no flag
#: of their own: a host that keeps its settings in those (Megatron-Bridge, a fork) is compared in them too.
CONFIG_FIELDS: Final = (
    *("gated_linear_unit", "num_moe_experts", "softmax_scale", "activation_func", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "moe_router_topk_limited_devices", "moe_token_dropping", "decoupled_weight_decay"),
    *("adaptive_muon_beta2", "adaptive_muon_eps", "adaptive_muon_moment2_method", "soap_shampoo_beta"),
    *("soap_precondition_frequency", "soap_use_kl_shampoo", "grad_reduce_in_fp32", "tp_only_amax_red"),
    *("fp8_dot_product_attention", "fp8_multi_head_attention", "share_embeddings_and_output_weights"),
)
_OWN_FLAGS = ("stability_", "drill_")  # the plugin's own names in Megatron's namespace


def training(args: Namespace, config: StabilityConfig) -> dict[str, Any]:
    """What decides what is learnt and how it is shared out, by name.

    Megatron's arguments but those of no effect at a resume (`arguments.tsv`), those that the table does not know (a
    fork's own) and our own settings; values that are no plain data, such as a layout object, are left out.
    """
    known = argument_table.table()
    names = [name for name, row in known.items() if row.effect not in (Effect.INERT, Effect.IGNORED)]
    names += [name for name in CONFIG_FIELDS if name not in known]
    names += [name for name in vars(args) if name not in known and not name.startswith(_OWN_FLAGS)]
    values = {name: plain(getattr(args, name)) for name in names if hasattr(args, name)}
    if values.get("num_attention_heads"):
        values["num_query_groups"] = argument_table.query_groups(args)
    return {name: value for name, value in values.items() if value is not OPAQUE} | argument_table.own_settings(config)


OPAQUE: Final = object()  # what is no plain data


def plain(value: Any) -> Any:
    """As JSON gives it back, or `OPAQUE`."""
    if value is None or isinstance(value, (bool, int, float)) or type(value) is str:
        return value
    if isinstance(value, (Enum, torch.dtype)):
        return str(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType)) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, tuple)):
        items = [plain(each) for each in value]
        return OPAQUE if OPAQUE in items else items
    return OPAQUE


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
        value = argument(args, name)
        path = Path(value) if value else None
        if path is not None and path.is_dir():
            yield from (file for file in sorted(path.iterdir()) if file.is_file())
        elif path is not None and path.is_file():
            yield path
