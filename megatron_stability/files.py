"""Files as every room reads and writes them: regular ones only, in bounded size, replaced whole, never through a link.

A name that others can guess is a name that others can take: what is written is written under a random one that did not
exist (O_EXCL, O_NOFOLLOW), and renamed. What is read is opened without waiting (a FIFO has nobody at its other end) and
must be a regular file. All errors are `OSError` with the file's name, as those of the operating system.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO

SMALL, LARGE = 1 << 20, 1 << 28  # bytes: of markers and notes; of manifests, bundles and tables
TEMPORARY = ".stability-"  # how the names of files begin that are not finished

# --- reading ----------------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> io.FileIO:
    """A regular file, unbuffered, for reading; a link to one is followed.

    Raises:
        OSError: there is none, or what is there is a folder, a FIFO, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        refuse_special(path, os.fstat(descriptor))
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def refuse_special(path: Path, found: os.stat_result) -> None:
    """Raise for what is no regular file.

    Args:
        path: named in the error.
        found: its `stat`.

    Raises:
        OSError: reading it could wait for ever, or never end.
    """
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def read_bytes(path: Path, limit: int = LARGE) -> bytes:
    """A whole regular file.

    Args:
        path: the file.
        limit: bytes, at most.

    Raises:
        OSError: it can't be read, is no regular file, or is larger.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise OSError(errno.EINVAL, f"has {size:,} bytes, of which {limit:,} are read at most", str(path))
        parts, left = [], limit  # it may be growing
        while left and (part := stream.read(min(left, LARGE))):
            parts.append(part)
            left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_json(path: Path, limit: int = LARGE) -> Any:
    """The value of a JSON file.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is not JSON, or not by the measure of `parse_json`.
    """
    return parse_json(read_bytes(path, limit))


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, but that endless brackets are a `ValueError` like any other text that is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


# --- writing ----------------------------------------------------------------------------------------------------------


def open_new(path: Path) -> BinaryIO:
    """A file that did not exist, for writing; not even a dangling link may bear its name.

    Raises:
        OSError: the name is taken, or it can't be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def open_own(path: Path, flags: int = os.O_RDWR) -> int:
    """A descriptor of a regular file that this process writes to under its name, made where it is missing.

    Args:
        path: the file; a link is refused, so that nothing lands elsewhere.
        flags: beyond O_CREAT and what refuses links and FIFOs.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o644)
    try:
        refuse_special(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_log(path: Path) -> BinaryIO:
    """A new file in the place of an old one, which is not written through."""
    path.unlink(missing_ok=True)
    return open_new(path)


def append_line(path: Path, line: str) -> None:
    """Add a line in one write; the folder is made where it is missing, a link is refused.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab") as stream:
        stream.write(line.encode() + b"\n")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by a whole one, on stable storage before it returns.

    Raises:
        OSError: it can't be written; the old one stands.
    """
    temporary = temporary_name(path.parent)
    try:
        with open_new(temporary) as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def temporary_name(folder: Path, prefix: str = TEMPORARY) -> Path:
    """A name in a folder that nobody can foresee."""
    return folder / f"{prefix}{secrets.token_hex(8)}"


def sync_folder(folder: Path) -> None:
    """Put a folder's names on stable storage."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Take away a folder with what is in it, or a file; of a link the link alone.

    Raises:
        OSError: it can't be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder whose name, and those of the folders made for it, are on stable storage."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
