"""The plugin's flags in Megatron's parser, and the installation of the runtime that they ask for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import torch

from megatron_stability import config as tree
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import apex, handle
from megatron_stability.megatron.fp8.flags import refuse_inactive_fp8
from megatron_stability.megatron.model import settings
from megatron_stability.records import Action


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
    refuse_what_cannot_work(config, args)
    settings.apply(config.model, args)
    if args.rank == 0:
        print(f"> megatron-stability: {apex.line()}", flush=True)
    if config.mode == "act" and args.check_for_nan_in_loss_and_grad:
        args.check_for_nan_in_loss_and_grad = False
        if args.rank == 0:
            print(
                "> megatron-stability: --check-for-nan-in-loss-and-grad is turned off: Megatron's check would stop the "
                "run before a non-finite step can be skipped; the same values are judged at the gate",
                flush=True,
            )
    lost = lost_by_a_signal(args)
    if lost and args.rank == 0:
        print(f"> megatron-stability: {lost}", flush=True)
    from megatron_stability.megatron.observers import hooks
    from megatron_stability.megatron.runtime import Runtime

    hooks.refuse_what_cannot_work(config, args)
    runtime = Runtime(config, args)
    if config.fp8.inspect:  # before the model is built: TE's modules ask for nvdlfw-inspect as they are made
        from megatron_stability.transformer_engine import sampled

        sampled.begin(config.fp8.sample_every, runtime.ledger_folder() / "nvdlfw_inspect" / f"rank{args.rank}")
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
    if config.mode == "act" and args.fp16:
        raise UsageError(
            "--fp16 with --stability-mode act: the loss scaler moves before a step can be withheld; use --bf16, or "
            "--stability-mode observe"
        )
    for name, keeps in (("use_torch_fsdp2", "FSDP2"), ("use_megatron_fsdp", "Megatron-FSDP")):
        if getattr(args, name, False):
            raise UsageError(
                f"--{name.replace('_', '-')} with --stability-mode {config.mode}: {keeps} keeps weights, gradients and "
                "optimizer state in parts of its own, which are not known here, neither to the gate's measures nor to "
                "a checkpoint's manifest; use --use-distributed-optimizer, or --stability-mode off"
            )
    rewinds = config.decide.when_exhausted == "rewind" or any(r.action is Action.REWIND for r in config.decide.rules)
    if config.mode == "act" and rewinds:
        refuse_what_cannot_be_rewound(config, args)
    if config.checkpoint.manifest:
        refuse_unproven_checkpoints(args)
    if getattr(args, "optimizer_cuda_graph", False):
        raise UsageError(
            "--optimizer-cuda-graph with --stability-mode other than off: a captured optimizer step can't be withheld; "
            "drop the flag, or use --stability-mode off"
        )


def refuse_unproven_checkpoints(args: Namespace) -> None:
    """Raise for kinds of checkpoints that no manifest covers, or that Megatron deletes without asking what is good.

    Args:
        args: Megatron's validated arguments.

    Raises:
        UsageError: names the flag and the way out.
    """
    if getattr(args, "non_persistent_ckpt_type", None) is not None:
        raise UsageError(
            f"--non-persistent-ckpt-type {args.non_persistent_ckpt_type}: such checkpoints are loaded without a "
            "manifest; drop the flag, or give --stability-checkpoint-manifest false"
        )
    if getattr(args, "save_retain_interval", None) is not None:
        raise UsageError(
            "--save-retain-interval: deletes checkpoints whether or not a newer one is good; use "
            "--stability-checkpoint-keep, or give --stability-checkpoint-manifest false"
        )


def refuse_what_cannot_be_rewound(config: tree.StabilityConfig, args: Namespace) -> None:
    """Raise where a policy that may rewind could not carry it out.

    Args:
        config: mode `act`, with a rule or budget that rewinds.
        args: Megatron's validated arguments.

    Raises:
        UsageError: names the flag and the way out.
    """
    if args.save is None or not config.checkpoint.manifest:
        raise UsageError(
            f"--stability-decide-rules (of preset {config.decide.preset}, or given) asks for a rewind, which needs "
            "checkpoints that were proven: give --save and --save-interval, and leave --stability-checkpoint-manifest "
            "true"
        )
    if config.decide.rewind == "restart":
        return
    unlike = {
        "ckpt_format": ("torch_dist",),
        "dataloader_type": ("single", "cyclic", None),
        "gtp_weight_remat_size": (1,),
    }
    for name, fine in unlike.items():
        if getattr(args, name, fine[0]) not in fine:
            _refuse(f"--{name.replace('_', '-')} {getattr(args, name)}")
    for name in ("no_save_optim", "no_save_rng", "hybrid_context_parallel", "perform_rl_step"):
        if getattr(args, name, False):
            _refuse(f"--{name.replace('_', '-')}")
    if config.decide.snapshot_steps:
        _refuse_what_no_snapshot_holds(args)


def _refuse_what_no_snapshot_holds(args: Namespace) -> None:
    flags = [name for name in ("fp8", "fp4", "optimizer_cpu_offload") if getattr(args, name, None)]
    if getattr(args, "use_precision_aware_optimizer", False):  # a narrow moment has a scale beside the state
        scaled = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        flags += [name for name in scaled if getattr(args, name, torch.float32) is not torch.float32]
    for name in flags:
        raise UsageError(
            f"--{name.replace('_', '-')} {getattr(args, name)} with --stability-decide-snapshot-steps: a snapshot does "
            "not hold all of its state; leave the snapshot out, and rewinds read a checkpoint"
        )


def _refuse(flag: str) -> None:
    raise UsageError(
        f"{flag}: a rewind within the process can't put this back; drop the flag, or give --stability-decide-rewind "
        "restart"
    )
