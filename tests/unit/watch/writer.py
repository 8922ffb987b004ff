"""A run's rank 0, as far as files go: a ledger and a heartbeat, in a process that tests may stop or kill.

python writer.py FOLDER STEPS SECONDS
"""

import sys
import time
from pathlib import Path

from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.records import Action, Decision, StepRecord
from megatron_stability.watch.heartbeat import Heartbeat

INFO = RunInfo(mode="act", versions={}, layout={"world_size": 1}, settings={"train_iters": 1000})


def step(ledger: Ledger, number: int, action: Action = Action.APPLY, reason: str = "clean", **fields: object) -> None:
    """One line."""
    values = {"loss": 3.0, "grad_norm": 1.0, "learning_rate": 1e-3, "signals": {}} | fields
    record = StepRecord(step=number, first_sample=8 * (number - 1), samples=8, tokens=64.0, **values)
    ledger.write(record, Decision(step=number, action=action, advised=action, reason=reason))


def main(folder: Path, steps: int, seconds: float) -> None:
    """Steps at a pace."""
    with Ledger.open(folder, resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        heart = Heartbeat(folder, rank=0, seconds=0.1, node="node1")
        heart.begin()
        for number in range(1, steps + 1):
            step(ledger, number)
            heart.write(StepRecord(step=number, first_sample=0, samples=8, tokens=1.0, loss=1.0, grad_norm=1.0), None)
            if number == 6:
                print("training", flush=True)
            time.sleep(seconds)
        heart.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
