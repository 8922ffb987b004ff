"""Where the ranks meet when a save is completed: files in its folder, since a thread can't join a collective."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_stability import files
from megatron_stability.checkpoints import asides, manifest
from megatron_stability.errors import UsageError

WAIT_S = 1800.0  # how long rank 0's thread waits for the other ranks' threads
FIRST_LOOK_S, LAST_LOOK_S = 0.02, 1.0  # pauses between two looks for one share
_NAME = ".stability-share-{rank}.json"


def path(folder: Path, rank: int) -> Path:
    """A rank's file."""
    return folder / _NAME.format(rank=rank)


def remove_stale(folder: Path) -> None:
    """What a save that was killed left, maybe one of more ranks."""
    for name in (_NAME.format(rank="*"), manifest.fingerprints_name("*")):
        for stale in folder.glob(name):
            stale.unlink()


def gather(folder: Path, world: int) -> list[dict[str, Any]]:
    """Rank 0's thread: wait for every rank's share, and take them away.

    Raises:
        UsageError: one did not come.
    """
    deadline = time.monotonic() + WAIT_S
    for rank in range(world):
        _wait_for(path(folder, rank), deadline)
    paths = [path(folder, rank) for rank in range(world)]
    shares = [files.read_json(each) for each in paths]
    for each in paths:
        each.unlink()
    return shares


def _wait_for(share: Path, deadline: float) -> None:
    """One at a time and less and less often: every look is a call to the metadata server that all ranks use."""
    pause = FIRST_LOOK_S
    while not share.exists():
        if time.monotonic() > deadline:
            raise UsageError(f"{share} did not come in {WAIT_S:g} s")
        time.sleep(pause)
        pause = min(2 * pause, LAST_LOOK_S)


def make_way(folder: Path) -> None:
    """Before a save into `folder`: what counts there is set aside, what another left is removed."""
    asides.set_aside(folder)
    remove_stale(folder)
