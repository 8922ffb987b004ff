"""`megatron-stability compare FP8_RUN BF16_RUN`, or `compare --out DIR -- FLAGS`, which starts the runs first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.fp8_compare import start
from megatron_stability.fp8_compare.criteria import compare
from megatron_stability.fp8_compare.figures import RunFigures
from megatron_stability.fp8_compare.gates import OPTIONAL, WARMUP, Gates, warmup_of
from megatron_stability.fp8_compare.table import table
from megatron_stability.ledger import sketches
from megatron_stability.ledger.entries import FILE, read
from megatron_stability.report import pages

EPILOG = """Examples:
  megatron-stability compare runs/fp8 runs/bf16 --noise runs/bf16-seed2 --html compare.html
  megatron-stability compare --out compare --emulate delayed --nproc 2 --cpu -- --num-layers 4 ... (pretrain's flags)
  megatron-stability compare --out compare --emulate delayed -- nemo RECIPE.yaml --scale-down key=value
The last line is the verdict, with the number of gates judged: PASS or FAIL. A figure that a run can give and did not
is a failure. Exit codes: 0 every gate passed, 1 one did not, 2 the runs can't be compared."""
_GATES = Gates()


def run(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: see `--help`.

    Returns:
        0 where every gate passed, 1 otherwise.
    """
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options, flags = _parser().parse_args(words[:at]), words[at + 1 :]
    gates = _check(options, flags, started="--" in words)
    if options.out is not None:
        folders = start.runs(options, flags)
    else:
        folders = [*options.runs, *([options.noise] if options.noise else [])]
    fp8, control, *more = map(figures, folders)
    noise = more[0] if more else None
    warmup = warmup_of(min(len(run.steps) for run in (fp8, control))) if options.warmup is None else options.warmup
    result = compare(fp8, control, noise, warmup, gates)
    if options.json is not None:
        pages.replace("--json", options.json, json.dumps(result, indent=1, allow_nan=False) + "\n")
    if options.html is not None:
        from megatron_stability.fp8_compare.plots import write

        write(result, [fp8, control, *([noise] if noise else [])], options.html)
    print(table(result))
    return EXIT_FINDING if result["findings"] else EXIT_FINE


def _check(options: argparse.Namespace, flags: Sequence[str], started: bool) -> Gates:
    """Before any run is started: a gate of NaN would let everything pass, a file that can't be written costs hours."""
    for name in ("max_loss_error", "max_held_out_error", "max_slowdown", "max_underflow", "max_saturation"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be 0 or more")
    if not -1 <= options.min_cosine <= 1:
        raise UsageError(f"--min-cosine {options.min_cosine:g}: must be from -1 to 1")
    if not abs(options.min_binades) < float("inf"):
        raise UsageError(f"--min-binades {options.min_binades:g}: must be a number")
    if options.warmup is not None and options.warmup < 0:
        raise UsageError(f"--warmup {options.warmup}: must be 0 or more")
    if options.window < 1:
        raise UsageError(f"--window {options.window}: must be 1 or more")
    if options.html is not None:
        pages.check("--html", options.html)
    if options.json is not None:
        if options.json.suffix.lower() != ".json" or options.json.is_dir():
            raise UsageError(f"--json {options.json}: the name of the figures' file ends in .json; give another")
        pages.check_place("--json", options.json)
    if options.out is not None:
        start.check(options, flags)
    elif len(options.runs) != 2 or started:
        raise UsageError(
            "compare needs two run folders, FP8 first, or --out DIR -- and pretrain's flags or nemo RECIPE"
        )
    else:
        start.refuse_without_out(options)
    limits = {
        "cosine": options.min_cosine,
        "binades": options.min_binades,
        "underflow": options.max_underflow,
        "saturation": options.max_saturation,
        "held-out": options.max_held_out_error,
    }
    limits |= dict.fromkeys(options.without, None)
    limits["held_out_error"] = limits.pop("held-out")
    return Gates(loss_error=options.max_loss_error, window=options.window, slowdown=options.max_slowdown, **limits)


def figures(folder: Path) -> RunFigures:
    """A run's figures from its ledger and sketches, and from its TensorBoard files where there are any.

    Args:
        folder: of the ledger, or the folder that holds it as `stability`.

    Raises:
        UsageError: no readable ledger there.
    """
    nested = folder / "stability"
    where = nested if not (folder / FILE).exists() and (nested / FILE).exists() else folder
    held_out, seconds = _from_tensorboard(folder / "tensorboard")
    return RunFigures.from_ledger(str(folder), read(where), held_out, seconds, sketches.read(where))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability compare",
        description="An FP8 run against its BF16 control: loss, gradients, telemetry, held-out loss, speed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of the FP8 run and the BF16 control")
    parser.add_argument("--noise", type=Path, metavar="RUN", help="a BF16 run with another seed: the noise band")
    said = f"left out of the gates ({WARMUP}, or a quarter of a run of fewer than {2 * WARMUP} steps)"
    parser.add_argument("--warmup", type=int, metavar="STEPS", help=said)
    parser.add_argument("--window", type=int, default=_GATES.window, metavar="STEPS", help="of a mean (%(default)s)")
    limit = parser.add_argument_group("gates", "what they mean and why: megatron_stability/fp8_compare/criteria.py")
    for name, default, metavar, what in (
        ("--max-loss-error", _GATES.loss_error, "SHARE", "mean of any window, or what two seeds differ by"),
        ("--max-held-out-error", _GATES.held_out_error, "SHARE", "of the last held-out loss, or the seeds' difference"),
        ("--max-slowdown", None, "RATIO", "seconds a step over the control's; default: none"),
        ("--min-cosine", _GATES.cosine, "COSINE", "of any layer's gradients in step 2"),
        ("--min-binades", _GATES.binades, "BINADES", "for normal values, under delayed scaling"),
        ("--max-underflow", _GATES.underflow, "SHARE", "of a tensor's elements"),
        ("--max-saturation", _GATES.saturation, "SHARE", "of a tensor's elements"),
    ):
        shown = "" if default is None else f" ({default:g})"
        limit.add_argument(name, type=float, default=default, metavar=metavar, help=f"{what}{shown}")
    limit.add_argument(
        "--without", action="append", default=[], choices=OPTIONAL, help="leave a gate out; the verdict names it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write plots; needs [report]")
    start.add_arguments(parser)
    return parser


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
