"""`megatron-stability nemo RECIPE.yaml`: judge a recipe once, then start the ranks of this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_stability.errors import EXIT_FINE, UsageError
from megatron_stability.megatron.start.command import MOST_RANKS
from megatron_stability.megatron.start.job import rank_main
from megatron_stability.megatron.start.parser import OneSentenceParser
from megatron_stability.megatron.start.ranks import Ranks
from megatron_stability.nemo import pretrain
from megatron_stability.nemo.pretrain import Job

if TYPE_CHECKING:
    from megatron_stability.nemo.recipe.recipe_file import RecipeFile

MOST_RESTARTS = 1000
LIST = "--list"

EPILOG = (
    "Bridge's sections, names and precedence (command line > YAML > recipe function), and a `stability:` section.\n"
    "Without a CUDA device the CPU backend stands in. On several nodes, name the command that starts ranks:\n"
    "  megatron-stability nemo RECIPE.yaml key=value --supervise 5 -- torchrun --nnodes 4 --nproc-per-node 8 ...\n"
    "`megatron-stability nemo --list` names the recipe functions that need no model hub.\n"
    "Example, a small model on two CPU ranks:\n"
    "  megatron-stability nemo examples/nemo/tiny_cpu.yaml --nproc-per-node 2 model.tensor_model_parallel_size=2"
)


def run(argv: Sequence[str]) -> int:
    """`megatron-stability nemo`.

    Args:
        argv: the recipe file, flags, `key=value` words, and after `--` the command that starts ranks, if not this one.

    Returns:
        The exit code: 0, 2 for unusable input, or the ranks' own (18: the policy halted the run; 19: it is to be
        started again).
    """
    if list(argv) == [LIST]:
        from megatron_stability.nemo.recipe import source

        sys.stdout.writelines(f"{name}\n" for name in source.hub_free())
        return EXIT_FINE
    argv, starter = _split(list(argv))
    parser = OneSentenceParser(
        prog="megatron-stability nemo",
        allow_abbrev=False,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml", help="the recipe file")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks on this machine")
    parser.add_argument("--supervise", type=int, metavar="N", help="start again after a rewind, at most N times")
    pretrain.add_options(parser)
    options, unknown = parser.parse_known_intermixed_args(argv)
    world = options.nproc_per_node
    if not 1 <= world <= MOST_RANKS:
        raise UsageError(f"--nproc-per-node {world}: start at least one rank, and at most {MOST_RANKS} on one machine")
    if "RANK" in os.environ:
        raise UsageError("under torchrun, call `-m megatron_stability.nemo.pretrain --config-file RECIPE.yaml`")
    words = (*options.words, *unknown)
    from megatron_stability.nemo.recipe import recipe_file  # brings omegaconf and hydra, which help does not need

    wanted = recipe_file.read(options.recipe, words, options.scale_down)
    _refuse_slips(wanted, options.drill_fault)
    if options.supervise is not None:
        return _supervise(options, starter, wanted, words)
    if starter:
        return subprocess.run(_command(options, starter, words), check=False).returncode
    job = pretrain.job_of(options, options.recipe, unknown)
    os.environ["WORLD_SIZE"] = str(world)  # Bridge's validation asks for it
    if options.dry_run:
        job.prepare()
        pretrain.show(job, world, sys.stdout)
        return EXIT_FINE
    with Ranks(world, fork=job.cpu) as ranks:
        if job.cpu:
            job.prepare()
        complaint = ranks.ask_once(_complaint, job)
        if complaint:
            raise UsageError(complaint)
        return ranks.run(partial(rank_main, program="megatron-stability nemo"), job)


def _refuse_slips(wanted: RecipeFile, drill_fault: Sequence[str]) -> None:
    """What needs no Bridge to be told, before its import of many seconds."""
    from megatron_stability.nemo.recipe import source

    source.refuse_unknown_recipe(wanted.recipe)
    source.refuse_typos(wanted)
    if drill_fault:
        from megatron_stability.megatron.start import faults  # imports torch

        faults.refuse_unreadable(drill_fault)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    if not argv[at + 1 :]:
        raise UsageError(
            "after -- stands the command that starts ranks, e.g. -- torchrun --nnodes 2 --nproc-per-node 8"
        )
    starter = argv[at + 1 :]
    if shutil.which(starter[0]) is None:
        raise UsageError(f"{starter[0]} after --: there is no such command that can be run; give its path")
    return argv[:at], starter


def _command(options: argparse.Namespace, starter: list[str], words: Sequence[str]) -> list[str]:
    """One start: by the user's command, or by this one."""
    flags = ["--scale-down"] * options.scale_down + ["--dry-run"] * options.dry_run
    flags += [part for fault in options.drill_fault for part in ("--drill-fault", fault)]
    if starter:
        return [
            *starter,
            "-m",
            "megatron_stability.nemo.pretrain",
            "--config-file",
            str(options.recipe),
            *flags,
            *words,
        ]
    here = [sys.executable, "-m", "megatron_stability.cli", "nemo", str(options.recipe)]
    return [*here, "--nproc-per-node", str(options.nproc_per_node), *flags, *words]


def _supervise(options: argparse.Namespace, starter: list[str], wanted: RecipeFile, words: Sequence[str]) -> int:
    from megatron_stability.nemo.supervise import supervise

    if wanted.save is None:
        raise UsageError("--supervise goes back to checkpoints: give checkpoint.save in the recipe or as a word")
    if not 0 <= options.supervise <= MOST_RESTARTS:
        raise UsageError(f"--supervise {options.supervise}: give the restarts, at most {MOST_RESTARTS}")
    ledger = wanted.stability.record.dir or wanted.save / "stability"
    return supervise(_command(options, starter, words), wanted.save, ledger, options.supervise)


def _complaint(job: Job, prepared: bool) -> str | None:
    try:
        if not prepared:
            job.prepare()
        attached = job.attach(job.build())
        if attached is not None:
            attached.close()
    except UsageError as error:
        return str(error)
    return None
