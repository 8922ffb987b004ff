"""Which rank says why a run ends."""

from __future__ import annotations

import os
import time

RANK_0_S = 30.0  # how much later than another rank rank 0 may find what both find


def speaks(rank: int | str) -> bool:
    """Whether a rank that is about to end says why; every rank has found the same, most likely, and one says it.

    torchrun ends all ranks with the first that ends. So the others wait here for rank 0 to speak and end; who is not
    ended by then was alone in what it found.

    Args:
        rank: global, as `RANK` has it or as a number.
    """
    if str(rank) == "0":
        return True
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    time.sleep(RANK_0_S)
    return True
