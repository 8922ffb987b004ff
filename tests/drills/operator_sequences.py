"""What operators do with a `--save` folder, at random, by real starts of a small GPT; and what must come next.

    python -m tests.drills.operator_sequences --out docs/drills/operator_sequences.json

Each sequence is some ten actions on two folders: a start, a requeue, `--ckpt-step`, an edit of the tracker, a start
from the other folder, a fresh start into a used one, a checkpoint deleted or damaged, a start in vain; with and without
retention. A start ends at `--exit-interval`, by SIGTERM with two loader workers, by a halt, or by SIGKILL: in a step,
before the first one, or between two renames of its first record or of a save. Its launcher is the product's own.

After each action the survivors, and at each start the checkpoint loaded (step, and a digest of the weights against that
of its save), are compared with `tests/dist/checkpoint/operators.py` (`Expected`), which imports nothing of the product
and is pinned by outcomes written by hand. A start that is refused must leave every byte; none may leave a process.

The file is written anew after every sequence. Run again on the same commit it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_stability import files
from tests.dist.pool import Pool
from tests.drills.operator_starts import Operators
from tests.e2e import jobs


def head(actions: int) -> dict[str, Any]:
    """What the results are of."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "command": f"python -m tests.drills.operator_sequences --actions {actions}",
        "commit": commit.stdout.strip(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("megatron_stability", "megatron-core", "torch")},
        },
    }


def one(pool: Pool, seed: int, actions: int) -> dict[str, Any]:
    """A sequence's result; a difference, a lost survivor or a hang is `failed`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sequence = Operators(pool, Path(folder), seed)
        result: dict[str, Any] = {"keep": sequence.keep}
        try:
            sequence.run(actions)
        except Exception:  # the drill's finding; the other sequences go on
            result["failed"] = traceback.format_exc()[-3000:]
    return result | {"done": sequence.done, "seconds": round(time.monotonic() - began)}


def totals(sequences: dict[str, Any]) -> dict[str, Any]:
    """How often what was done, and what it came to."""
    done = [each for result in sequences.values() for each in result["done"]]
    return {
        "sequences": len(sequences),
        "failed": sorted(seed for seed, result in sequences.items() if "failed" in result),
        "actions": dict(sorted(Counter(each["action"] for each in done).items())),
        "starts": sum("loaded" in each for each in done),
        "refused, every byte as it was": sum(each.get("refused", False) for each in done),
        "ends": dict(sorted(Counter(each["ended"] for each in done if "ended" in each).items())),
        "with retention": sum(result["keep"] > 0 for result in sequences.values()),
    }


def main() -> int:
    """Sequences until there are enough or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=24, help="seeds 0, 1, ...")
    parser.add_argument("--actions", type=int, default=10, help="in each")
    parser.add_argument("--seconds", type=float, default=3600.0, help="none is begun after so long")
    parser.add_argument("--seed", type=int, action="append", help="these alone, printed and not written")
    parser.add_argument("--out", type=Path, default=Path("docs/drills/operator_sequences.json"))
    options = parser.parse_args()
    told = head(options.actions)
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    goes_on = all(known.get(key) == value for key, value in told.items())
    sequences: dict[str, Any] = known["sequences"] if goes_on and not options.seed else {}
    began, pool = time.monotonic(), Pool(jobs.patched)
    try:
        for seed in options.seed or range(options.sequences):
            if str(seed) in sequences or time.monotonic() - began > options.seconds:
                continue
            sequences[str(seed)] = result = one(pool, seed, options.actions)
            print("sequence", seed, json.dumps(result, indent=1 if "failed" in result else None), flush=True)
            print(result.get("failed", ""), flush=True)
            if not options.seed:
                whole = told | {"totals": totals(sequences), "sequences": sequences}
                files.write_atomically(options.out, (json.dumps(whole, indent=1) + "\n").encode())
    finally:
        pool.close()
    print(json.dumps(totals(sequences), indent=1))
    return 1 if totals(sequences)["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
