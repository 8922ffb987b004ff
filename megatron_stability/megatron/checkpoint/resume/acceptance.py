"""What stands between a checkpoint that was chosen and its load: is it of this run, and does Megatron take it?"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_stability.config import StabilityConfig
from megatron_stability.megatron.access.collectives import from_rank_0
from megatron_stability.megatron.checkpoint.resume import changes, choose, layouts, param_groups, starts_anew
from megatron_stability.megatron.checkpoint.run_files import RunFiles


def accept(
    folder: Path, chosen: choose.Chosen, optimizer: Any, args: Namespace, files: RunFiles, config: StabilityConfig
) -> tuple[str, ...]:
    """Compare it with this run and say what starts anew; nothing on disk changes before all of it holds. Collective.

    Args:
        folder: of the checkpoint.
        chosen: it, with its manifest.
        optimizer: Megatron's; its groups are told where another schedule was asked for.
        args: Megatron's.
        files: the run's data and tokenizer files.
        config: the validated tree.

    Returns:
        The names of the arguments and files that differ, change training and are allowed to.

    Raises:
        UsageError: on every rank alike; names what differs and the way out.
    """
    assert chosen.manifest is not None, "a start without a checkpoint has nothing to compare"
    saved = chosen.manifest
    allowed = from_rank_0(lambda: changes.refuse(saved, args, files, config))
    if not args.finetune:
        layouts.refuse_unfit_optimizer_state(folder, saved, args)
    param_groups.let_the_schedule_change(optimizer, args)
    starts_anew.tell(config, args)
    from_rank_0(partial(choose.accept, folder.parent, chosen))
    return allowed
