"""What a run that resumes does otherwise than the one that saved: told, and refused where it changes training.

A name that one side lacks has its release's default there: an argument of a newer release, or one that an older
manifest did not record. What Megatron fills in itself can't be had from a default and is not compared then.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training import print_rank_0

from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.config import StabilityConfig
from megatron_stability.data import fingerprint
from megatron_stability.echo import MASK, brief, said
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags import argument_table
from megatron_stability.megatron.access.flags.argument_table import TRAINING, Effect, is_set
from megatron_stability.megatron.checkpoint.resume import training_args
from megatron_stability.megatron.checkpoint.resume.training_args import CONFIG_FIELDS, OPAQUE, plain
from megatron_stability.megatron.checkpoint.run_files import Found, RunFiles
from megatron_stability.megatron.patching import install_digest

_FROM = MappingProxyType({"padded_vocab_size": " (of --vocab-size, --make-vocab-size-divisible-by and TP)"})
MOST_TOLD: Final = 5  # data sets that differ
#: What Megatron's scheduler compares with the checkpoint by itself, and refuses unless told whose values count.
SCHEDULE: Final = frozenset(
    {
        *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
        *("lr_warmup_samples", "lr_warmup_fraction", "weight_decay", "start_weight_decay", "end_weight_decay"),
        *("weight_decay_incr_style", "train_iters", "train_samples", "global_batch_size"),
    }
)


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: the name, the checkpoint's value and this run's, and what it does."""

    name: str
    was: Any
    now: Any
    effect: Effect | None
    note: str = ""

    def __str__(self) -> str:
        values = "" if self.name == "dataset" else f" {brief(self.was)} -> {brief(self.now)}"  # its files are named
        return f"{self.name}{values}{self.note}{_FROM.get(self.name, '')}"


def changes(saved: Manifest, now: Mapping[str, Any]) -> Iterator[Change]:
    """What differs, in the order of names.

    Args:
        saved: the checkpoint's manifest.
        now: `training_args.training` of this run.
    """
    then, here = (each.get("megatron_core", "0") for each in (saved.versions, install_digest.versions()))
    for name in sorted({*saved.training, *now}):
        if name in CONFIG_FIELDS and not (name in saved.training and name in now):
            continue  # an older manifest, or a host with flags for it, doesn't say, and no default does
        was = saved.training[name] if name in saved.training else _default(name, then)
        is_now = now[name] if name in now else _default(name, here)
        if was is OPAQUE or is_now is OPAQUE or was in (MASK, is_now):  # a secret was not kept
            continue
        note = "" if name in saved.training else " (the checkpoint does not say: its release's default)"
        yield Change(name, was, is_now, effect_of(name), note if name in now else " (not in this Megatron)")


def effect_of(name: str) -> Effect | None:
    """What a change of this name does; of a fork's own, MODEL where a configuration of Megatron's has the field."""
    row = argument_table.table().get(name)
    if row is not None:
        return row.effect
    field = name in CONFIG_FIELDS or name in _config_defaults()
    return argument_table.own_effects().get(name, Effect.MODEL if field else None)


def _default(name: str, release: str) -> Any:
    row = argument_table.table().get(name)
    if row is not None:
        return OPAQUE if row.set_later else row.default(release)
    own = argument_table.own_settings(StabilityConfig())
    return own.get(name, _config_defaults().get(name, OPAQUE))


@cache
def _config_defaults() -> Mapping[str, Any]:
    """Field and default of what the model, the optimizer and the gradient reduction are built from."""
    found: dict[str, Any] = {}
    for config in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        for field in dataclasses.fields(config):
            found.setdefault(field.name, plain(field.default))
    return found


def refuse(saved: Manifest, args: Namespace, files: RunFiles, config: StabilityConfig) -> tuple[str, ...]:
    """On rank 0: tell what differs from the checkpoint's run, refuse what changes training and is not allowed by name.

    With `--finetune` a new run begins, and with `--skip-train` none: then only a changed model is refused in the
    latter, and nothing in the former.

    Args:
        saved: the checkpoint's manifest.
        args: Megatron's, now.
        files: what the run reads, now.
        config: `checkpoint.allow_changes` names what may differ, by its whole name or what follows its last dot.

    Returns:
        The names of what changes training and is allowed.

    Raises:
        UsageError: lists each argument with both values, and each data set that changed.
    """
    found = [*changes(saved, training_args.training(args, config)), *_of_files(saved, files.found())]
    for each in found:
        print_rank_0(said(f"> megatron-stability: differs from the checkpoint: {each}"))
    matters = frozenset() if args.finetune else frozenset({Effect.MODEL}) if args.skip_train else TRAINING
    allowed = config.checkpoint.allow_changes
    training = [each for each in found if each.effect in matters]
    refused = [each for each in training if not {each.name, each.name.rpartition(".")[2]} & {*allowed}]
    if refused:
        names = ",".join(each.name for each in training)
        raise UsageError(
            f"--load: differs from the checkpoint in {'; '.join(map(str, refused))}; give the checkpoint's values, or "
            f"--stability-checkpoint-allow-changes {names}{_and_whose_schedule(training, args)}"
        )
    if training and (more := _and_whose_schedule(training, args)):
        raise UsageError(f"--load: differs from the checkpoint in {'; '.join(map(str, training))}; give{more[4:]}")
    if saved.hashes.get("code") != files.found().hashes["code"]:
        print_rank_0(said(f"> megatron-stability: the checkpoint was saved by other code: {saved.versions}"))
    return tuple(each.name for each in training)


def _of_files(saved: Manifest, now: Found) -> Iterator[Change]:
    was, is_now = (each.get("tokenizer", "") for each in (saved.hashes, now.hashes))
    if was and was != is_now:
        yield Change("tokenizer", f"files {was[:8]}", f"files {is_now[:8]}", Effect.DATA)
    if saved.data is None:
        print_rank_0("> megatron-stability: the checkpoint has no fingerprints of data files; they are not compared")
    elif differing := fingerprint.changes(saved.data, now.data):
        what = f" ({'; '.join(differing[:MOST_TOLD])}{' ...' * (len(differing) > MOST_TOLD)})"
        yield Change("dataset", saved.data, now.data, Effect.DATA, note=what)


def _and_whose_schedule(training: list[Change], args: Namespace) -> str:
    """What Megatron asks for besides, where its scheduler would refuse the new values."""
    ruled = is_set(args, "override_opt_param_scheduler") or args.use_checkpoint_opt_param_scheduler
    if ruled or args.no_load_optim or not any(each.name in SCHEDULE for each in training):
        return ""
    return (
        " and --override-opt_param-scheduler (the new schedule) or --use-checkpoint-opt_param-scheduler (the "
        "checkpoint's)"
    )
