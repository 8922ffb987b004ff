"""Incident bundles: one folder for each step that was skipped, rewound or halted at, to explain it later.

    incident-<step>-g<generation>/
        incident.json           the step, its decision and verdicts, the steps before it, versions, arguments, digests
        tensors.safetensors     only what the caller gives, such as the batch's tokens if the configuration asks for it

A bundle is written into a hidden folder, flushed and renamed, so that whatever bears a bundle's name is whole at any
moment. Bounded: each in size, all together in number (the oldest go first; the ledger keeps every step). JSON and
safetensors only, so that reading one runs no code.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_stability import files
from megatron_stability.config import Record
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import StepEntry, step_entry, strict
from megatron_stability.records import PASSED_OVER, Decision, StepRecord

if TYPE_CHECKING:
    import torch

SCHEMA = 1
JSON, TENSORS = "incident.json", "tensors.safetensors"
STEPS_BEFORE = 20
_NAME = re.compile(r"incident-(\d+)-g(\d+)(?:-(\d+))?")
_HIDDEN = ".incident-"  # how the names of folders begin that are being written or deleted


class Context(BaseModel):
    """What explains an incident and is the same for the whole run."""

    model_config = ConfigDict(frozen=True)

    versions: dict[str, str] = {}
    layout: dict[str, int] = {}
    args: dict[str, Any] = {}  # see `plain_args`
    patch_digest: str = ""


class Bundle(BaseModel):
    """The content of `incident.json`."""

    model_config = ConfigDict(frozen=True)

    schema_version: int
    written: str  # UTC, ISO 8601
    incident: StepEntry
    before: tuple[StepEntry, ...]  # up to STEPS_BEFORE steps, oldest first
    context: Context
    tensors_xxh64: str = ""  # of tensors.safetensors; empty: there is none
    left_out: tuple[str, ...] = ()  # what exceeded the size limit, one sentence each


class Bundles:
    """Writes a bundle for every SKIP, REWIND and HALT; a `pipeline.Sink`, on the rank that writes the ledger.

    Open the folder's ledger first: its lock keeps other writers away. What an interrupted write left is removed.

    Args:
        folder: the ledger's folder.
        limits: `max_bundles` and `max_bundle_mb`.
        context: versions, layout, arguments, patch digest.
        generation: the ledger's present generation.
        tensors: called at an incident, for named tensors on any device.

    Raises:
        UsageError: the folder can't be written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        limits: Record,
        context: Context,
        generation: Callable[[], int],
        tensors: Callable[[StepRecord], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self._folder, self._limits, self._context = Path(folder), limits, context
        self._generation, self._tensors = generation, tensors
        self._before: deque[tuple[StepRecord, Decision, int]] = deque(maxlen=STEPS_BEFORE)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in [path for path in self._folder.iterdir() if path.name.startswith((_HIDDEN, ".removed-"))]:
                files.remove(left)
        except OSError as error:
            raise UsageError(
                f"{error.filename or folder}: cannot be written ({error.strerror}); give a writable "
                "--stability-record-dir"
            ) from None

    def write(self, record: StepRecord, decision: Decision) -> None:
        """Remember the step; write a bundle if it was skipped, rewound or halted at.

        Args:
            record: the step as all ranks saw it.
            decision: what was done with it.

        Raises:
            UsageError: the bundle can't be written; nothing of it is left.
        """
        generation = self._generation()
        incident = not decision.updates_weights and PASSED_OVER not in decision.parameters
        if incident and self._limits.max_bundles:
            try:
                self._put(record, decision, generation)
                self._prune()
            except OSError as error:
                raise UsageError(
                    f"{self._folder}: the incident bundle of step {record.step} can't be written ({error.strerror}); "
                    "free space there, or set --stability-record-max-bundles 0"
                ) from None
        self._before.append((record, decision, generation))

    def _put(self, record: StepRecord, decision: Decision, generation: int) -> None:
        limit = int(self._limits.max_bundle_mb * 1e6)
        tensors, left_out = self._serialized(record, limit)
        bundle = Bundle(
            schema_version=SCHEMA,
            written=datetime.now(UTC).isoformat(timespec="milliseconds"),
            incident=step_entry(record, decision, generation),
            before=tuple(step_entry(*before) for before in self._before),
            context=self._context,
            tensors_xxh64=xxhash.xxh64_hexdigest(tensors) if tensors else "",
            left_out=tuple(left_out),
        )
        text = _json(bundle)
        if len(text) + len(tensors) > limit:
            reason = f"context and steps before: with them the bundle exceeds {limit:,} bytes"
            rest = {"context": Context(), "before": (), "left_out": (*left_out, reason)}
            text = _json(bundle.model_copy(update=rest))
        name = f"incident-{record.step}-g{generation}"
        hidden = files.temporary_name(self._folder, _HIDDEN)
        hidden.mkdir()
        try:
            _write(hidden / JSON, text)
            if tensors:
                _write(hidden / TENSORS, tensors)
            files.sync_folder(hidden)
            names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
            # a name is taken only where a ledger was moved away and its generations began anew
            free = next(one for one in names if not os.path.lexists(self._folder / one))
            hidden.rename(self._folder / free)
        except BaseException:
            files.remove(hidden)
            raise
        files.sync_folder(self._folder)

    def _serialized(self, record: StepRecord, limit: int) -> tuple[bytes, list[str]]:
        tensors = self._tensors(record) if self._tensors else {}
        if not tensors:
            return b"", []
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size > limit:
            return b"", [f"tensors {', '.join(sorted(tensors))}: {size:,} bytes exceed {limit:,}"]
        from safetensors.torch import save  # brings torch, which reading a bundle's JSON must not need

        return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}), []

    def _prune(self) -> None:
        for path in bundles(self._folder)[: -self._limits.max_bundles]:
            hidden = files.temporary_name(self._folder, _HIDDEN)
            path.rename(hidden)
            files.sync_folder(self._folder)  # before its files go: a name that came back would be of half a bundle
            files.remove(hidden)


def bundles(folder: str | Path) -> list[Path]:
    """The bundles in a run's folder, the oldest first.

    Args:
        folder: the ledger's folder.

    Returns:
        Paths of real folders; a symbolic link is not a bundle.
    """
    found = []
    for path in Path(folder).iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            step, generation, again = (int(part or 1) for part in match.groups())
            found.append((path.stat().st_mtime_ns, again, generation, step, path))
    return [path for *_, path in sorted(found)]


def read_bundle(path: str | Path) -> Bundle:
    """A bundle's JSON.

    Args:
        path: the bundle's folder.

    Returns:
        Its validated content.

    Raises:
        UsageError: not a bundle, or one of a later version.
    """
    file = Path(path) / JSON
    try:
        bundle = Bundle.model_validate_json(files.read_bytes(file))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); name an incident-<step>-g<n> folder") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{file}: is not an incident ({where}: {first['msg']}); name another bundle") from None
    if bundle.schema_version > SCHEMA:
        raise UsageError(
            f"{file}: has schema {bundle.schema_version}, and this version reads up to {SCHEMA}; "
            "install a newer megatron-stability"
        )
    return bundle


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """A bundle's tensors, on the CPU; checked against the JSON's checksum. Needs torch.

    Args:
        path: the bundle's folder.

    Returns:
        Tensors by name; empty if the bundle has none.

    Raises:
        UsageError: the file is missing or differs from what was written.
    """
    digest = read_bundle(path).tensors_xxh64
    if not digest:
        return {}
    file = Path(path) / TENSORS
    try:
        data = files.read_bytes(file, sys.maxsize)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); restore the bundle from a copy") from None
    if xxhash.xxh64_hexdigest(data) != digest:
        raise UsageError(f"{file}: is damaged (wrong checksum); restore the bundle from a copy")
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"{file}: holds no tensors ({error}); restore the bundle from a copy") from None


def plain_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that JSON can hold: numbers, texts, booleans, None, paths as texts, and lists of them.

    Args:
        args: `vars(namespace)`.

    Returns:
        A subset of them; functions, dtypes and other objects are left out.
    """

    def plain(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(plain(item) for item in value)
        return value is None or isinstance(value, bool | int | float | str | Path)

    def text(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [text(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return {name: text(value) for name, value in args.items() if plain(value)}


def _json(bundle: Bundle) -> bytes:
    return json.dumps(strict(bundle.model_dump()), indent=1, allow_nan=False).encode()


def _write(path: Path, data: bytes) -> None:
    with files.open_new(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
