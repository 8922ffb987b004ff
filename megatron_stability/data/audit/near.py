"""Documents that are nearly like others, by MinHash of their 8-grams of ids; a pass of its own.

rensa keeps the signatures and finds the candidates (locality-sensitive hashing). A document holds about 1.2 KB while
the pass runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_stability import files
from megatron_stability.data.audit.inputs import Task, chunks
from megatron_stability.data.audit.work import Scorer

PERMUTATIONS, BANDS = 128, 16
ALIKE = 0.8  # Jaccard similarity of the sets of n-grams
_NGRAM = 8
_SHINGLES = 256  # of a document at most: those of the smallest hashes


def duplicates(todo: Sequence[Task], scorer: Scorer, folder: Path) -> tuple[float, str]:
    """Look at every document once.

    Args:
        todo: the audit's tasks.
        scorer: with the tokenizer of text.
        folder: takes `near_duplicates.jsonl`, a line a document that an earlier one is like.

    Returns:
        The share of documents that are, and one sentence.
    """
    from rensa import RMinHash, RMinHashLSH

    known = RMinHashLSH(threshold=ALIKE, num_perm=PERMUTATIONS, num_bands=BANDS)
    signatures: list[tuple[str, int, RMinHash]] = []
    lines = []
    for task in todo:
        for chunk in chunks(task, scorer.tokenizer, scorer.key):
            edges = chunk.starts.tolist()
            for row, (first, end) in enumerate(pairwise(edges)):
                signature = RMinHash(num_perm=PERMUTATIONS, seed=1)
                signature.update(_shingles(chunk.ids[first:end]))
                place = task.name, int(chunk.documents[row])
                alike = max(
                    ((signature.jaccard(signatures[each][2]), each) for each in known.query(signature)),
                    default=(0.0, -1),
                )
                if alike[0] >= ALIKE:
                    name, document, _ = signatures[alike[1]]
                    lines.append(
                        {"input": place[0], "document": place[1], "like": [name, document], "jaccard": alike[0]}
                    )
                known.insert(len(signatures), signature)
                signatures.append((*place, signature))
    files.write_atomically(folder / "near_duplicates.jsonl", "".join(map(_line, lines)).encode())
    share = len(lines) / max(len(signatures), 1)
    return share, f"{len(lines)} of {len(signatures)} documents are {ALIKE:.0%} or more like an earlier one"


def _shingles(ids: np.ndarray) -> list[str]:
    if len(ids) < _NGRAM:
        return [ids.tobytes().hex()]
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), _NGRAM)
    weights = np.uint64(6364136223846793005) ** np.arange(_NGRAM, dtype=np.uint64)
    hashes = np.unique((windows * weights).sum(1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return [str(each) for each in hashes[:_SHINGLES].tolist()]


def _line(found: dict[str, object]) -> str:
    return json.dumps(found) + "\n"
