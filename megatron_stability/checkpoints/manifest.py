"""What makes a checkpoint folder whole: a manifest of its files, and a marker that is written last.

    iter_0000100/
      __0_0.distcp, common.pt, ...     Megatron's files, any format
      stability_manifest.json          size and xxh3-128 of each, and what the run was at this step
      stability_complete               xxh3-128 of the manifest; without it the folder is not a checkpoint

Order of writing: files, fsync, manifest, fsync, marker, fsync. So a death at any moment leaves a folder that is either
whole or without its marker, and a change of any byte of any of these files, marker and manifest included, shows.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from megatron_stability import files
from megatron_stability.checkpoints import dcp_metadata
from megatron_stability.checkpoints.lineage import Place
from megatron_stability.echo import brief, said
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import strict, strict_text

MANIFEST, MARKER, SUSPECT = "stability_manifest.json", "stability_complete", "stability_suspect.json"
OWN_FILES = frozenset({MANIFEST, MARKER, SUSPECT})
RANK_STATE = "megatron_stability_rank"  # key of each rank's generators among Megatron's own (`torch_dist`)
SCHEMA = 2
CHUNK = 1 << 22  # bytes read at once by each thread: memory stays at threads × CHUNK whatever the checkpoint's size
THREADS = 4

OnBytes = Callable[[int], None]


class FileEntry(BaseModel):
    """One file: its size in bytes and the xxh3-128 of its bytes, 32 hexadecimal digits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    xxh3_128: str


class DataFile(BaseModel):
    """One data set of the run's blends, and a fingerprint of its files (`data/fingerprint.py`).

    `split` is "all" where `--split` shares it out; `size` is the `.bin`'s in bytes; `index` and `blocks` are xxh3-128;
    `sha256` of the whole `.bin`, empty where no sidecar says it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: str
    weight: float | None
    prefix: str
    size: int
    index: str
    blocks: str
    sha256: str = ""


class Manifest(BaseModel):
    """What a checkpoint holds. `samples` is the global data cursor; `tokens` is samples × sequence length.

    `counter` to `withheld` are its place in the folder's history (`lineage`); schema 1 had none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA
    step: int
    samples: int
    tokens: int
    counter: int = 0
    parent: Place | None = None
    applied: int | None = None  # the last step whose update is in it
    withheld: int = 0  # steps in a row since, whose updates were withheld
    layout: dict[str, int] = {}
    versions: dict[str, str] = {}
    hashes: dict[str, str] = {}
    data: tuple[DataFile, ...] | None = None  # in the order of the blends; None: saved before they were looked at
    training: dict[str, Any] = {}  # arguments that change what is learnt, as JSON primitives
    states: tuple[str, ...] = ()  # what the checkpoint carries beside the weights
    files: dict[str, FileEntry] = {}

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
                raise ValueError(f"{brief(name)} is no name of a file in the checkpoint")
        return files

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a folder can't be loaded: the file's name in it and one sentence."""

    kind: Literal["incomplete", "missing", "size", "checksum", "unreadable", "schema", "unsafe"]
    file: str
    message: str

    def __str__(self) -> str:
        return said(f"{self.file}: {self.message}")


# --- writing ----------------------------------------------------------------------------------------------------------


def fingerprints_name(rank: int | Literal["*"]) -> str:
    """The file with the fingerprints of a rank's tensors, named as Megatron's writers name theirs.

    Args:
        rank: global; "*" for a pattern of all.
    """
    return f"__{rank}_stability.json"


def file_names(folder: Path) -> list[str]:
    """Every file below the folder but our own and temporary ones, sorted, with `/` between parts."""
    names = (name for name in _walked(folder, "") if name not in OWN_FILES and not name.startswith(files.TEMPORARY))
    return sorted(names)


def _walked(folder: Path, inside: str) -> Iterator[str]:
    """Files below, without a `stat` of each: a folder says of its entries what they are. Links to folders are none."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walked(folder / entry.name, f"{inside}{entry.name}/")
            elif entry.is_file():
                yield f"{inside}{entry.name}"


def hash_files(
    folder: Path,
    names: Collection[str],
    *,
    threads: int = THREADS,
    sync: bool = False,
    on_bytes: OnBytes | None = None,
) -> dict[str, FileEntry]:
    """Hash files in parallel threads (reading and hashing leave Python's lock), largest first.

    Args:
        folder: the checkpoint's.
        names: relative names.
        threads: at most so many files at once.
        sync: also put each file on stable storage.
        on_bytes: told the bytes of each chunk, from the threads, one at a time.

    Returns:
        The entries by name.

    Raises:
        OSError: a file can't be read; its `filename` says which.
    """
    found = _each(folder, names, threads, sync, on_bytes)
    for entry in found.values():
        if isinstance(entry, OSError):
            raise entry
    return {name: entry for name, entry in found.items() if isinstance(entry, FileEntry)}


def _each(
    folder: Path, names: Collection[str], threads: int, sync: bool, on_bytes: OnBytes | None
) -> dict[str, FileEntry | OSError]:
    report = threading.Lock()

    def tell(count: int) -> None:
        if on_bytes is not None:
            with report:
                on_bytes(count)

    def attempt(name: str) -> FileEntry | OSError:
        try:
            return _hash(folder / name, sync, tell)
        except OSError as error:
            return error

    ordered = sorted(names, key=lambda name: _size(folder / name), reverse=True)
    try:
        with ThreadPoolExecutor(max(1, min(threads, len(ordered)))) as pool:
            return dict(zip(ordered, pool.map(attempt, ordered), strict=True))
    except RuntimeError:  # no thread can be had: the interpreter is ending, and this is the completion of a last save
        return {name: attempt(name) for name in ordered}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # said by who opens it
        return 0


def _hash(path: Path, sync: bool, tell: OnBytes) -> FileEntry:
    digest, size = xxhash.xxh3_128(), 0
    with files.open_regular(path) as stream:
        buffer = memoryview(bytearray(min(CHUNK, max(1, os.fstat(stream.fileno()).st_size))))
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            tell(count)
        if sync:
            os.fsync(stream.fileno())
    return FileEntry(size=size, xxh3_128=digest.hexdigest())


def begin(folder: Path) -> None:
    """Take away the marker before the folder's files are written anew."""
    if (folder / MARKER).exists():
        (folder / MARKER).unlink()
        files.sync_folder(folder)


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and then the marker; each is there in full or not at all.

    Args:
        folder: whose files are complete and on stable storage (`hash_files(sync=True)`).
        manifest: with the entries of those files.

    Raises:
        OSError: no space, or another failure; the folder then has no marker.
    """
    text = _text(manifest)
    begin(folder)
    inside = {name.rpartition("/")[0] for name in manifest.files if "/" in name}
    around = {folder / path for name in inside for path in (name, *map(str, PurePosixPath(name).parents))}
    for each in around | {folder, folder.parent}:  # a folder is named in the one around it
        files.sync_folder(each)
    files.write_atomically(folder / MANIFEST, text)
    files.write_atomically(folder / MARKER, _seal(text))


def _text(manifest: Manifest) -> bytes:
    """As JSON; the files' entries, of which there are as many as ranks, hold nothing that needs a second look."""
    known: dict[str, Any] = strict(manifest.model_dump(mode="json", exclude={"files"}))
    entries = manifest.files.items()
    known["files"] = {strict_text(name): {"size": e.size, "xxh3_128": e.xxh3_128} for name, e in entries}
    return json.dumps(known, allow_nan=False, indent=1, sort_keys=True).encode()


def _seal(manifest: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(manifest).encode() + b"\n"


# --- reading ----------------------------------------------------------------------------------------------------------


def check(folder: Path) -> tuple[Manifest | None, list[Problem]]:
    """Marker, manifest and sizes: no file's bytes are read.

    Args:
        folder: the checkpoint's.

    Returns:
        The manifest where it can be believed, and what speaks against the folder.
    """
    manifest, problems = believed(folder)
    return manifest, problems if manifest is None else _sizes(folder, manifest.files)


def _sizes(folder: Path, entries: Mapping[str, FileEntry]) -> list[Problem]:
    problems = []
    for name, entry in entries.items():
        try:
            found = (folder / name).stat()
            files.refuse_special(folder / name, found)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            problems.append(_unreadable(name, error) if not missing else Problem("missing", name, "is missing"))
            continue
        if found.st_size != entry.size:
            problems.append(Problem("size", name, f"has {found.st_size} bytes, and had {entry.size} when it was saved"))
    return problems


def believed(folder: Path) -> tuple[Manifest | None, list[Problem]]:
    """The manifest where marker and checksum say that it was written whole; no other file is looked at."""
    try:
        marker = files.read_bytes(folder / MARKER, files.SMALL)
    except FileNotFoundError:
        return None, [Problem("incomplete", MARKER, "is missing: the save did not finish, or was not made with us")]
    except OSError as error:
        return None, [_unreadable(MARKER, error)]
    try:
        text = files.read_bytes(folder / MANIFEST)
    except FileNotFoundError:
        return None, [Problem("missing", MANIFEST, "is missing")]
    except OSError as error:
        return None, [_unreadable(MANIFEST, error)]
    if _seal(text) != marker:
        return None, [Problem("checksum", MANIFEST, f"does not fit {MARKER}: one of the two was changed")]
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        return None, [Problem("schema", MANIFEST, f"is not a manifest ({error.errors()[0]['msg']})")]
    if manifest.schema_version > SCHEMA:
        newer = f"has schema {manifest.schema_version}, and this version reads up to {SCHEMA}"
        return None, [Problem("schema", MANIFEST, newer)]
    return manifest, []


def verify(folder: Path, *, threads: int = THREADS, on_bytes: OnBytes | None = None) -> list[Problem]:
    """Everything that speaks against loading a folder, its files' bytes read and hashed.

    Args:
        folder: the checkpoint's.
        threads: at most so many files at once; memory is bounded by threads × 4 MiB.
        on_bytes: told of progress.

    Returns:
        Problems by file name; none where the folder is whole.
    """
    manifest, problems = believed(folder)
    return problems if manifest is None else verify_files(folder, manifest.files, threads=threads, on_bytes=on_bytes)


def verify_files(
    folder: Path, entries: Mapping[str, FileEntry], *, threads: int = THREADS, on_bytes: OnBytes | None = None
) -> list[Problem]:
    """As `verify`, of some files whose entries are known: no other file of the folder is looked at."""
    problems = _sizes(folder, entries)
    bad = {problem.file for problem in problems}
    wanted = [name for name in entries if name not in bad]
    for name, entry in _each(folder, wanted, threads, False, on_bytes).items():
        if isinstance(entry, OSError):
            problems.append(_unreadable(name, entry))
        elif entry != entries[name]:
            problems.append(Problem("checksum", name, "has other bytes than when it was saved (wrong checksum)"))
        elif PurePosixPath(name).name == dcp_metadata.FILE:
            problems += _unsafe(folder, name)
    return sorted(problems, key=lambda problem: problem.file)


def _unsafe(folder: Path, name: str) -> list[Problem]:
    """The bytes are those that were saved, but by whom."""
    try:
        found = dcp_metadata.problem(folder / name)
    except OSError as error:
        return [_unreadable(name, error)]
    return [] if found is None else [Problem("unsafe", name, found)]


def read(folder: Path) -> Manifest:
    """A folder's manifest.

    Args:
        folder: the checkpoint's.

    Returns:
        The manifest, sizes checked.

    Raises:
        UsageError: names the file that speaks against it.
    """
    manifest, problems = check(folder)
    if manifest is None or problems:
        raise UsageError(f"{folder / problems[0].file}: {problems[0].message}")
    return manifest


def _unreadable(name: str, error: OSError) -> Problem:
    return Problem("unreadable", name, f"can't be read ({error.strerror})")


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Names whose values differ, or that one side lacks, as (saved, present)."""
    names = sorted(set(saved) | set(present))
    return {name: (saved.get(name), present.get(name)) for name in names if saved.get(name) != present.get(name)}
