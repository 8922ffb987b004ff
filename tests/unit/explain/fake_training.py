"""A training command that trains nothing: it writes the ledger that a run with these flags would write.

`--wrong` says what is wrong with it: batch (samples 440 to 448), rate (above 2e-4), or hardware (differs at each run).
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from megatron_stability.ledger.entries import FILE, line_of
from megatron_stability.records import Action
from tests.unit.explain.runs import BATCH, Run, settings, verdict

BAD = 56  # the step, whose samples are 440 to 448


def run(first: int, last: int, wrong: str, rate: float = 3e-4, skipped: str = "", seed: int = 1) -> Run:
    """The steps from `first` to `last`; the same numbers whatever the first is."""

    def change(number: int, fields: dict[str, object]) -> None:
        fields["loss"] = 3.0 + 0.01 * math.sin(number)
        fields["grad_norm"] = 1.0 + 0.01 * math.cos(number)
        if number != BAD:
            return
        if skipped:
            fields |= {"action": Action.SKIP, "fate": "skipped", "parameters": {"passed_over": 1.0}, "loss": math.nan}
        elif (wrong == "batch" and seed == 1) or (wrong == "rate" and rate > 2.5e-4) or wrong.startswith("hardware"):
            noise = float(wrong.partition(":")[2] or 0.0)
            fields |= {"loss": 9.0 + noise, "verdicts": (verdict(number, "loss_delta"),)}

    data = {"data_path": "a", "seed": "1"}
    return Run(steps=last - first + 1, first=first, settings=settings(lr=rate), data=data, world=1, wrong=change)


def write(folder: Path, made: Run) -> None:
    """Its ledger."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(b"".join(line_of(entry) for entry in made.entries()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--exit-interval", type=int, required=True)
    parser.add_argument("--stability-record-dir", type=Path, required=True)
    parser.add_argument("--stability-decide-skip-samples", default="")
    parser.add_argument("--stability-checkpoint-allow-changes", default="")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--min-lr", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--override-opt_param-scheduler", action="store_true")
    parser.add_argument("--wrong", required=True)
    given = parser.parse_args()
    loaded = int((given.load / "latest_checkpointed_iteration.txt").read_text())
    skips = given.stability_decide_skip_samples
    assert skips in ("", f"[[{(BAD - 1) * BATCH},{BAD * BATCH}]]")
    if given.seed != 1:
        assert "seed" in given.stability_checkpoint_allow_changes
    if given.wrong == "hardware":
        given.wrong = f"hardware:{os.getpid() % 97 / 100}"
    if given.wrong == "crash":
        raise SystemExit("no such device")
    write(given.stability_record_dir, run(loaded + 1, given.exit_interval, given.wrong, given.lr, skips, given.seed))
