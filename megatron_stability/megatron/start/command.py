"""`megatron-stability pretrain` and `run SCRIPT`: patch in memory, choose the backend, start the ranks.

Under torchrun this process is one rank already. With `--nproc N` it starts N ranks itself, after everything that can
be judged beforehand was judged once: one sentence instead of N tracebacks. On the CPU backend the ranks are forked from
this process once Megatron is imported, so that its import is paid once; with GPUs each rank is a fresh process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_stability import config as tree
from megatron_stability.errors import EXIT_FINE, UsageError
from megatron_stability.megatron.access import processes
from megatron_stability.megatron.access.speaks import speaks
from megatron_stability.megatron.start import input_checks
from megatron_stability.megatron.start.job import Job, rank_main
from megatron_stability.megatron.start.parser import OneSentenceParser
from megatron_stability.megatron.start.ranks import Ranks

MOST_RANKS = 1024  # more on one machine is a slip of the keyboard
EPILOG = {
    "pretrain": "All other flags are Megatron's. Example, a dry run on two CPU ranks:\n"
    "  megatron-stability pretrain --nproc 2 --cpu --tensor-model-parallel-size 2 --num-layers 2 --hidden-size 64 \\\n"
    "    --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 \\\n"
    "    --global-batch-size 4 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 255 \\\n"
    "    --eval-iters 0 --eval-interval 10",
    "run": "SCRIPT and all other flags are Megatron's. Example:\n"
    "  torchrun --nproc-per-node 8 -m megatron_stability run pretrain_gpt.py --spec megatron_stability ...",
}


def pretrain(argv: Sequence[str]) -> int:
    """`megatron-stability pretrain`.

    Args:
        argv: the launcher's flags and Megatron's.

    Returns:
        The exit code: 0, 2 for unusable input, or the ranks' own (18: the policy halted the run; 19: it is to be
        started again).
    """
    options, rest = launcher_options("pretrain", argv)
    return _launch(options, rest, script=None)


def run_script(argv: Sequence[str]) -> int:
    """`megatron-stability run SCRIPT`: an unmodified `pretrain_gpt.py`, patched in memory.

    Args:
        argv: the launcher's flags, the script, and its flags.

    Returns:
        As `pretrain`.
    """
    options, rest = launcher_options("run", argv)
    if not rest or rest[0].startswith("-"):
        raise UsageError("run needs a script: megatron-stability run [--nproc N] [--cpu] pretrain_gpt.py FLAGS")
    script = Path(rest[0])
    if not script.is_file():
        raise UsageError(f"{script}: there is no such script")
    return _launch(options, rest[1:], script)


def launcher_options(name: Literal["pretrain", "run"], argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own flags and the plugin's, and what is left.

    Args:
        name: of the command.
        argv: everything after it.
    """
    parser = OneSentenceParser(
        prog=f"megatron-stability {name}",
        allow_abbrev=False,
        epilog=EPILOG[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, default=None, metavar="N", help="start N ranks here, without torchrun")
    parser.add_argument("--cpu", action="store_true", help="dry run on CPUs with gloo, no GPU needed")
    tree.add_flags(parser)
    options, _ = parser.parse_known_args(argv)
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    own.add_argument("--nproc", type=int)
    own.add_argument("--cpu", action="store_true")
    return options, own.parse_known_args(argv)[1]


def _launch(options: argparse.Namespace, argv: list[str], script: Path | None) -> int:
    if "RANK" not in os.environ:
        return _start_ranks(options, argv, script)
    try:
        return _be_rank(options, argv, script)
    except UsageError as error:
        if speaks(os.environ["RANK"]):
            raise
        return error.exit_code


def _start_ranks(options: argparse.Namespace, argv: list[str], script: Path | None) -> int:
    world = 1 if options.nproc is None else options.nproc
    if not 1 <= world <= MOST_RANKS:
        raise UsageError(f"--nproc {world}: start at least one rank, and at most {MOST_RANKS} on one machine")
    job = checked_job(options, argv, script, world)
    with Ranks(world, fork=options.cpu) as ranks:
        if options.cpu:
            job.prepare()
            import megatron.training  # noqa: F401  # paid once, before the fork
        if script is None:
            complaint = ranks.ask_once(input_checks.complaint_about_arguments, job, world)
            if complaint:
                raise UsageError(complaint)
        return ranks.run(rank_main, job)


def _be_rank(options: argparse.Namespace, argv: list[str], script: Path | None) -> int:
    """This process was started by torchrun: every rank judges the same, rank 0 says it, all exit 2."""
    processes.follow_torchrun()
    processes.end_daemons_at_exit()
    if options.nproc is not None:
        raise UsageError("--nproc was given under torchrun, which started the ranks already; drop one of the two")
    size = os.environ.get("WORLD_SIZE", "")
    if not (size.isdecimal() and int(size)):
        raise UsageError(
            f"RANK={os.environ['RANK']} is set, and WORLD_SIZE ({size!r}) is no number of ranks: unset RANK to start "
            "ranks here, or use torchrun"
        )
    world = int(size)
    job = checked_job(options, argv, script, world)
    job.prepare()
    complaint = input_checks.complaint_about_arguments(job, world) if job.script is None else None
    if complaint:
        raise UsageError(complaint)
    job.train()
    return EXIT_FINE


def checked_job(options: argparse.Namespace, argv: list[str], script: Path | None, world: int) -> Job:
    """The job, once everything that needs no Megatron was judged.

    Args:
        options: of `launcher_options`.
        argv: Megatron's flags.
        script: None for our own.
        world: number of ranks.

    Raises:
        UsageError: what is wrong, and the way out.
    """
    config = tree.load(overrides=vars(options))
    if options.cpu:
        from megatron_stability.megatron import cpu

        argv = [*cpu.FLAGS, *argv]  # the user's own come later and win
    input_checks.check_sizes(argv)
    input_checks.check_layout(argv, world)
    input_checks.check_files(argv)
    if not options.cpu:
        input_checks.check_device()
    # Stock is stock: with our own script and everything off, not even the seams are opened.
    return Job(tuple(argv), script, options.cpu, patched=script is not None or config.mode != "off")
