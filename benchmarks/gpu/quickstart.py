"""The quickstart's model and faults on one CUDA device, through the same command without `--cpu`.

    python -m benchmarks.gpu.quickstart --out DIR

Prints what was decided and exits 1 unless exactly the three faulty steps were skipped and the loss stayed finite.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.step_overhead import GPU_FLAGS
from megatron_stability.megatron.start import quickstart
from megatron_stability.megatron.start.prepare_data import prepare
from megatron_stability.report.runview import RunView


def main() -> int:
    """Train, read the ledger, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    text = prepare([sysconfig.get_paths()["stdlib"]], out / "stdlib", quickstart.text_options())
    faults = [*(f"scale:step={step},factor=50" for step in quickstart.HARD_BATCHES)]
    faults.append(f"nan:step={quickstart.NAN_STEP},rank=0")
    command = [
        sys.executable,
        "-m",
        "megatron_stability.cli",
        "pretrain",
        "--nproc",
        "1",
        *GPU_FLAGS,
        *quickstart.MODEL,
    ]
    command += ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", *text.training_flags]
    command += ["--spec", "megatron_stability", "--stability-record-dir", str(out / "run")]
    command += [word for fault in faults for word in ("--drill-fault", fault)]
    code = subprocess.run(command, check=False).returncode
    run = RunView.from_ledger(out / "run", "cuda")
    expected = {*quickstart.HARD_BATCHES, quickstart.NAN_STEP}
    print(
        f"exit code {code}, {len(run.steps)} steps, skipped {sorted(run.withheld)}, "
        f"loss {run.loss[0]:.3f} to {run.loss[-1]:.3f}"
    )
    return 0 if code == 0 and set(run.withheld) == expected and math.isfinite(run.loss[-1]) else 1


if __name__ == "__main__":
    sys.exit(main())
