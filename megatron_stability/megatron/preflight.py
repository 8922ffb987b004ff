"""What can be said of a command line before any rank starts: one sentence instead of a traceback on each of them."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import struct
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_stability import config as tree
from megatron_stability.errors import UsageError
from megatron_stability.megatron.fp8_flags import refuse_inactive_fp8

if TYPE_CHECKING:
    from megatron_stability.megatron.launch import Job

INDEX_MAGIC = b"MMIDIDX\x00\x00"  # core/datasets/indexed_dataset.py
DTYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _peek(argv: Sequence[str], flags: dict[str, Any]) -> argparse.Namespace:
    """Some of Megatron's flags, read without Megatron."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    for flag, options in flags.items():
        parser.add_argument(flag, **options)
    return parser.parse_known_args(list(argv))[0]


def check_layout(argv: Sequence[str], world: int) -> None:
    """The world size must be a multiple of tensor × pipeline × context parallel size.

    Args:
        argv: Megatron's flags.
        world: number of ranks.

    Raises:
        UsageError: names the flags and the numbers of ranks that would do.
    """
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    sizes = _peek(argv, {f"--{name}": {"type": int, "default": 1} for name in names})
    values = list(vars(sizes).values())
    for name, value in zip(names, values, strict=True):
        if value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1")
    needed = values[0] * values[1] * values[2]
    if world % needed:
        layout = " x ".join(f"--{name} {value}" for name, value in zip(names, values, strict=True) if value > 1)
        raise UsageError(
            f"{world} rank{'s' * (world > 1)} can't hold {layout}: start a multiple of {needed} (--nproc {needed})"
        )


def check_files(argv: Sequence[str]) -> None:
    """Data files must be there and whole, output folders writable.

    Args:
        argv: Megatron's flags.

    Raises:
        UsageError: names the flag and the file.
    """
    paths = {"nargs": "*", "default": []}
    data_flags = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
    read = _peek(argv, dict.fromkeys(data_flags, paths))
    for flag, entries in zip(data_flags, vars(read).values(), strict=True):
        for prefix in entries:
            with contextlib.suppress(ValueError):
                float(prefix)  # a blend's weight
                continue
            check_dataset(flag, prefix)
    folders = ("--save", "--tensorboard-dir", "--stability-record-dir")
    for flag, folder in vars(_peek(argv, {flag: {"default": None} for flag in folders})).items():
        if folder is not None:
            check_writable("--" + flag.replace("_", "-"), Path(folder))


def check_dataset(flag: str, prefix: str) -> None:
    """PREFIX.idx and PREFIX.bin must exist, and the index must describe exactly the bytes that are there."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index, data):
        if not file.is_file():
            raise UsageError(f"{flag} {prefix}: {file} does not exist; `megatron-stability prepare-data` makes it")
    with index.open("rb") as stream:
        head = stream.read(9 + 8 + 1 + 8 + 8)
        if len(head) < 34 or head[:9] != INDEX_MAGIC:
            raise UsageError(f"{flag} {prefix}: {index} is not a Megatron index; make it again")
        _, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
        whole = 34 + sequences * (4 + 8) + documents * 8
        if index.stat().st_size < whole or code not in DTYPE_BYTES:
            raise UsageError(f"{flag} {prefix}: {index} is cut short or damaged; make it again")
        sizes = stream.read(4 * sequences)
    tokens = sum(memoryview(sizes).cast("i"))
    if data.stat().st_size != tokens * DTYPE_BYTES[code]:
        raise UsageError(
            f"{flag} {prefix}: {data} has {data.stat().st_size} bytes where its index says "
            f"{tokens * DTYPE_BYTES[code]}; make it again"
        )


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
    from megatron_stability.megatron import pretrain as gpt

    parser = gpt.add_arguments(add_megatron_arguments(_Parser(allow_abbrev=False)))
    try:
        _, unknown = parser.parse_known_args(list(job.argv))
        _refuse_unknown(unknown, parser)
        with contextlib.redirect_stdout(io.StringIO()), _argv(job.argv):
            args = parse_args(gpt.add_arguments)
            validate_args(args, {"tokenizer_type": "NullTokenizer"})
            core_transformer_config_from_args(args)  # refuses more, such as heads that the tensor ranks can't share
        gpt.refuse_what_is_not_carried(args)
        config = tree.load(overrides=vars(args))
        refuse_inactive_fp8(config.fp8, config.mode, args)
        if config.mode != "off":
            arguments.refuse_what_cannot_work(config, args)
    except UsageError as error:
        return str(error)
    except (AssertionError, ValueError, RuntimeError, KeyError, TypeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"Megatron refuses these arguments: {str(error).strip() or frame.line} ({Path(frame.filename).name})"
    return None


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
