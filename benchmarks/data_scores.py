"""Speed of the data guard's scores: against the same formulas in plain Python, and of a whole audit with its memory.

    python benchmarks/data_scores.py            # the (8, 4096) batch, ratios
    python benchmarks/data_scores.py --audit 1e9 --folder /tmp   # a synthetic map of so many tokens

The plain scorer loops over tokens, a document at a time, with dictionaries and sets: what one writes from the formulas.
Both score the same BPE-like ids (Zipf, V = 50,000), and the benchmark ends with an error where they differ.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from megatron_stability.data.byte_classes import CLASSES, ByteClasses, of_table
from megatron_stability.data.scores import Counts, Model, score

V = 50_000
PLAIN = ("repeated_4", "repeated_8", "entropy", "unique", "run", "unigram", "control", "digits", "digit_run", "markup",
         "symbols", "word", "kinds")  # fmt: skip


def plain(ids: list[int], classes: ByteClasses, model: Model) -> dict[str, float]:
    """Scores of one document, token by token."""
    n, counts = len(ids), Counter(ids)
    found = {}
    for size in (4, 8):
        seen, again = set(), 0
        for at in range(n - size + 1):
            gram = tuple(ids[at : at + size])
            again += gram in seen
            seen.add(gram)
        found[f"repeated_{size}"] = again / max(n - size + 1, 1)
    found["entropy"] = -sum(c / n * math.log(c / n) for c in counts.values()) / math.log(min(n, V))
    found["unique"] = len(counts) / math.sqrt(n)
    run = longest = word = longest_word = digits = longest_digits = 0
    sums = dict.fromkeys(CLASSES, 0)
    kinds, before, surprise = 0, None, 0.0
    for token in ids:
        run = run + 1 if token == before else 1
        longest, before = max(longest, run), token
        surprise += float(model.unigram[token])
        row = classes.counts[token].tolist()
        for name, value in zip(CLASSES, row, strict=True):
            sums[name] += value
        kinds |= int(classes.kinds[token])
        word = 0 if classes.has_space[token] or classes.high[token] else word + row[0]
        digits = digits + row[0] if classes.all_digits[token] else 0
        longest_word, longest_digits = max(longest_word, word), max(longest_digits, digits)
    size = max(sums["bytes"], 1)
    found |= {"run": longest, "unigram": surprise / n, "word": longest_word, "digit_run": longest_digits}
    found |= {name: sums[name] / size for name in ("digits", "markup", "symbols")}
    return found | {"control": (sums["control"] + 3 * sums["replacement"]) / size, "kinds": kinds.bit_count()}


def corpus(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Ids of a distribution like a tokenizer's."""
    return np.minimum(rng.zipf(1.3, tokens), V - 1).astype(np.int32)


def table(rng: np.random.Generator) -> ByteClasses:
    """Bytes for each id."""
    letters = np.frombuffer(b"etaoinshrdlucmfw 0123456789.,;<>", np.uint8)
    return of_table([bytes(rng.choice(letters, rng.integers(1, 8))) for _ in range(V)])


def ratio() -> None:
    """Of an (8, 4096) batch."""
    rng = np.random.default_rng(0)
    classes, ids = table(rng), corpus(8 * 4096, rng)
    starts = np.arange(0, len(ids) + 1, 4096)
    counts = Counts(V, classes)
    counts.add(ids, starts)
    model = counts.model()
    score(ids, starts, classes, model)
    ours = min(_seconds(lambda: score(ids, starts, classes, model)) for _ in range(20))
    rows = [ids[a : a + 4096].tolist() for a in starts[:-1]]
    theirs = min(_seconds(lambda: [plain(row, classes, model) for row in rows]) for _ in range(3))
    found = score(ids, starts, classes, model)
    for at, row in enumerate(rows):
        for name, value in plain(row, classes, model).items():
            if not math.isclose(found[name][at], value, rel_tol=1e-5, abs_tol=1e-9):
                sys.exit(f"{name} of row {at}: {found[name][at]} and {value}")
    print(f"(8, 4096): {1e3 * ours:.2f} ms, {len(ids) / ours / 1e6:.1f} M tokens/s a core")
    print(
        f"plain: {1e3 * theirs:.0f} ms for {len(PLAIN)} of the {len(found)} scores, {theirs / ours:.0f} times as long"
    )


def _seconds(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def audit(tokens: int, folder: Path, workers: int) -> None:
    """Of a map of so many tokens; the tokens are one stretch, written again and again, in documents of 1000."""
    rng = np.random.default_rng(1)
    prefix = folder / "synthetic"
    step = 1 << 24
    stretch = corpus(step, rng).astype(np.uint16)
    documents = tokens // 1000
    with open(f"{prefix}.bin", "wb") as stream:
        for at in range(0, documents * 1000, step):
            np.roll(stretch, at)[: documents * 1000 - at].tofile(stream)
    import struct

    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        np.full(documents, 1000, np.int32).tofile(stream)
        (np.arange(documents, dtype=np.int64) * 2000).tofile(stream)
        np.arange(documents + 1, dtype=np.int64).tofile(stream)
    out = folder / f"audit-{tokens}"
    command = [sys.executable, "-m", "megatron_stability", "audit-data", str(prefix), "--output", str(out),
               "--overwrite", "--workers", str(workers), "--json", "--fail-over", "0.999"]  # fmt: skip
    begin = time.perf_counter()
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    seconds = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak, busy = used.ru_maxrss / 1024, used.ru_utime + used.ru_stime
    print(f"{tokens:.0e} tokens: {seconds:.1f} s, {tokens / seconds / 1e6:.1f} M tokens/s with {workers} processes, "
          f"{busy:.1f} s of all cores so far, largest process {peak:.0f} MiB, exit code {code}")  # fmt: skip
    Path(f"{prefix}.bin").unlink()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audit", type=float, nargs="+", default=())
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if not args.audit:
        ratio()
    for tokens in args.audit:
        audit(int(tokens), args.folder, args.workers)


if __name__ == "__main__":
    main()
