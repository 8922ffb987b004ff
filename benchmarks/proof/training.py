"""One run in a rank's process, which finds this function by its module's name."""

from __future__ import annotations

import sys

from megatron_stability.megatron import cpu
from tests.dist.pool import Context


def train(context: Context, flags: tuple[str, ...]) -> int:
    """One run; its exit code."""
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.start import pretrain_gpt

    sys.argv = ["megatron-stability pretrain", *cpu.FLAGS, *flags]
    try:
        pretrain_gpt.main()
    except SystemExit as ending:
        return int(ending.code or 0)
    finally:
        handle.uninstall()
    return 0
