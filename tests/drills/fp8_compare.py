"""What the gate of `compare` says of healthy and of broken FP8, with the quickstart's model and text.

    python -m tests.drills.fp8_compare run --folder DIR --seed 1        once for each of three seeds or more
    python -m tests.drills.fp8_compare judge --folder DIR --out docs/drills/fp8_compare.json --figure docs/fp8.svg

One rank, 320 steps of 4 sequences, emulated delayed scaling: as Transformer Engine has it ("healthy"), with a margin of
8, and with E4M3 gradients at a margin of 12, whose largest code is 0.11. The next seed's BF16 run is the noise band.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from megatron_stability.megatron import cpu, quickstart
from megatron_stability.megatron.prepare_data import prepare
from tests.dist.pool import Context, Pool
from tests.e2e import jobs

STEPS = 320
DELAYED = (
    *("--stability-fp8-emulate", "delayed", "--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max"),
    *("--stability-fp8-sample-every", "25"),
)
ARMS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "healthy": DELAYED,
    "margin 8": (*DELAYED, "--fp8-margin", "8"),
    "E4M3 gradients, tiny scale": (*DELAYED, "--stability-fp8-format", "e4m3", "--fp8-margin", "12"),
}
COMMON = (
    *("--bf16", "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
    *("--global-batch-size", "4", "--train-iters", str(STEPS)),
    *("--split", "95,5,0", "--eval-iters", "20", "--eval-interval", str(STEPS)),
    *("--log-interval", "100", "--spec", "megatron_stability", "--stability-mode", "observe"),
    *("--stability-observe-sketch-every", "25"),
)


def train(context: Context, flags: tuple[str, ...]) -> int:
    """One run; its exit code."""
    from megatron_stability.megatron import pretrain, seams

    sys.argv = ["megatron-stability pretrain", *cpu.FLAGS, *flags]
    try:
        pretrain.main()
    except SystemExit as ending:
        return int(ending.code or 0)
    finally:
        seams.uninstall()
    return 0


def folder_of(root: Path, seed: int, arm: str) -> Path:
    """Of one run."""
    return root / f"seed{seed}" / arm.replace(" ", "-").replace(",", "")


def run(options: argparse.Namespace) -> None:
    """Train a seed's arms."""
    root: Path = options.folder
    text = prepare([sysconfig.get_paths()["stdlib"]], root / "data" / "stdlib", quickstart.text_options())
    pool = Pool(jobs.patched)
    try:
        for arm, flags in ARMS.items():
            folder = folder_of(root, options.seed, arm)
            if (folder / "done").exists() or (options.arms and arm not in options.arms):
                continue
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
            more = ("--seed", str(options.seed), "--stability-record-dir", str(folder))
            more += (
                "--tensorboard-dir",
                str(folder / "tensorboard"),
                "--data-cache-path",
                str(root / "data" / "cache"),
            )
            began = time.monotonic()
            (code,) = pool.run(
                train, (*quickstart.MODEL, *text.training_flags, *COMMON, *more, *flags), world=1, timeout=400
            )
            if code == 0:
                (folder / "done").touch()
            print(f"seed {options.seed} {arm}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        pool.close()


def main() -> None:
    """Run a part, or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("run")
    part.add_argument("--folder", type=Path, required=True)
    part.add_argument("--seed", type=int, required=True)
    part.add_argument("--arms", nargs="*", choices=ARMS)
    part.set_defaults(call=run)
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.call(options)


if __name__ == "__main__":
    main()
