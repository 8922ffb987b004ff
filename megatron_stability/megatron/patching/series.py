"""The diffs that a tree's placements amount to, one patch after the other, as in `patches/VERSION/`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_stability.megatron.patching.anchor.insertions import Insertion
from megatron_stability.megatron.patching.anchor.place import Placement
from megatron_stability.megatron.patching.anchor.seam_table import NEW_FILE, NEW_TEXT
from megatron_stability.megatron.patching.anchor.splice import spliced
from megatron_stability.megatron.patching.diff import to_bytes
from megatron_stability.megatron.patching.patch_headers import HEADERS

_CONTEXT = 1
_NEW_FILE_PATCH = 1


@dataclass(frozen=True)
class _Change:
    """Lines `start` to `end` (0-based, exclusive) of the text before become `new`."""

    start: int
    end: int
    new: tuple[str, ...]


@dataclass(frozen=True)
class Placed:
    """One stock file with the placements of its seams."""

    path: str
    stock: str
    placements: tuple[Placement, ...]


def render(files: Sequence[Placed]) -> dict[str, str]:
    """The text of every patch file that has something to do, by its name without suffix.

    Args:
        files: the target files of the tree, all their seams placed or not needed.
    """
    by_path = {file.path: file for file in files}
    texts = {}
    for number, header in HEADERS.items():
        diffs = _new_file() if number == _NEW_FILE_PATCH else "".join(_diffs(by_path, number))
        if diffs:
            head = f"What: {header.what}\nWhy: {header.why}\nUpstream: {header.upstream}\n"
            texts[header.name] = f"{head}Remove when: {header.remove_when}\n\n{diffs}"
    return texts


def _new_file() -> str:
    lines = NEW_TEXT.splitlines()
    head = f"diff --git a/{NEW_FILE} b/{NEW_FILE}\nnew file mode 100644\n--- /dev/null\n+++ b/{NEW_FILE}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


def _diffs(files: Mapping[str, Placed], number: int) -> Iterator[str]:
    for path, file in files.items():
        pieces = [(p.seam.patch, piece) for p in file.placements for piece in p.insertions]
        pieces.sort(key=lambda pair: pair[1].offset)
        if any(patch == number for patch, _ in pieces):
            old = spliced(file.stock, (piece for patch, piece in pieces if patch < number))
            head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
            yield head + "".join(_hunks(_lines(old), list(_changes(_lines(old), _moved(pieces, number)))))


def _moved(pieces: Iterable[tuple[int, Insertion]], number: int) -> Iterator[Insertion]:
    """The insertions of one patch, at their offsets in the text that the patches before it left."""
    moved_by = 0
    for patch, piece in pieces:
        if patch == number:
            yield Insertion(piece.offset + moved_by, piece.text)
        elif patch < number:
            moved_by += len(to_bytes(piece.text))


def _lines(text: str) -> list[str]:
    return [line + "\n" for line in text.split("\n")[:-1]] + [last for last in [text.rsplit("\n", 1)[-1]] if last]


def _changes(lines: Sequence[str], pieces: Iterable[Insertion]) -> Iterator[_Change]:
    """What the insertions change, line by line; neighbours are one change."""
    waiting: _Change | None = None
    for change in _single_changes(lines, pieces):
        if waiting is None or change.start > waiting.end:
            if waiting is not None:
                yield waiting
            waiting = change
        else:
            waiting = _Change(waiting.start, change.end, waiting.new + change.new)
    if waiting is not None:
        yield waiting


def _single_changes(lines: Sequence[str], pieces: Iterable[Insertion]) -> Iterator[_Change]:
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(to_bytes(line)))
    at = 0
    places = []
    for piece in pieces:
        while at + 1 < len(lines) and starts[at + 1] <= piece.offset:
            at += 1
        behind = piece.offset == starts[-1] and bool(lines) and lines[-1].endswith("\n")
        places.append((len(lines) if behind else at, piece))
    for index, group in groupby(places, key=lambda pair: pair[0]):
        begin = starts[index]
        mine = [piece for _, piece in group]
        whole = [piece for piece in mine if piece.offset == begin and piece.text.endswith("\n")]
        inline = [Insertion(piece.offset - begin, piece.text) for piece in mine if piece not in whole]
        new = [line for piece in whole for line in _lines(piece.text)]
        if inline:
            new += _lines(spliced(lines[index], inline))
        yield _Change(index, index + bool(inline), tuple(new))


def _hunks(lines: Sequence[str], changes: Sequence[_Change]) -> Iterator[str]:
    groups: list[list[_Change]] = []
    for change in changes:
        if groups and change.start - groups[-1][-1].end <= 2 * _CONTEXT:
            groups[-1].append(change)
        else:
            groups.append([change])
    grown = 0
    for group in groups:
        first, last = max(group[0].start - _CONTEXT, 0), min(group[-1].end + _CONTEXT, len(lines))
        more = sum(len(change.new) - (change.end - change.start) for change in group)
        yield f"@@ -{first + 1},{last - first} +{first + grown + 1},{last - first + more} @@\n"
        at = first
        for change in group:
            yield from _marked(" ", lines[at : change.start])
            yield from _marked("-", lines[change.start : change.end])
            yield from _marked("+", change.new)
            at = change.end
        yield from _marked(" ", lines[at:last])
        grown += more


def _marked(mark: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield mark + (line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
