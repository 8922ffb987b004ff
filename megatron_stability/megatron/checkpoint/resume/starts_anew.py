"""What a start from a checkpoint does not take from it, in words: moments, schedule, generators."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, Final

from megatron.training import print_rank_0

from megatron_stability.config import StabilityConfig
from megatron_stability.megatron.access.flags import flag_rows

_SCHEDULE: Final = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps")


def tell(config: StabilityConfig, args: Namespace) -> None:
    """A line for each flag that leaves a part of the checkpoint aside.

    Args:
        config: the validated tree.
        args: Megatron's.
    """
    lines = [*flag_rows.told(config, args, flag_rows.AT_A_LOAD)]
    all_of_it = args.skip_train or args.finetune  # the others are a part of these
    for line in lines[:1] if all_of_it else lines:
        print_rank_0(f"> megatron-stability: {line}")


def tell_rates(args: Namespace, schedule: Any, saved: Mapping[str, Any] | None) -> None:
    """Where the schedule starts anew: the learning rate that comes, and the checkpoint's.

    Args:
        args: Megatron's.
        schedule: its scheduler, after the load.
        saved: the scheduler's state in the checkpoint, if it has one.
    """
    if schedule is None or saved is None or not (args.no_load_optim or args.finetune):
        return
    then = copy.copy(schedule)
    vars(then).update({name: saved[name] for name in _SCHEDULE if name in saved})
    print_rank_0(
        f"> megatron-stability: the learning rate starts anew at {schedule.get_lr({}):.4e}, with a warm-up of "
        f"{schedule.lr_warmup_steps:g} samples; the checkpoint's was {then.get_lr({}):.4e}"
    )


def tell_generators() -> None:
    """A line where random generators could not be had from the checkpoint."""
    print_rank_0(
        "> megatron-stability: random generators are not those of the checkpoint (another layout, or "
        "--no-load-rng): the run goes on with the same samples, but not bit for bit"
    )
