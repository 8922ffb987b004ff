"""`megatron-stability nemo RECIPE.yaml`: judge a recipe once, then start the ranks of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_stability.errors import EXIT_FINE, UsageError
from megatron_stability.megatron.launch import MOST_RANKS
from megatron_stability.megatron.preflight import OneSentenceParser
from megatron_stability.megatron.ranks import Ranks
from megatron_stability.nemo import pretrain, recipe_file
from megatron_stability.nemo.pretrain import Job

EPILOG = (
    "Bridge's sections, names and precedence (command line > YAML > recipe function), and a `stability:` section.\n"
    "Without a CUDA device the CPU backend stands in. On several nodes, start ranks with torchrun instead:\n"
    "  torchrun --nnodes 4 --nproc-per-node 8 ... -m megatron_stability.nemo.pretrain --config-file RECIPE.yaml\n"
    "Example, a small model on two CPU ranks:\n"
    "  megatron-stability nemo examples/nemo/tiny_cpu.yaml --nproc-per-node 2 model.tensor_model_parallel_size=2"
)


def run(argv: Sequence[str]) -> int:
    """`megatron-stability nemo`.

    Args:
        argv: the recipe file, flags, and `key=value` words.

    Returns:
        The exit code: 0, 2 for unusable input, or the ranks' own (18: the policy halted the run; 19: it is to be
        started again).
    """
    parser = OneSentenceParser(
        prog="megatron-stability nemo",
        allow_abbrev=False,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml", help="the recipe file")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks on this machine")
    pretrain.add_options(parser)
    options, unknown = parser.parse_known_intermixed_args(argv)
    world = options.nproc_per_node
    if not 1 <= world <= MOST_RANKS:
        raise UsageError(f"--nproc-per-node {world}: start at least one rank, and at most {MOST_RANKS} on one machine")
    if "RANK" in os.environ:
        raise UsageError("under torchrun, call `-m megatron_stability.nemo.pretrain --config-file RECIPE.yaml`")
    words = (*options.words, *unknown)
    recipe_file.read(options.recipe, words, options.scale_down)  # its faults are told before the slow imports
    job = Job(options.recipe, words, options.scale_down, cpu=pretrain.on_cpu())
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
        return ranks.run(_rank_main, job)


def _complaint(job: Job, prepared: bool) -> str | None:
    try:
        if not prepared:
            job.prepare()
        job.build()
    except UsageError as error:
        return str(error)
    return None


def _rank_main(job: Job, prepared: bool) -> None:
    try:
        if not prepared:
            job.prepare()
        job.train()
    except UsageError as error:
        print(f"megatron-stability nemo: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
