"""Which files of a checkpoint a rank answers for, such that no rank looks at all of them.

At 16,384 ranks a folder holds 50,000 files; were every rank to list it, or to ask for the size of each, that would be a
billion calls to one metadata server. So a rank finds its own files by their names, rank 0 lists the folder once, for
what nobody named, and at a load rank 0 reads the manifest and hands each rank its part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from megatron_stability.checkpoints import manifest
from megatron_stability.checkpoints.manifest import FileEntry

_WRITERS = "__{rank}_{number}.distcp"  # torch's and Megatron's distributed writers


def own_names(folder: Path, rank: int) -> list[str]:
    """What a rank's writer made, and its fingerprints, found without listing the folder.

    Writers number their files from 0. One under another name is rank 0's to find (`left_over`).

    Args:
        folder: the checkpoint's, written by all ranks.
        rank: global.
    """
    numbered = (_WRITERS.format(rank=rank, number=number) for number in itertools.count())
    made = itertools.takewhile(lambda name: (folder / name).is_file(), numbered)
    prints = manifest.fingerprints_name(rank)
    return [*made, *[prints] * (folder / prints).is_file()]


def left_over(folder: Path, claimed: Iterable[str]) -> list[str]:
    """Rank 0: every file of the folder that no rank claimed."""
    known = set(claimed)
    return [name for name in manifest.file_names(folder) if name not in known]


def share(names: Iterable[str], rank: int, world: int) -> list[str]:
    """The files that a rank hashes where every rank has all names, of a partition of `names`.

    Megatron's writers name their files `__RANK_*`: what a rank wrote is still in its host's page cache. Files in
    subfolders (the older format) are spread by their names; the rest is rank 0's, which also wrote it.

    Args:
        names: relative names; the result for one name does not depend on the others.
        rank: of `world`.
        world: number of ranks.

    Returns:
        This rank's names, sorted.
    """
    return sorted(name for name in names if _owner(name) % world == rank)


def _owner(name: str) -> int:
    if "/" in name:
        return xxhash.xxh64_intdigest(name.encode())
    first = name.removeprefix("__").partition("_")[0]
    return int(first) if name.startswith("__") and first.isdecimal() else 0


def parts(entries: Mapping[str, FileEntry], world: int) -> list[dict[str, FileEntry]]:
    """Rank 0: the entries of a manifest by the rank that verifies them, `share` for every rank at once."""
    found: list[dict[str, FileEntry]] = [{} for _ in range(world)]
    for name in sorted(entries):
        found[_owner(name) % world][name] = entries[name]
    return found
