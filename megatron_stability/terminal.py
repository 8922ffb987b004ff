"""Where commands print: as wide as the terminal, and as wide as the text where nobody sees it on one."""

from __future__ import annotations

import os

from rich.console import Console

UNBOUNDED = 10_000  # columns; a row of a log, a pipe or a CI page is cut by nobody


def console() -> Console:
    """Standard output for tables and sentences.

    Returns:
        One that wraps at the terminal's width, or at COLUMNS where that is set; into a pipe or a file it never wraps,
        so that `grep` finds whole rows.
    """
    plain = Console()
    return plain if plain.is_terminal or os.environ.get("COLUMNS") else Console(width=UNBOUNDED)
