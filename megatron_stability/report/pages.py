"""HTML pages on disk: named `.html`, so that a slip of the flag can't replace a ledger, and replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_stability import files
from megatron_stability.echo import masked_values
from megatron_stability.errors import UsageError


def check(flag: str, path: Path) -> None:
    """Whether the path may hold a page; asked before the work that fills it.

    Args:
        flag: named in the error.
        path: the page's file.

    Raises:
        UsageError: the name does not end in .html, or a folder bears it.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{flag} {path}: the name of a page ends in .html; give another")
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a folder; name a file in it")
    check_place(flag, path)


def check_place(flag: str, path: Path) -> None:
    """Whether the path's folder can be written to, or made; asked before the work that fills the file.

    Raises:
        UsageError: names what is in the way.
    """
    above = next(each for each in path.absolute().parents if each.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise UsageError(f"{flag} {path}: cannot be written, for {above} is no folder that takes it; give another")


def write(flag: str, path: Path, text: str) -> None:
    """Write a page, with its folder where that is missing; an old one is replaced as a whole.

    Args:
        flag: named in the error.
        path: the page's file.
        text: the page.

    Raises:
        UsageError: as `check`, or it can't be written; nothing of it is left.
    """
    check(flag, path)
    replace(flag, path, text)


def replace(flag: str, path: Path, text: str) -> None:
    """Put a text into a file, with its folder where that is missing; an old one is replaced as a whole.

    Raises:
        UsageError: it can't be written; nothing of it is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, masked_values(text).encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written ({error.strerror}); give a writable file") from None
