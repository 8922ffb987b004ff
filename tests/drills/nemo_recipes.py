"""Every recipe of examples/nemo trains in small on a CPU, on several layouts; a killed run resumes to the bit.

    PYTHONPATH=.:.nemo python -m tests.drills.nemo_recipes [--only NAME ...] [--out docs/drills/nemo_recipes.json]

Each run is 20 steps of `megatron-stability nemo` on Megatron's synthetic data. `resume`: a run saves at step 5 and is
killed by SIGKILL, another goes on from there; its losses and gradient norms are the uninterrupted run's, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import PLUGIN, Results
from megatron_stability.checkpoints import generations, manifest
from megatron_stability.megatron.start.ranks import Ranks
from megatron_stability.nemo import launch
from megatron_stability.nemo.pretrain import Job
from tests.e2e import artifacts

EXAMPLES = Path(__file__).parents[2] / "examples" / "nemo"
OUT = Path(__file__).parents[2] / "docs" / "drills" / "nemo_recipes.json"
SHARDED = ("optimizer.use_distributed_optimizer=true", "ddp.use_distributed_optimizer=true")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tiny_cpu-tp2": (2, ("model.tensor_model_parallel_size=2",)),
    "tiny_cpu-pp2": (2, ("model.pipeline_model_parallel_size=2", "model.pipeline_dtype=torch.float32")),
    "tiny_cpu-dp2-sharded": (2, SHARDED),
    "tiny_cpu-muon": (1, ("optimizer.optimizer=muon", "optimizer.lr=1e-2")),
}
TAGS = ("lm loss", "grad-norm", "learning-rate")


def run(file: Path, words: Sequence[str], world: int, folder: Path, scale_down: bool) -> dict[str, Any]:
    """One run in forked ranks of this process, which has Bridge imported."""
    own = (f"logger.tensorboard_dir={folder}", f"stability.record.dir={folder / 'stability'}")
    began = time.monotonic()
    with Ranks(world, fork=True) as ranks:
        code = ranks.run(launch._rank_main, Job(file, (*words, *own), scale_down, cpu=True))
    seen = artifacts.scalars(folder) if any(folder.glob("events*")) else {}
    losses = [value for _, value in seen.get("lm loss", [])]
    return {
        "ranks": world,
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "steps": len(losses),
        "first_loss": round(losses[0], 4) if losses else None,
        "last_loss": round(losses[-1], 4) if losses else None,
        "passed": code == 0 and len(losses) == 20 and losses[-1] < losses[0] - 0.5,
    }


def kill_once(marker: Path, done: threading.Event) -> None:
    """SIGKILL every rank, and what it started, once a file is there."""
    while not done.is_set():
        if marker.is_file():
            for child in psutil.Process().children(recursive=True):
                if child.name() != "resource_tracker":
                    child.kill()
            return
        time.sleep(0.01)


def resume(folder: Path) -> dict[str, Any]:
    """Uninterrupted, killed, resumed: the steps after the save, compared bit for bit."""
    file = EXAMPLES / "tiny_cpu.yaml"
    save = ("checkpoint.save_interval=5", f"checkpoint.save={folder / 'killed'}")
    whole = run(file, ("checkpoint.save_interval=5", f"checkpoint.save={folder / 'whole'}"), 1, folder / "a", False)
    done = threading.Event()
    marker = generations.folder_of(folder / "killed", 5) / manifest.MARKER
    watch = threading.Thread(target=kill_once, args=(marker, done))
    watch.start()
    killed = run(file, save, 1, folder / "b", False)
    done.set()
    watch.join()
    resumed = run(file, (*save, f"checkpoint.load={folder / 'killed'}"), 1, folder / "c", False)
    one, other = artifacts.scalars(folder / "a"), artifacts.scalars(folder / "c")
    steps = [step for step, _ in other["lm loss"]]
    same = all([row for row in one[tag] if row[0] in steps] == other[tag] for tag in TAGS)
    return {
        "codes": [whole["code"], killed["code"], resumed["code"]],
        "resumed_steps": steps,
        "bit_equal": same,
        "passed": whole["passed"] and killed["code"] == 137 and resumed["code"] == 0 and steps[-1:] == [20] and same,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill; 0 if every part passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(argv)
    if "megatron.bridge" not in sys.modules:
        Job(EXAMPLES / "tiny_cpu.yaml", (), cpu=True).prepare()
    results = Results(options.out, (*PLUGIN, "examples", "tests/drills/nemo_recipes.py"))
    recipes = {file.stem: (file, 1, ()) for file in sorted(EXAMPLES.glob("*.yaml"))}
    tiny = {name: (EXAMPLES / "tiny_cpu.yaml", world, words) for name, (world, words) in LAYOUTS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (file, world, words) in (recipes | tiny).items():
            if (not options.only or name in options.only) and name not in results.rows:
                results.put(name, run(file, words, world, Path(scratch) / name, file.stem != "tiny_cpu"))
                print(name, results.rows[name], flush=True)
        if (not options.only or "resume" in options.only) and "resume" not in results.rows:
            results.put("resume", resume(Path(scratch)))
            print("resume", results.rows["resume"], flush=True)
    return 0 if all(result["passed"] for result in results.rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
