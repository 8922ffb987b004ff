"""What can be said of a command line before any rank starts: one sentence instead of a traceback on each of them."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import math
import os
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stability import config as tree
from megatron_stability.data import blends, index, splits
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.megatron.fp8.flags import refuse_inactive_fp8

if TYPE_CHECKING:
    from megatron_stability.megatron.start.job import Job
from megatron_stability.megatron.start.parser import OneSentenceParser

COUNTS = (
    *("num-layers", "hidden-size", "num-attention-heads", "num-query-groups", "seq-length", "max-position-embeddings"),
    *("micro-batch-size", "global-batch-size", "log-interval", "vocab-size"),
    *("num-experts", "moe-router-topk"),
)
DATA_FLAGS: Mapping[str, Mapping[str, Any]] = {
    **{f"--{each}data-path": {"nargs": "*"} for each in ("", "train-", "valid-", "test-")},
    **{flag: {} for flag in ("--data-args-path", "--per-split-data-args-path", "--split")},
}


def _peek(argv: Sequence[str], flags: Mapping[str, Mapping[str, Any]]) -> argparse.Namespace:
    """Some of Megatron's flags, read without Megatron."""
    parser = OneSentenceParser(allow_abbrev=False, add_help=False)
    for flag, options in flags.items():
        parser.add_argument(flag, **options)
    return parser.parse_known_args(list(argv))[0]


def check_layout(argv: Sequence[str], world: int) -> None:
    """The world size must be a multiple of tensor × pipeline × context parallel size, and likewise for experts.

    Args:
        argv: Megatron's flags.
        world: number of ranks.

    Raises:
        UsageError: names the flags and the numbers of ranks that would do.
    """
    tensor, pipeline = "tensor-model-parallel-size", "pipeline-model-parallel-size"
    sizes = _at_least_one(argv, {tensor: 1, pipeline: 1, "context-parallel-size": 1})
    _refuse_misfit(sizes, world)
    experts = _at_least_one(argv, {"expert-tensor-parallel-size": sizes[tensor], "expert-model-parallel-size": 1})
    _refuse_misfit({**experts, pipeline: sizes[pipeline]}, world)


def _refuse_misfit(sizes: dict[str, int], world: int) -> None:
    needed = math.prod(sizes.values())
    if world % needed:
        layout = " x ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
        raise UsageError(
            f"{world} rank{'s' * (world > 1)} can't hold {layout}: start a multiple of {needed} (--nproc {needed})"
        )


def _at_least_one(argv: Sequence[str], defaults: Mapping[str, int | None]) -> dict[str, Any]:
    """Integer flags by name, each given one at least 1."""
    values = vars(_peek(argv, {f"--{name}": {"type": int, "default": value} for name, value in defaults.items()}))
    for name, value in zip(defaults, values.values(), strict=True):
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1")
    return dict(zip(defaults, values.values(), strict=True))


def check_sizes(argv: Sequence[str]) -> None:
    """Sizes that Megatron divides by, or that a model can't do without, must be positive and go together.

    Args:
        argv: Megatron's flags.

    Raises:
        UsageError: names the flags.
    """
    given = _at_least_one(argv, dict.fromkeys(COUNTS))
    layouts = _at_least_one(argv, {"tensor-model-parallel-size": 1, "context-parallel-size": 1})
    heads, groups, length = (given[name] for name in ("num-attention-heads", "num-query-groups", "seq-length"))
    if "--group-query-attention" in argv and heads and groups and heads % groups:
        raise UsageError(f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}")
    experts, chosen = given["num-experts"], given["moe-router-topk"]
    if experts and chosen and chosen > experts:
        raise UsageError(f"--moe-router-topk {chosen} is more than --num-experts {experts}")
    tensor, context = layouts.values()
    if length and context > 1 and length % (2 * context):
        raise UsageError(f"--seq-length {length} is not a multiple of 2 x --context-parallel-size {context}")
    if length and "--sequence-parallel" in argv and length // context % tensor:
        raise UsageError(
            f"--seq-length {length}: with --sequence-parallel a context rank's share, {length // context}, must be a "
            f"multiple of --tensor-model-parallel-size {tensor}"
        )


def check_files(argv: Sequence[str]) -> None:
    """Data files must be there and whole, no split empty, output folders writable.

    Args:
        argv: Megatron's flags.

    Raises:
        UsageError: names the flag and the file.
    """
    check_data(_peek(argv, DATA_FLAGS))
    folders = ("--save", "--tensorboard-dir", "--stability-record-dir")
    for flag, folder in vars(_peek(argv, {flag: {"default": None} for flag in folders})).items():
        if folder is not None:
            check_writable("--" + flag.replace("_", "-"), Path(folder))


def check_data(args: argparse.Namespace) -> None:
    """Every data set that is named must be there and whole, and every split must hold a token. A few reads for each.

    Args:
        args: has Megatron's names of what says where the data are, and `split`.

    Raises:
        UsageError: names the setting and the file.
    """
    data_sets = blends.data_sets(args)
    splits.refuse_unread(data_sets, argument(args, "split"))
    indexes = {each.prefix: index.read(each.flag, each.prefix) for each in data_sets}
    splits.refuse_empty(data_sets, indexes, argument(args, "split"))


def check_device() -> None:
    """Megatron trains on CUDA devices; without one, each rank would end in a traceback.

    Raises:
        UsageError: there is none; names the flag for a dry run.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError("no CUDA device is visible; --cpu makes a dry run without one")


def check_writable(flag: str, folder: Path) -> None:
    """The folder, or the nearest parent that exists, must be a folder that can be written to."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{flag} {folder}: {there} is not a folder")
    try:  # tried, not asked: to root, os.access says yes of folders where no file can be made
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UsageError(f"{flag} {folder}: {there} can't be written to ({error.strerror})") from None


def complaint_about_arguments(job: Job, world: int, prepared: bool = True) -> str | None:
    """What Megatron's own parser and validation say against the arguments; None where they pass.

    Args:
        job: the flags.
        world: number of ranks.
        prepared: whether `job.prepare` ran in this process.

    Returns:
        One sentence, or None.
    """
    if not prepared:
        job.prepare()
    os.environ.setdefault("RANK", "0")
    os.environ["WORLD_SIZE"] = str(world)
    from megatron.training.arguments import (
        add_megatron_arguments,
        core_transformer_config_from_args,
        parse_args,
        validate_args,
    )

    from megatron_stability.megatron import arguments
    from megatron_stability.megatron.start import faults
    from megatron_stability.megatron.start import pretrain_gpt as gpt

    parser = gpt.add_arguments(add_megatron_arguments(OneSentenceParser(allow_abbrev=False)))
    try:
        _, unknown = parser.parse_known_args(list(job.argv))
        _refuse_unknown(unknown, parser)
        with contextlib.redirect_stdout(io.StringIO()), _argv(job.argv):
            args = parse_args(gpt.add_arguments)
            validate_args(args, dict(gpt.DEFAULTS))
            core_transformer_config_from_args(args)  # refuses more, such as heads that the tensor ranks can't share
        gpt.refuse_what_is_not_carried(args)
        _refuse_missing(args)
        faults.faults(args)
        config = tree.load(overrides=vars(args))
        refuse_inactive_fp8(config.fp8, config.mode, args)
        if config.mode != "off":
            arguments.refuse_what_cannot_work(config, args)
        arguments.refuse_what_megatron_meets_late(args)
    except (UsageError, argparse.ArgumentTypeError) as error:
        return str(error)
    except (AssertionError, ValueError, RuntimeError, KeyError, TypeError, ArithmeticError, OSError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"Megatron refuses these arguments: {str(error).strip() or frame.line} ({Path(frame.filename).name})"
    return None


def _refuse_missing(args: argparse.Namespace) -> None:
    """What Megatron notices only on every rank, or not at all: it takes mock data where no data are named."""
    for name, value in vars(args).items():
        if isinstance(value, float) and math.isnan(value):
            raise UsageError(f"--{name.replace('_', '-')} {value}: is not a number")
    if args.lr is None and not args.skip_train:
        raise UsageError("--lr is missing: give the learning rate")
    if not args.skip_train and (args.train_iters or args.train_samples or 0) < 1:
        raise UsageError("--train-iters: give at least 1, or --train-samples")
    data = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "mock_data")
    if not any(argument(args, name) for name in data):
        raise UsageError(
            "no data: give --data-path PREFIX, which `megatron-stability prepare-data` makes, or --mock-data"
        )


def _refuse_unknown(unknown: Sequence[str], parser: argparse.ArgumentParser) -> None:
    for word in unknown:
        if word.startswith("--"):
            known = list(parser._option_string_actions)
            near = difflib.get_close_matches(word.split("=")[0], known, n=1)
            raise UsageError(f"unknown flag {word}" + (f"; did you mean {near[0]}?" if near else ""))
    if unknown:
        raise UsageError(f"{unknown[0]!r} stands where a flag is expected")


@contextlib.contextmanager
def _argv(argv: Sequence[str]) -> Any:
    import sys

    before, sys.argv = sys.argv, ["megatron-stability pretrain", *argv]
    try:
        yield
    finally:
        sys.argv = before
