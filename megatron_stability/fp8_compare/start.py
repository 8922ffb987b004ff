"""`compare --out`: training the control, the FP8 run and, if asked, a second BF16 seed."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_stability import files
from megatron_stability.errors import EXIT_FINE, EXIT_HALTED, UsageError
from megatron_stability.ledger.entries import FILE

RECIPES = ("delayed", "current", "block", "mxfp8")
SAMPLES = 50  # about, over a run of --train-iters steps
_OURS = {  # flags that `compare` gives each run, and why they can't be shared
    "--stability-record-dir": "each run has a folder of its own in --out",
    "--tensorboard-dir": "each run has a folder of its own in --out",
    "--stability-fp8-emulate": "it would turn the control into an FP8 run; give --emulate",
    "--fp8-emulate": "it would turn the control into an FP8 run; give --emulate",
    "--fp8-format": "it would turn the control into an FP8 run; give it in --fp8-flags, with --emulate none",
    "--save": "the second run would write over the first one's checkpoints",
    "--spec": "compare gives its own",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that only mean something where the runs are started; None where not given."""
    group = parser.add_argument_group("start the runs", "with pretrain's flags after --")
    group.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs")
    group.add_argument(
        "--emulate",
        choices=(*RECIPES, "none"),
        help="recipe (current); none: Transformer Engine's FP8, by --fp8-flags",
    )
    group.add_argument("--fp8-flags", metavar="FLAGS", help="further flags of the FP8 run, in one word")
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
        flags: pretrain's, from after `--`.

    Raises:
        UsageError: no flags, flags that both runs can't have, or folders that hold runs already.
    """
    if options.runs or options.noise:
        raise UsageError("--out starts runs of its own; leave run folders and --noise out, or leave --out out")
    if not flags:
        raise UsageError(f"--out {options.out}: give pretrain's flags after --, as in --out DIR -- --num-layers 4 ...")
    for flag in flags:
        name = flag.split("=")[0]
        if name in _OURS:
            raise UsageError(f"{name} after --: {_OURS[name]}; drop it")
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
        flags: pretrain's.

    Returns:
        Their folders in the order FP8, control, noise.

    Raises:
        UsageError: the folder can't be written, or a run did not go to its end; names its log.
    """
    out: Path = options.out.absolute()
    emulate = options.emulate or "current"
    fp8 = [] if emulate == "none" else ["--stability-fp8-emulate", emulate]
    more = {"bf16": [], "fp8": [*fp8, *(options.fp8_flags or "").split()], "noise": ["--seed", str(options.noise_seed)]}
    for name in _names(options):
        folder = out / name
        command = [sys.executable, "-m", "megatron_stability.cli", "pretrain", "--nproc", str(options.nproc or 1)]
        command += ["--cpu"] if options.cpu else []
        command += [*_sampling(flags), *flags, "--spec", "megatron_stability", "--stability-record-dir", str(folder)]
        command += ["--tensorboard-dir", str(folder / "tensorboard"), *more[name]]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log = files.open_log(folder / "log.txt")
        except OSError as error:
            raise UsageError(f"--out {options.out}: {folder} can't be written ({error.strerror})") from None
        with log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if code not in (EXIT_FINE, EXIT_HALTED):  # a run that its policy halted has a ledger that says so
            raise UsageError(f"the {name} run ended with exit code {code}; its log is {folder / 'log.txt'}")
    return [out / name for name in ("fp8", "bf16", "noise") if name in _names(options)]


def _names(options: argparse.Namespace) -> list[str]:
    return ["bf16", "fp8", *(["noise"] if options.noise_seed is not None else [])]


def _sampling(flags: Sequence[str]) -> list[str]:
    """How often weights and gradients are sketched and FP8 is sampled; flags that follow win."""
    words = list(flags)
    steps = words[words.index("--train-iters") + 1] if "--train-iters" in words[:-1] else ""
    every = max(1, int(steps) // SAMPLES) if steps.isdecimal() else SAMPLES
    return ["--stability-observe-sketch-every", str(every), "--stability-fp8-sample-every", str(every)]
