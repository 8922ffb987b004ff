"""Which rank says why a run ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import handle

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


@contextlib.contextmanager
def one_sentence(rank: int) -> Iterator[None]:
    """Bad input ends every rank with code 2, and rank 0 says why: a host script knows nothing of our errors.

    Args:
        rank: global; 0 where a rank fails alone, so that each says why.
    """
    try:
        yield
    except UsageError as error:
        text, runtime = str(error), handle.installed()
        if runtime is not None:
            text = runtime.host.in_its_words(text)
            runtime.ending(error.exit_code, text)
        if speaks(rank):
            print(f"megatron-stability: {text}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
