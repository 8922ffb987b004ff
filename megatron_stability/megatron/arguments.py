"""The plugin's flags in Megatron's parser, and the installation of the runtime that they ask for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import torch

from megatron_stability import config as tree
from megatron_stability.echo import say
from megatron_stability.errors import UsageError
from megatron_stability.megatron import cpu
from megatron_stability.megatron.access import apex, handle
from megatron_stability.megatron.access.flags import flag_rows
from megatron_stability.megatron.fp8.flags import refuse_inactive_fp8
from megatron_stability.megatron.model import settings


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--stability-config` and one flag for each leaf of the tree; a parser that has them is left alone."""
    if "--stability-config" not in parser._option_string_actions:
        tree.add_flags(parser)
    return parser


def install_runtime(args: Namespace) -> None:
    """Validate the tree against Megatron's arguments and install the runtime; nothing where the mode is `off`.

    Args:
        args: Megatron's validated arguments, before anything was built from them. In `act` mode Megatron's own NaN
            checks are turned off here, since they would end the run before the gate could withhold the step.

    Raises:
        UsageError: the tree is not valid, or it and Megatron's arguments can't both be had.
    """
    config = tree.load(overrides=vars(args))
    settings.refuse_what_cannot_work(config, args)
    refuse_inactive_fp8(config.fp8, config.mode, args)
    if config.mode == "off":
        return
    refuse_what_megatron_meets_late(args)
    refuse_what_cannot_work(config, args)
    settings.apply(config.model, args)
    for line in (apex.line(), *flag_rows.told(config, args, flag_rows.TOLD), *flag_rows.unread(args)):
        say(line, args.rank == 0)
    if config.mode == "act":
        args.check_for_nan_in_loss_and_grad = False
    lost = lost_by_a_signal(args)
    if lost:
        say(lost, args.rank == 0)
    from megatron_stability.megatron.observers import hooks
    from megatron_stability.megatron.runtime import Runtime

    hooks.refuse_what_cannot_work(config, args)
    runtime = Runtime(config, args)
    if config.fp8.inspect:  # before the model is built: TE's modules ask for nvdlfw-inspect as they are made
        from megatron_stability.transformer_engine import sampled

        sampled.begin(config.fp8.sample_every, runtime.journal.folder / "nvdlfw_inspect" / f"rank{args.rank}")
    handle.install(runtime)


def lost_by_a_signal(args: Namespace) -> str | None:
    """What a SIGTERM costs, where Megatron does not handle it; None where it does, or where nothing is saved anyway."""
    if args.exit_signal_handler or not args.save:
        return None
    return (
        "a SIGTERM (time limit, preemption) ends the run without a checkpoint: what was trained since the last save is "
        "lost; --exit-signal-handler saves first"
    )


def refuse_what_cannot_work(config: tree.StabilityConfig, args: Namespace) -> None:
    """Raise for a pair of flags that would silently do something else.

    Args:
        config: the validated tree, mode other than off.
        args: Megatron's validated arguments.

    Raises:
        UsageError: names both flags and the way out.
    """
    if flag_rows.may_rewind(config) and (args.save is None or not config.checkpoint.manifest):
        raise UsageError(
            f"--stability-decide-rules (of preset {config.decide.preset}, or given) asks for a rewind, which needs "
            "checkpoints that were proven: give --save and --save-interval, and leave --stability-checkpoint-manifest "
            "true"
        )
    flag_rows.refuse(config, args)


def refuse_what_megatron_meets_late(args: Namespace) -> None:
    """Raise for what would end every rank in a traceback of Megatron's.

    Args:
        args: Megatron's validated arguments.

    Raises:
        UsageError: names the flag, or the way to train without a GPU.
    """
    if args.eval_interval is None and not (args.skip_train or args.full_validation):
        raise UsageError(
            "--eval-interval is missing: Megatron divides --train-iters by it, with --eval-iters 0 as well; give it, "
            "e.g. --eval-interval 1000"
        )
    if not cpu.installed() and not torch.cuda.is_available():
        raise UsageError(
            "no CUDA device is visible; for a dry run on CPUs start the script as `torchrun ... -m "
            "megatron_stability run SCRIPT --cpu ...`, patched or not, or without torchrun as `megatron-stability "
            "run SCRIPT --nproc N --cpu ...`"
        )
