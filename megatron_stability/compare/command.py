"""`megatron-stability compare FP8_RUN BF16_RUN`, or `compare --out DIR -- FLAGS`, which starts the runs first."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stability.compare.figures import Gates, RunFigures, compare
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.record import pages
from megatron_stability.record.entries import FILE, read

EPILOG = """Examples:
  megatron-stability compare runs/fp8 runs/bf16 --noise runs/bf16-seed2 --html compare.html
  megatron-stability compare --out compare --emulate delayed --nproc 2 --cpu -- --num-layers 4 ... (pretrain's flags)
Exit codes: 0 every gate passed, 1 one did not, 2 the runs can't be compared."""


def run(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: see `--help`.

    Returns:
        0 where every gate passed, 1 otherwise.
    """
    own, flags = _split(argv)
    options = _parser().parse_args(own)
    _check(options)
    if options.out is not None:
        folders = _start(options, flags)
    elif len(options.runs) != 2 or flags:
        raise UsageError("compare needs two run folders, FP8 first, or --out DIR -- and pretrain's flags")
    else:
        folders = [*options.runs, *([options.noise] if options.noise else [])]
    fp8, control, *more = map(figures, folders)
    noise = more[0] if more else None
    gates = Gates(
        loss_error=options.max_loss_error,
        held_out_error=options.max_held_out_error,
        slowdown=options.max_slowdown,
    )
    result = compare(fp8, control, noise, options.warmup, gates)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {options.json}: cannot be written ({error.strerror})") from None
    if options.html is not None:
        from megatron_stability.compare.plots import write

        write(result, [fp8, control, *([noise] if noise else [])], options.html)
    print(sentence(result))
    for finding in result["findings"]:
        print(f"FINDING: {finding}")
    return EXIT_FINDING if result["findings"] else EXIT_FINE


def _check(options: argparse.Namespace) -> None:
    """Before any run is started: a gate of NaN would let everything pass."""
    for name in ("max_loss_error", "max_held_out_error", "max_slowdown"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be 0 or more")
    if options.warmup < 0:
        raise UsageError(f"--warmup {options.warmup}: must be 0 or more")
    if options.html is not None:
        pages.check("--html", options.html)


def figures(folder: Path) -> RunFigures:
    """A run's figures from its ledger, and from its TensorBoard files where there are any.

    Raises:
        UsageError: no readable ledger there.
    """
    nested = folder / "stability"
    view = read(nested if not (folder / FILE).exists() and (nested / FILE).exists() else folder)
    held_out, seconds = _from_tensorboard(folder / "tensorboard")
    return RunFigures.from_ledger(str(folder), view, held_out, seconds)


def sentence(result: dict[str, Any]) -> str:
    """The outcome with its tolerance and tokens seen, for people."""
    band = result["noise"]
    noise = f"; noise between BF16 seeds {float(band['mean']):+.4%}" if band else "; no noise band (--noise)"
    more = [
        f"{label} {value:{form}}" if value is not None else f"{label} not measured"
        for label, value, form in (
            ("held-out error", result["held_out_error"], "+.4%"),
            ("time a step over the control's", result["slowdown"], ".2f"),
        )
    ]
    return (
        f"{result['steps']} steps, {result['tokens']:,.0f} tokens, FP8 in {result['fp8_share']:.0%} of linears: "
        f"relative loss error after step {result['warmup']} {float(result['loss_error_mean']):+.4%} in the mean, "
        f"{float(result['loss_error_largest']):+.4%} at most (limit {result['loss_error_limit']:.4%}){noise}; "
        + ", ".join(more)
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability compare",
        description="An FP8 run against its BF16 control: relative loss error and a gate.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of the FP8 run and the BF16 control")
    parser.add_argument("--noise", type=Path, metavar="RUN", help="a BF16 run with another seed: the noise band")
    parser.add_argument("--warmup", type=int, default=100, metavar="STEPS", help="left out of the gate (%(default)s)")
    parser.add_argument("--max-loss-error", type=float, default=0.0025, metavar="SHARE", help="gate (%(default)s)")
    parser.add_argument("--max-held-out-error", type=float, default=0.0025, metavar="SHARE", help="gate (%(default)s)")
    parser.add_argument("--max-slowdown", type=float, metavar="RATIO", help="gate on seconds a step; default: none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write plots; needs [report]")
    start = parser.add_argument_group("start the runs", "with pretrain's flags after --")
    start.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs")
    start.add_argument("--emulate", choices=("delayed", "current", "block", "mxfp8"), default="current")
    start.add_argument("--fp8-flags", default="", metavar="FLAGS", help="further flags of the FP8 run, in one word")
    start.add_argument("--noise-seed", type=int, metavar="SEED", help="start a second BF16 run with this seed")
    start.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks of each run")
    start.add_argument("--cpu", action="store_true", help="on CPUs")
    return parser


def _start(options: argparse.Namespace, flags: Sequence[str]) -> list[Path]:
    """Train control, FP8 and, if asked, a second seed; their folders in the order FP8, control, noise."""
    out: Path = options.out.absolute()
    jobs = {
        "bf16": [],
        "fp8": ["--stability-fp8-emulate", options.emulate, *options.fp8_flags.split()],
        **({"noise": ["--seed", str(options.noise_seed)]} if options.noise_seed is not None else {}),
    }
    for name, more in jobs.items():
        folder = out / name
        if (folder / FILE).exists():
            raise UsageError(f"--out {options.out}: {folder} holds a run already; give an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megatron_stability.cli", "pretrain", "--nproc", str(options.nproc)]
        command += ["--cpu"] if options.cpu else []
        command += [*flags, "--spec", "megatron_stability", "--stability-record-dir", str(folder)]
        command += ["--tensorboard-dir", str(folder / "tensorboard"), *more]
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if code != EXIT_FINE:
            raise UsageError(f"the {name} run ended with exit code {code}; its log is {folder / 'log.txt'}")
    return [out / name for name in ("fp8", "bf16", "noise") if name in jobs]


def _from_tensorboard(folder: Path) -> tuple[float | None, float | None]:
    """(last held-out loss, median seconds a step), None where the files don't hold it."""
    if not folder.is_dir():
        return None, None
    from statistics import median

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    held_out = events.Scalars("lm loss validation")[-1].value if "lm loss validation" in tags else None
    seconds = [point.value for point in events.Scalars("iteration-time")] if "iteration-time" in tags else []
    return held_out, median(seconds) if seconds else None
