"""The argument parser whose complaints are one sentence."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron_stability.errors import UsageError


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong without the usage, which is hundreds of lines here."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse; raises a UsageError with its message."""
        raise UsageError(message)
