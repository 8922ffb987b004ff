"""Where training documents come from: text files, JSONL files and folders of both, in one fixed order.

A document keeps the place of its bytes, so that any later token can be traced to the file it was read from.
"""

import fnmatch
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_stability import files
from megatron_stability.errors import UsageError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
DEFAULT_PATTERNS = ("*.txt", "*.md", "*.jsonl")


@dataclass(frozen=True)
class Source:
    """One input file.

    Attributes:
        input: index of the command-line input that brought it.
        path: relative to that input, with forward slashes; the file's name where the input is a file.
        file: where it is now.
        size: bytes.
    """

    input: int
    path: str
    file: Path
    size: int


@dataclass(frozen=True)
class Document:
    """One document and where its bytes lie.

    Attributes:
        source: the file.
        offset: first byte in the file, of the text or of the JSONL line.
        length: bytes in the file; a JSONL line without its line end.
        line: line number from 1 in a JSONL file, None for a text file.
        encoding: that the text was in, where it was brought to UTF-8.
        text: the text; a text file's bytes as they are, a JSONL value as UTF-8.
    """

    source: Source
    offset: int
    length: int
    line: int | None
    text: bytes
    encoding: str | None = None

    def place(self) -> str:
        """`file` or `file:line`, for messages."""
        return str(self.source.file) if self.line is None else f"{self.source.file}:{self.line}"


def discover(
    inputs: Sequence[Path], patterns: Sequence[str], exclude: Sequence[str], follow_links: bool = False
) -> list[Source]:
    """All input files: the inputs in the order given, a folder's files sorted by relative path.

    Args:
        inputs: files and folders.
        patterns: shell patterns for the file names (or relative paths) to take from a folder.
        exclude: shell patterns for relative paths of files and folders to leave out of a folder.
        follow_links: whether a link in a folder may lead out of it.

    Returns:
        The files, empty ones too.

    Raises:
        UsageError: an input is missing or cannot be read, a folder has no file that fits, or a link leads out of it.
    """
    sources: list[Source] = []
    for index, given in enumerate(inputs):
        if given.is_dir():
            found = sorted(_walk(given, patterns, exclude, follow_links))
            if not found:
                raise UsageError(f"{given} has no file that fits --pattern {' '.join(patterns)}; give another pattern.")
            sources += [Source(index, name, given / name, (given / name).stat().st_size) for name in found]
        elif given.is_file():
            sources.append(Source(index, given.name, given, given.stat().st_size))
        else:
            raise UsageError(f"input {given} is neither a file nor a folder; check the path.")
    return sources


def _walk(root: Path, patterns: Sequence[str], exclude: Sequence[str], follow_links: bool) -> Iterator[str]:
    """Relative paths of the files below `root` that fit; excluded folders and links to folders are not entered."""

    def unreadable(error: OSError) -> None:
        raise UsageError(f"folder {error.filename} cannot be read ({error.strerror}); mend its permissions.") from error

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        here = Path(folder).relative_to(root)
        subfolders[:] = [name for name in subfolders if not _fits((here / name).as_posix(), exclude)]
        for name in names:
            path = (here / name).as_posix()
            if _fits(path, patterns) and not _fits(path, exclude) and (root / path).is_file():
                if not follow_links:
                    _refuse_link_out(root, path)
                yield path


def _refuse_link_out(root: Path, path: str) -> None:
    """A folder that somebody else filled may hold a link to what was never meant to be trained on."""
    if (root / path).is_symlink() and not (root / path).resolve().is_relative_to(root.resolve()):
        raise UsageError(
            f"{root / path} is a link that leads out of {root}; leave it out with --exclude {path}, or give "
            "--follow-links to read what it leads to"
        )


def _fits(path: str, patterns: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def documents(
    source: Source, jsonl_key: str, bad_line: Callable[[str, bytes, UsageError], None] | None = None
) -> Iterator[Document]:
    """The documents of one file: a text file is one, a JSONL file has one a line.

    Args:
        source: the file.
        jsonl_key: the key of a JSONL line that holds the text.
        bad_line: told of a line that is no document (place, line, why), which is then left out; None: an error.

    Yields:
        Documents in file order; an empty text is yielded too, blank JSONL lines are not.

    Raises:
        UsageError: the file cannot be read, or a line is not a JSON object with a text under the key.
    """
    try:
        if source.file.suffix not in JSONL_SUFFIXES:
            data = files.read_bytes(source.file, sys.maxsize)
            yield Document(source, 0, len(data), None, data)
            return
        offset = 0
        with io.BufferedReader(files.open_regular(source.file)) as lines:
            for number, line in enumerate(lines, start=1):
                raw = line.rstrip(b"\r\n")
                if raw.strip():
                    try:
                        text = jsonl_text(raw, f"{source.file}:{number}", jsonl_key)
                    except UsageError as error:
                        if bad_line is None:
                            raise
                        bad_line(f"{source.file}:{number}", raw, error)
                    else:
                        yield Document(source, offset, len(raw), number, text)
                offset += len(line)
    except OSError as error:
        raise UsageError(f"input {source.file} cannot be read ({error.strerror}).") from error


def jsonl_text(raw: bytes, place: str, key: str) -> bytes:
    """The text under `key` of one JSONL line, as UTF-8.

    Args:
        raw: the line.
        place: names it in errors.
        key: of the text.

    Raises:
        UsageError: it is no JSON object with a text under the key.
    """
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{place} is not UTF-8 at byte {error.start} of the line; mend or remove the line.") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{place} is not valid JSON ({error.msg} at column {error.colno}).") from error
    except ValueError as error:
        raise UsageError(f"{place} holds a number too long to be read; mend or remove the line.") from error
    except RecursionError as error:
        raise UsageError(f"{place} is nested too deeply to be read.") from error
    if not isinstance(value, dict) or key not in value:
        has = f"its keys are {', '.join(map(repr, value))}" if isinstance(value, dict) else "it is not an object"
        raise UsageError(f"{place} has no key {key!r} ({has}); name the key with --jsonl-key.")
    if not isinstance(value[key], str):
        raise UsageError(f"{place} has a value under {key!r} that is not text; name another key with --jsonl-key.")
    try:
        return value[key].encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} holds a lone surrogate, which is not text; mend or remove the line.") from error
