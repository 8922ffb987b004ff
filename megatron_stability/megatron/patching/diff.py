"""Unified diffs: parse, apply and reverse, exactly and without side effects.

A patch file is a header and the diffs of one or more files, in the form `git diff` writes:

    What: one sentence.
    Why: one sentence; a text may go on over several lines.
    Upstream: the issue or pull request, or "none".
    Remove when: the condition under which the patch can go.

    --- a/megatron/core/x.py
    +++ b/megatron/core/x.py
    @@ -10,3 +10,4 @@
     ...

Texts are `str` decoded by `read_text`, so that every byte survives: lines end at "\\n" only, and bytes that are not
UTF-8 are kept as surrogates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from megatron_stability.errors import UsageError

HEADER_KEYS = ("What", "Why", "Upstream", "Remove when")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"
_GIT_LINES = ("diff --git ", "index ", "new file mode 100644")


class ContextError(UsageError):
    """A diff does not fit the text it was given; nothing was changed."""


@dataclass(frozen=True)
class Hunk:
    """One change: `old` stands at line `old_index` (0-based) and becomes `new`, at `new_index` of the new file.

    Lines carry their newline; both sides include the context.
    """

    old_index: int
    old: tuple[str, ...]
    new_index: int
    new: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    """What one patch does to one file.

    `path` is relative to the tree's root, with forward slashes; `patch` names the patch file in errors. `creates` says
    that the file is absent before, `deletes` (only in the reverse of such a diff) that it is absent after.
    """

    patch: str
    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False

    def reversed(self) -> FileDiff:
        """The diff that undoes this one."""
        hunks = tuple(Hunk(h.new_index, h.new, h.old_index, h.old) for h in self.hunks)
        return replace(self, hunks=hunks, creates=self.deletes, deletes=self.creates)


@dataclass(frozen=True)
class Patch:
    """One parsed patch file: its header and its diffs, in the order of the file."""

    name: str
    what: str
    why: str
    upstream: str
    remove_when: str
    files: tuple[FileDiff, ...]


def read_text(path: Path) -> str:
    """The file as text from which `write_bytes` gives back the same bytes."""
    return path.read_bytes().decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """The bytes of a text that `read_text` gave, or that was patched since."""
    return text.encode("utf-8", "surrogateescape")


def apply_text(text: str, file_diff: FileDiff) -> str:
    """Applies one file's diff to that file's text.

    Every old line, context included, must stand at its stated line number, to the byte. Line numbers are those of the
    file as the earlier patches of the series left it (as in `git diff` of a series of commits). A hunk with an empty
    side is only accepted when the whole file is empty on that side: nothing else would hold it in place.

    Args:
        text: the file before; "" for a file that the diff creates.
        file_diff: the diff.

    Returns:
        The file after; "" for a file that the diff deletes.

    Raises:
        ContextError: the diff does not fit; names patch, file, hunk, line, the expected and the found line.
    """
    source, out, at = _lines(text), list[str](), 0
    for number, hunk in enumerate(file_diff.hunks, 1):
        end = hunk.old_index + len(hunk.old)
        _check_fits(source, hunk, f"{file_diff.patch} does not fit {file_diff.path}: hunk {number}")
        out += source[at : hunk.old_index]
        out += hunk.new
        at = end
    return "".join(out + source[at:])


def revert_text(text: str, file_diff: FileDiff) -> str:
    """Undoes `apply_text` exactly; same arguments and errors."""
    return apply_text(text, file_diff.reversed())


def _lines(text: str) -> list[str]:
    """Lines with their newline; splits at "\\n" alone, unlike `str.splitlines`."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _check_fits(source: list[str], hunk: Hunk, where: str) -> None:
    """Raises ContextError unless `hunk` fits `source` exactly."""
    start, end = hunk.old_index, hunk.old_index + len(hunk.old)
    found = source[start:end]
    for offset, line in enumerate(hunk.old):
        here = found[offset] if offset < len(found) else None
        if here != line:
            shown = "the end of the file" if here is None else repr(here)
            hint = _moved_to(source, hunk)
            raise ContextError(f"{where}, line {start + offset + 1}: expected {line!r}, found {shown}{hint}")
    if not hunk.old and source:
        raise ContextError(f"{where}, line 1: expected an empty file, found {source[0]!r}")
    if not hunk.new and len(source) > len(hunk.old):
        rest = source[end] if end < len(source) else source[start - 1]
        raise ContextError(f"{where} has no context and may only remove a whole file: found {rest!r} beside it")
    if hunk.new and not hunk.new[-1].endswith("\n") and end < len(source):
        raise ContextError(f"{where}, line {end + 1}: expected the end of the file, found {source[end]!r}")


def _moved_to(source: list[str], hunk: Hunk) -> str:
    """A hint for the error message where the hunk's old lines stand once, at another line."""
    n = len(hunk.old)
    starts = [i for i in range(len(source) - n + 1) if tuple(source[i : i + n]) == hunk.old]
    return (
        f" (the hunk's lines now start at line {starts[0] + 1}, not {hunk.old_index + 1})" if len(starts) == 1 else ""
    )


def parse_patch(text: str, name: str) -> Patch:
    """Parses one patch file.

    Args:
        text: its text, from `read_text`.
        name: what errors call it, such as "0.19.2/001-gate.patch".

    Returns:
        The patch, its header complete and its hunks in order.

    Raises:
        UsageError: the header is incomplete, or the diff is malformed or asks for what is not supported (renames,
            deletions, modes, binary files); names the line.
    """
    if not text.endswith("\n"):
        raise UsageError(f"{name}: the last line has no newline, so the patch may be cut off.")
    reader = _Reader(name, [line[:-1] for line in _lines(text)])
    header = _parse_header(reader)
    files = []
    while (line := reader.peek()) is not None:
        if line:
            files.append(_parse_file(reader))
        else:
            reader.take()
    if not files:
        raise UsageError(f"{name}: no diff follows the header.")
    return Patch(name, header["What"], header["Why"], header["Upstream"], header["Remove when"], tuple(files))


class _Reader:
    """The lines of a patch file, without their newline, and where the parser stands."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines, self.at = name, lines, 0

    def peek(self) -> str | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def take(self) -> str:
        if self.at >= len(self.lines):
            raise self.error("the patch ends in the middle of a diff")
        self.at += 1
        return self.lines[self.at - 1]

    def error(self, message: str) -> UsageError:
        return UsageError(f"{self.name}, line {max(self.at, 1)}: {message}.")


def _parse_header(reader: _Reader) -> dict[str, str]:
    """The header's texts by HEADER_KEYS; leaves the reader at the first diff."""
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    while (line := reader.peek()) is not None and not line.startswith(("diff --git ", "--- ")):
        reader.take()
        key, colon, rest = line.partition(":")
        if colon and key in HEADER_KEYS:
            if key in texts:
                raise reader.error(f"the header says {key!r} twice")
            current = texts[key] = []
            line = rest
        if line.strip():
            current.append(line.strip())
    missing = [key for key in HEADER_KEYS if not texts.get(key)]
    if missing:
        raise UsageError(f"{reader.name}: the header before the first diff lacks {', '.join(f'{k}:' for k in missing)}")
    return {key: " ".join(texts[key]) for key in HEADER_KEYS}


def _parse_file(reader: _Reader) -> FileDiff:
    line = reader.take()
    while line.startswith(_GIT_LINES):
        line = reader.take()
    if not line.startswith("--- "):
        raise reader.error(f"expected '--- a/PATH' (only changed and new text files are supported), found {line!r}")
    old = line.removeprefix("--- ").split("\t")[0]
    line = reader.take()
    if not line.startswith("+++ b/"):
        raise reader.error(f"expected '+++ b/PATH' (deletions are not supported), found {line!r}")
    path = line.removeprefix("+++ b/").split("\t")[0]
    creates = old == "/dev/null"
    if not creates and old != f"a/{path}":
        raise reader.error(f"'--- {old}' and '+++ b/{path}' name two files; renames are not supported")
    if ".." in PurePosixPath(path).parts or path != str(PurePosixPath(path)) or path.startswith("/"):
        raise reader.error(f"the path {path!r} is not a plain path inside the tree")
    hunks: list[Hunk] = []
    while (next_line := reader.peek()) is not None and next_line.startswith("@@"):
        hunks.append(_parse_hunk(reader, hunks[-1] if hunks else None))
    if not hunks or (creates and (len(hunks) > 1 or hunks[0].old)):
        raise reader.error(f"the diff of {path} has no hunk, or old lines in a new file")
    return FileDiff(reader.name, path, tuple(hunks), creates=creates)


def _parse_hunk(reader: _Reader, before: Hunk | None) -> Hunk:
    head = reader.take()
    match = _HUNK.match(head)
    if match is None:
        raise reader.error(f"malformed hunk header {head!r}")
    old_start, new_start = int(match[1]), int(match[3])
    old_count, new_count = (1 if n is None else int(n) for n in (match[2], match[4]))
    # An empty side states the line before it, so its 0-based index is the stated number itself.
    old_index, new_index = (old_start - (old_count > 0), new_start - (new_count > 0))
    old_at, new_at = (before.old_index + len(before.old), before.new_index + len(before.new)) if before else (0, 0)
    if old_index < old_at or old_index - old_at != new_index - new_at:
        raise reader.error(f"{head!r} does not agree with the hunk before it")
    if 0 in (old_count, new_count) and (old_index or new_index):
        raise reader.error(f"{head!r} has no context, so nothing holds it in place")
    old, new = _parse_hunk_lines(reader, old_count, new_count)
    return Hunk(old_index, tuple(old), new_index, tuple(new))


def _parse_hunk_lines(reader: _Reader, old_count: int, new_count: int) -> tuple[list[str], list[str]]:
    old: list[str] = []
    new: list[str] = []
    while len(old) < old_count or len(new) < new_count:
        line = reader.take()
        mark, text = (line[0], line[1:]) if line else (" ", "")  # an editor may have stripped a blank context line
        sides = {" ": (old, new), "-": (old,), "+": (new,)}.get(mark)
        if sides is None:
            raise reader.error(f"expected a line of the hunk, found {line!r}")
        if reader.peek() == _NO_NEWLINE:
            reader.take()
        else:
            text += "\n"
        for side in sides:
            if side and not side[-1].endswith("\n"):
                raise reader.error("a line without newline is not the last of its file")
            side.append(text)
    if len(old) != old_count or len(new) != new_count:
        raise reader.error("the hunk's lines do not add up to the counts in its header")
    return old, new
