"""`compare --out`: training the control, the FP8 run and, if asked, a second BF16 seed."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_stability import files
from megatron_stability.echo import brief
from megatron_stability.errors import EXIT_FINE, EXIT_HALTED, UsageError
from megatron_stability.fp8_compare.hosts import host_of
from megatron_stability.ledger.entries import FILE

RECIPES = ("delayed", "current", "block", "mxfp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that only mean something where the runs are started; None where not given."""
    group = parser.add_argument_group("start the runs", "with pretrain's flags, or nemo RECIPE key=value, after --")
    group.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs")
    group.add_argument(
        "--emulate",
        choices=(*RECIPES, "none"),
        help="recipe (current); none: Transformer Engine's FP8, by --fp8-flags",
    )
    group.add_argument("--fp8-flags", metavar="WORDS", help="further flags or key=value of the FP8 run, in one word")
    group.add_argument("--noise-seed", type=int, metavar="SEED", help="start a second BF16 run with this seed")
    group.add_argument("--nproc", type=int, metavar="N", help="ranks of each run (1)")
    group.add_argument("--cpu", action="store_true", default=None, help="on CPUs")


def refuse_without_out(options: argparse.Namespace) -> None:
    """Raise for flags that would do nothing.

    Raises:
        UsageError: names the flag.
    """
    for name in ("emulate", "fp8_flags", "noise_seed", "nproc", "cpu"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} without --out: it is for runs that compare starts; drop it")


def check(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Before anything is made.

    Args:
        options: the command's.
        flags: pretrain's or `nemo RECIPE ...`, from after `--`.

    Raises:
        UsageError: no flags, flags that both runs can't have, or folders that hold runs already.
    """
    if options.runs or options.noise:
        raise UsageError("--out starts runs of its own; leave run folders and --noise out, or leave --out out")
    if not flags:
        raise UsageError(f"--out {options.out}: give pretrain's flags after --, as in --out DIR -- --num-layers 4 ...")
    host = host_of(flags)
    for flag in flags:
        name = flag.lstrip("+").split("=")[0]
        if name in host.own:
            raise UsageError(f"{name} after --: {host.own[name]}; drop it")
    steps = host.steps()
    if steps is not None and options.warmup is not None and steps <= options.warmup:
        raise UsageError(
            f"--warmup {options.warmup}: {host.length} {steps} leaves no step to judge; give fewer steps of warmup, or "
            "leave it out"
        )
    if options.emulate == "none" and not options.fp8_flags:
        raise UsageError("--emulate none: give Transformer Engine's FP8 in --fp8-flags, as in '--fp8-format hybrid'")
    if options.nproc is not None and options.nproc < 1:
        raise UsageError(f"--nproc {options.nproc}: must be 1 or more")
    for name in _names(options):
        if (folder := options.out / name / FILE).exists():
            raise UsageError(f"--out {options.out}: {folder.parent} holds a run already; give an empty folder")


def runs(options: argparse.Namespace, flags: Sequence[str]) -> list[Path]:
    """Train control, FP8 and, if asked, a second seed.

    Args:
        options: the command's, checked.
        flags: as for `check`.

    Returns:
        Their folders in the order FP8, control, noise.

    Raises:
        UsageError: the folder can't be written, or a run did not go to its end; names its log.
    """
    out: Path = options.out.absolute()
    host, emulate = host_of(flags), options.emulate or "current"
    more = {
        "bf16": [],
        "fp8": [*host.fp8(emulate), *shlex.split(options.fp8_flags or "")],
        "noise": host.seed(options.noise_seed),
    }
    names = _names(options)
    for number, name in enumerate(names, 1):
        folder = out / name
        command = host.command(folder, options.nproc or 1, bool(options.cpu), more[name])
        print(f"compare: training {name}, {number} of {len(names)}; its log is {folder / 'log.txt'}", file=sys.stderr)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log = files.open_log(folder / "log.txt")
        except OSError as error:
            raise UsageError(f"--out {options.out}: {folder} can't be written ({error.strerror})") from None
        with log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if code not in (EXIT_FINE, EXIT_HALTED):  # a run that its policy halted has a ledger that says so
            raise UsageError(
                f"the {name} run ended with exit code {code}: {_last_line(folder / 'log.txt')}; its log is "
                f"{folder / 'log.txt'}"
            )
    return [out / name for name in ("fp8", "bf16", "noise") if name in _names(options)]


def _names(options: argparse.Namespace) -> list[str]:
    return ["bf16", "fp8", *(["noise"] if options.noise_seed is not None else [])]


def _last_line(log: Path) -> str:
    """The last thing that a run said, which is why it ended."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return brief(lines[-1]) if lines else "it said nothing"
