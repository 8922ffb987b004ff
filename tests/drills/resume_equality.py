"""A resumed run is the uninterrupted run: to the bit on the same ranks, on other ranks the same samples and the loss.

    python -m tests.drills.resume_equality [--only CASE ...] [--out docs/drills/resume_equality.json]

One run trains to its end and saves in the middle and at the end. Another resumes from the middle in a folder of its
own, and is compared with the first: every sequence that each rank was given, every ledger line after the middle (loss,
gradient norm, learning rate, samples), and every entry of the last checkpoint (weights, moments, scheduler, Megatron's
and every rank's generators, detector state). On other ranks: samples of each step, and the loss within `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import PLUGIN, Results
from megatron_stability.checkpoints import drill, generations
from megatron_stability.detect.growth import Throughput
from megatron_stability.ledger import entries, ledger
from tests.dist.pool import Pool
from tests.drills import resume_runs
from tests.drills.resume_runs import ASYNC, Seen
from tests.e2e import artifacts, jobs

TOLERANCE = 0.01  # of the loss of a step after a resume on other ranks, relative; dropout is off there
RERUN = ("rerun_state_machine_state", "rerun_state_machine")  # Megatron's rerun machine counts its own calls
COUNTED = ("num_floating_point_operations_so_far",)
STEPS = 6
SEQUENCE, BYTES_PER_TOKEN = 64, 2  # of jobs.MODEL and resume_runs.make_data

DP2 = ("--use-distributed-optimizer",)
TP2_PP2 = (*jobs.TP2, *jobs.PP2)
MUON = ("--optimizer", "muon")
EP2 = (*jobs.MOE, "--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2", *DP2)
CYCLIC = ("--dataloader-type", "cyclic")
OF_THE_RUN = (*Throughput.requires, "ranks/weights")  # seconds; and a digest is where a save is planned
ENTRY = "megatron_stability"  # its entry in a checkpoint
RAMP = (  # thresholds in tokens of 64 a sample; both releases ignore the older --rampup-batch-size
    *("--step-batch-size-schedule", "0:4 768:8 1792:12", "--train-samples", "52"),
    *("--lr-warmup-iters", "0", "--lr-warmup-samples", "8", "--lr-decay-samples", "52"),
)
TAU = ("--stability-qk-clip-tau", "0.1")  # below the logits of a fresh model, so that it clips
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: how the first run runs and, where `other` is given, on what layout (flags, ranks) the second does."""

    flags: tuple[str, ...]
    world: int = 2
    data: str = "mock"
    middle: int = STEPS // 2
    steps: int = STEPS
    other: tuple[tuple[str, ...], int] | None = None
    mode: str = "act"
    unequal: tuple[str, ...] = ()  # entries (by their ends) and signals that may differ: Limits in docs/checkpoints.md
    readable: bool = True  # whether `artifacts` reads the format; if not, ledger and samples decide
    release: str = "0.19.2"


CASES = {
    "TP2 × PP2": Case(flags=TP2_PP2, world=4),
    "DP2, distributed optimizer": Case(flags=DP2),
    "DP2, distributed optimizer, overlapped": Case(flags=(*DP2, "--overlap-grad-reduce", "--overlap-param-gather")),
    "VPP2": Case(flags=jobs.VPP2),
    "Muon, TP2": Case(flags=(*jobs.TP2, *MUON)),
    "Muon, DP2": Case(flags=MUON),
    "MoE, EP2": Case(flags=EP2),
    "async save, DP2": Case(flags=(*DP2, *ASYNC)),
    "mid-epoch, three epochs": Case(flags=DP2, data="documents", steps=9, middle=4),
    "mid-epoch, three epochs, cyclic": Case(
        flags=(*DP2, *CYCLIC), data="documents", steps=9, middle=4, unequal=("generators.torch", "torch_rng_state")
    ),
    "blended data, two loader workers": Case(flags=(*DP2, "--num-workers", "2"), data="blend"),
    "batch-size ramp-up": Case(flags=(*DP2, *RAMP), steps=7, middle=4),
    "FP8, emulated, delayed scaling": Case(
        flags=(*DP2, "--stability-fp8-emulate", "delayed"), unequal=("fp8/scale_age",)
    ),
    "QK-clip, Muon, TP2": Case(flags=(*jobs.TP2, *MUON, "--stability-qk-clip-enabled", "true", *TAU)),
    "legacy torch format, TP2": Case(flags=(*jobs.TP2, "--ckpt-format", "torch"), readable=False),
    "fp16": Case(flags=(*DP2, "--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "2"), mode="observe"),
    "0.18.2: TP2 × PP2": Case(flags=TP2_PP2, world=4, release="0.18.2"),
    "0.18.2: DP2, distributed optimizer": Case(flags=DP2, release="0.18.2"),
    "0.18.2: MoE, EP2": Case(flags=EP2, release="0.18.2"),
    "0.18.2: async save, DP2": Case(flags=(*DP2, *ASYNC), release="0.18.2"),
    "DP2 to DP1": Case(flags=(*DP2, *NO_DROPOUT), data="documents", other=(DP2, 1)),
    "TP2 to DP2": Case(flags=(*jobs.TP2, *NO_DROPOUT), data="documents", other=((), 2)),
    "PP2 to TP2": Case(flags=(*jobs.PP2, *NO_DROPOUT), data="documents", other=(jobs.TP2, 2)),
}


def run(pool: Pool, case: Case, folder: Path) -> dict[str, Any]:
    """Both runs of a case, and what was found.

    Args:
        pool: ranks with the case's release, patched.
        case: which.
        folder: empty.

    Returns:
        JSON primitives; "findings" is empty where the case holds.
    """
    data = folder / "data"
    data.mkdir()
    if case.data != "mock":
        pool.run(resume_runs.make_data, str(data), world=1)
    straight, resumed = folder / "straight", folder / "resumed"
    length = () if "--train-samples" in case.flags else ("--train-iters", str(case.steps))
    common = (*length, *resume_runs.data_flags(case.data, data), "--stability-mode", case.mode)
    saves = ("--save-interval", str(case.middle), "--save", str(straight))
    first = _train(pool, case, (*case.flags, *common, *saves), case.world)
    drill.link_copy(generations.folder_of(straight, case.middle), generations.folder_of(resumed, case.middle))
    generations.write_tracker(resumed, case.middle)
    flags, world = (case.flags, case.world) if case.other is None else ((*NO_DROPOUT, *case.other[0]), case.other[1])
    again = ("--load", str(resumed), "--save", str(resumed))
    second = _train(pool, case, (*flags, *common, *again), world)
    ledgers = [ledger.read(root / "stability") for root in (straight, resumed)]
    steps = [[step for step in view.surviving if step.step > case.middle] for view in ledgers]
    samples = [
        {step: found for step, found in resume_runs.by_step(seen).items() if step > case.middle}
        for seen in (first, second)
    ]
    result: dict[str, Any] = {
        "steps": f"{case.middle} to {case.steps}",
        "samples": sum(step.samples for step in steps[0]),
        "epochs": _epochs(case.data, data, steps[0][-1].last_sample),
    }
    findings = [] if samples[0] == samples[1] != {} else ["other samples"]
    if [step.step for step in steps[1]] != list(range(case.middle + 1, case.steps + 1)):
        findings.append(f"ledger steps {[step.step for step in steps[1]]}")
    if case.other is None:
        findings += _order(case, first, second) + _lines(case, *steps)
    if case.other is None and case.readable:
        states = [_state(pool, root, case.steps) for root in (straight, resumed)]
        unequal = artifacts.differences(*states, excluded=COUNTED)
        different = [name for name in unequal if not name.endswith(case.unequal or ("\0",))]
        findings += different[:5]
        result |= {"entries": len(states[0]), "different": len(different)}
    elif case.other is not None:
        worst = max(abs(one.loss / two.loss - 1) for one, two in zip(*steps, strict=True))
        findings += [f"loss {worst:.2g} apart"] if worst > TOLERANCE else []
        result |= {"loss_apart": worst, "ranks": [case.world, world]}
    return result | {"findings": findings}


def _epochs(kind: str, data: Path, samples: int) -> float | None:
    """Epochs that so many samples are; None with mock data."""
    files = sorted(data.glob("*.bin"))[: len(resume_runs.DATA[kind])]
    tokens = sum(file.stat().st_size for file in files) / BYTES_PER_TOKEN
    return round(samples * SEQUENCE / tokens, 2) if tokens else None


def _train(pool: Pool, case: Case, flags: tuple[str, ...], world: int) -> list[Seen]:
    seen: list[Seen] = pool.run(resume_runs.train, flags, world=world, timeout=240)
    assert [one.code for one in seen] == [0] * world, flags
    return seen


def _order(case: Case, first: list[Seen], second: list[Seen]) -> list[str]:
    """Each rank's own sequences in their order."""
    later = [[sample for sample in seen.samples if sample[0] > case.middle] for seen in first]
    return [] if later == [seen.samples for seen in second] else ["samples of a rank in another order"]


def _lines(case: Case, first: list[Any], second: list[Any]) -> list[str]:
    """Which fields of ledger lines after the middle differ, generation, time and `OF_THE_RUN` aside."""
    found = []
    for one, two in zip(first, second, strict=False):
        pair = [entries.strict(step.model_dump(exclude={"generation", "time"})) for step in (one, two)]
        flat = [fields | fields.pop("signals") for fields in pair]
        names = sorted(name for name in flat[0] | flat[1] if flat[0].get(name) != flat[1].get(name))
        names = [name for name in names if name not in (*case.unequal, *OF_THE_RUN)]
        found += [f"ledger line of step {one.step}: {', '.join(names)}"] if names else []
    return found


def _state(pool: Pool, root: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = artifacts.unpack(pool.run(_read, root, step, world=1, timeout=60)[0])
    own = json.loads(state[ENTRY])
    del own["detectors"][Throughput.name]  # of wall time
    return state | {ENTRY: json.dumps(own)}


def _read(context: Any, root: Path, step: int) -> bytes:
    return artifacts.pack(artifacts.checkpoint(root, step, excluded=RERUN))


def main() -> int:
    """Every case, or those named; a table, and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="CASE", choices=list(CASES), help="names of CASES")
    parser.add_argument("--out", type=Path, default=Path("docs/drills/resume_equality.json"))
    options = parser.parse_args()
    sources = (*PLUGIN, "tests/e2e", "tests/drills/resume_equality.py", "tests/drills/resume_runs.py")
    known = Results(options.out, sources)
    pools = {"0.19.2": Pool(jobs.patched), "0.18.2": Pool(jobs.older_patched)}
    failed = 0
    try:
        for name in options.only or CASES:
            if known.rows.get(name, {}).get("findings") == []:
                continue
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    result = run(pools[CASES[name].release], CASES[name], Path(folder))
                except Exception as error:  # a case that cannot run is a finding, not the end
                    result = {"findings": [f"{type(error).__name__}: {error}"[:2000]]}
            failed += bool(result["findings"])
            print(f"{time.monotonic() - began:5.1f} s  {name}: {result}", flush=True)
            known.put(name, result)
    finally:
        for pool in pools.values():
            pool.close()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
