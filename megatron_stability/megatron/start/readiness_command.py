"""`megatron-stability fp8-readiness`: its flags, which need neither torch nor ModelOpt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_stability.errors import UsageError
from megatron_stability.megatron.start.parser import OneSentenceParser


def run(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: its own flags, and Megatron's for the model, the checkpoint and the data.

    Returns:
        0.

    Raises:
        UsageError: the flags, the checkpoint or its values are unusable.
    """
    parser = OneSentenceParser(
        prog="megatron-stability fp8-readiness",
        allow_abbrev=False,
        description="Whether a checkpoint's linears would bear FP8 (E4M3), by NVIDIA ModelOpt's calibrators and our "
        "own statistics, and which to keep in BF16. One process; any layout of a torch_dist checkpoint is read.",
        epilog="All other flags are Megatron's. Example: megatron-stability fp8-readiness --cpu --load CKPT "
        "--data-path data/docs --split 90,10,0 --num-layers 4 ... (the model's flags, as for pretrain)",
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU backend")
    parser.add_argument("--forwards", type=int, default=8, metavar="N", help="global batches of the validation set")
    parser.add_argument("--percentile", type=float, default=99.99, help="of the histogram calibrator, in [0, 100]")
    parser.add_argument("--recipe", choices=("current", "block", "mxfp8"), default="current")
    parser.add_argument("--keep", type=int, default=4, metavar="N", help="how many layers to name for BF16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    options, rest = parser.parse_known_args(list(argv))
    if options.forwards < 1 or not 0 <= options.percentile <= 100:
        raise UsageError("--forwards must be at least 1, and --percentile within 0 and 100")
    if not any(flag.split("=")[0] in ("--load", "--pretrained-checkpoint") for flag in rest):
        raise UsageError("fp8-readiness needs --load CHECKPOINT: at initial values every model is ready")
    import modelopt  # noqa: F401  # before Megatron's seconds, so that its absence is told at once

    from megatron_stability.megatron.start import fp8_readiness

    return fp8_readiness.judge(options, rest)
