"""What a loss of power leaves: a model of a disk that forgets what was not synced, or any part of it.

`Disk(root)` watches what a block does below a folder: before each change of a name and after each fsync it works out
which trees a machine that lost its power there may come up with. Of the changes since the last fsync any subset may
have reached the disk: of a file's bytes none, all, half of what is new, or zeros in its place; of a folder's names
each by itself, a rename at once. `Disk.trees` makes them, one after the other, for a test to look at.

A kill keeps the page cache, so killing a process shows none of this.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MOST = 48  # trees a moment: all subsets where there are fewer, else so many drawn by seed
_watching: list[Disk] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in CHANGES and (event != "open" or int(args[2]) & WRITES):
        _watching[-1].look()


sys.addaudithook(_hook)  # for good, since Python can't take one back

Names = dict[int, dict[str, int]]  # folder -> name -> file or folder, all by inode
Bytes = dict[int, bytes]


@dataclass
class Moment:
    """What is synced and what is there at one moment, and what the caller had been promised by then."""

    synced: Names
    there: Names
    synced_bytes: Bytes
    there_bytes: Bytes
    promised: tuple[str, ...]


@dataclass
class Disk:
    """Watches a folder; everything in it counts as synced at first."""

    root: Path
    moments: list[Moment] = field(default_factory=list)
    _promised: tuple[str, ...] = ()
    _synced: Names = field(default_factory=dict)
    _synced_bytes: Bytes = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)  # of every inode seen: one that is open is not given out again
    _busy: threading.RLock = field(default_factory=threading.RLock)
    _inside: bool = False

    def promise(self, what: str) -> None:
        """From here on, the machine may die at any moment and `what` must hold."""
        self._promised = (*self._promised, what)
        self.look()

    def look(self, synced: int | None = None) -> None:
        """Remember this moment; `synced` is the inode that an fsync has just put on the disk."""
        with self._busy:
            if self._inside:
                return
            self._inside = True
            try:
                names, contents = self._there()
                if synced in names:
                    self._synced[synced] = names[synced]
                elif synced is not None and synced in contents:
                    self._synced_bytes[synced] = contents[synced]
                self.moments.append(
                    Moment(dict(self._synced), names, dict(self._synced_bytes), contents, self._promised)
                )
            finally:
                self._inside = False

    def _there(self) -> tuple[Names, Bytes]:
        names: Names = {}
        contents: Bytes = {}
        for folder, _, files in os.walk(self.root):
            path = Path(folder)
            names[self._keep(path)] = {each: (path / each).stat().st_ino for each in os.listdir(folder)}
            for each in files:
                inode = self._keep(path / each)
                contents[inode] = (path / each).read_bytes()
                self._synced_bytes.setdefault(inode, b"")
        return names, contents

    def _keep(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._open:
            self._open[inode] = os.open(path, os.O_RDONLY)
        return inode

    @contextmanager
    def watched(self) -> Iterator[Disk]:
        """For a `with` block: what is done in it is what the machine dies in, its end included."""
        self._inside = True
        self._synced, self._synced_bytes = self._there()
        self._inside = False
        fsync = os.fsync

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            self.look(os.fstat(descriptor).st_ino)

        os.fsync = synced
        _watching.append(self)
        try:
            yield self
            self.look()
        finally:
            _watching.remove(self)
            os.fsync = fsync
            for descriptor in self._open.values():
                os.close(descriptor)

    def trees(self, folder: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
        """Each different tree that a loss of power may leave, made in `folder`, with what had been promised."""
        seen = set()
        root = self.root.stat().st_ino
        for moment in self.moments:
            for names, contents in _outcomes(moment):
                key = _listing(root, names, contents), moment.promised
                if key not in seen:
                    seen.add(key)
                    shutil.rmtree(folder, ignore_errors=True)
                    _make(folder, root, names, contents)
                    yield folder, moment.promised


def _outcomes(moment: Moment) -> Iterator[tuple[Names, Bytes]]:
    choices: list[list[Callable[[Names, Bytes], None]]] = []
    for folder, there in moment.there.items():
        synced = moment.synced.get(folder, {})
        moved: dict[int, list[str]] = {}
        for name in sorted(there.keys() | synced.keys()):
            if there.get(name) != synced.get(name):
                moved.setdefault(there.get(name, synced.get(name, 0)), []).append(name)
        choices += [[_nothing, _renamed(folder, there, tuple(group))] for group in moved.values()]
    for file, there_bytes in moment.there_bytes.items():
        old = moment.synced_bytes.get(file, b"")
        if there_bytes != old:
            choices.append([_nothing, *(_written(file, new) for new in _partly(old, there_bytes))])
    number = 1
    for options in choices:
        number *= len(options)
    if number <= MOST:
        chosen = list(itertools.product(*choices))
    else:
        draw = random.Random(number)
        chosen = [tuple(options[0] for options in choices), tuple(options[-1] for options in choices)]
        chosen += [tuple(draw.choice(options) for options in choices) for _ in range(MOST - 2)]
    for changes in chosen:
        names = {folder: dict(inside) for folder, inside in moment.synced.items()}
        contents = dict(moment.synced_bytes)
        for change in changes:
            change(names, contents)
        yield names, contents


def _nothing(names: Names, contents: Bytes) -> None:
    """It did not reach the disk."""


def _renamed(folder: int, there: dict[str, int], group: tuple[str, ...]) -> Callable[[Names, Bytes], None]:
    def change(names: Names, contents: Bytes) -> None:
        inside = names.setdefault(folder, {})
        for name in group:
            if name in there:
                inside[name] = there[name]
            else:
                inside.pop(name, None)

    return change


def _written(file: int, new: bytes) -> Callable[[Names, Bytes], None]:
    def change(names: Names, contents: Bytes) -> None:
        contents[file] = new

    return change


def _partly(old: bytes, new: bytes) -> list[bytes]:
    if not new.startswith(old):
        return [new]
    tail = new[len(old) :]
    return [old + tail[: len(tail) // 2], old + bytes(len(tail)), new]


def _listing(inode: int, names: Names, contents: Bytes) -> Any:
    if inode in contents:
        return contents[inode]
    return tuple((name, _listing(below, names, contents)) for name, below in sorted(names.get(inode, {}).items()))


def _make(path: Path, inode: int, names: Names, contents: Bytes) -> None:
    if inode in contents:
        path.write_bytes(contents[inode])
        return
    path.mkdir()
    for name, below in names.get(inode, {}).items():
        _make(path / name, below, names, contents)
