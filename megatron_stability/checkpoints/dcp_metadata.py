"""`.metadata` of torch's distributed checkpoints: a pickle, and so a program. It is read here with its hands tied.

torch's `FileSystemReader.read_metadata` runs whatever the file names, and Megatron calls it on every rank at a load. So
the file is examined before either sees it: only the classes below may be named in it, and they are stand-ins that do
nothing (`problem`, which needs no torch). What passed can be read with torch's own classes (`reader`).
"""

from __future__ import annotations

import collections
import importlib
import io
import math
import pickle
import pickletools
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from megatron_stability import files
from megatron_stability.echo import brief
from megatron_stability.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

FILE = ".metadata"
LARGEST = 1 << 32  # bytes; 150 a shard of a tensor
_DCP, _SHARDED = "torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor.metadata"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED = frozenset(
    {
        *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((f"{_DCP}.metadata", f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
        *((f"{_DCP}.metadata", name) for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")),
        *((_SHARDED, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        *((_MCORE, name) for name in ("MCoreMetadata", "MCoreSavePlan")),  # of checkpoints of older releases
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
        ("pathlib._local", "PosixPath"),  # Python 3.13's name
        ("collections", "OrderedDict"),
    }
)
_DTYPE = re.compile(r"(b?float|complex|u?int|q?u?int|bits|bool)[0-9a-z_]*")
_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class _Forbidden(pickle.UnpicklingError):
    """The file names what it may not."""


class _StandIn(type):
    """Of a class: instances hold what they are given, and the class itself can't be changed."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise _Forbidden(f"changes {cls.__name__}")


class _Held(metaclass=_StandIn):
    """Made from any arguments, and any state."""

    def __new__(cls, *arguments: Any) -> _Held:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Whatever it is."""


def _is_allowed(module: str, name: str) -> bool:
    return (module, name) in _ALLOWED or (module == "torch" and _DTYPE.fullmatch(name) is not None)


class _Examining(pickle.Unpickler):  # noqa: S301  # `find_class` gives stand-ins only
    def find_class(self, module: str, name: str) -> Any:
        """A stand-in, without any import."""
        if not _is_allowed(module, name):
            raise _Forbidden(f"names {module}.{name}")
        return collections.OrderedDict if module == "collections" else _StandIn(name, (_Held,), {})


class _Reading(pickle.Unpickler):  # noqa: S301  # of what was examined
    def find_class(self, module: str, name: str) -> Any:
        """torch's own; only for what was examined."""
        if not _is_allowed(module, name):
            raise _Forbidden(f"names {module}.{name}")
        if module == _MCORE:
            module, name = f"{_DCP}.metadata", "Metadata"
        return getattr(importlib.import_module(module), name)


def problem(path: Path) -> str | None:
    """What speaks against letting torch or Megatron read a `.metadata`; None where nothing does.

    Args:
        path: the file.

    Returns:
        The rest of a sentence that begins with its name.

    Raises:
        OSError: it can't be read.
    """
    return _examined(files.read_bytes(path, LARGEST))


def _examined(data: bytes) -> str | None:
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _MEMO and int(argument or 0) > len(data):  # the memo is an array of that length
                raise _Forbidden("numbers what it remembers beyond its size")
        _Examining(io.BytesIO(data)).load()
    except _Forbidden as error:
        return f"{error}, which no checkpoint needs: reading it could run a program; don't load this checkpoint"
    except Exception as error:  # a pickle that is cut or made up fails in any way that its operations can
        return f"is not the metadata of a distributed checkpoint ({type(error).__name__}: {error})"
    return None


def below(folder: Path) -> Iterator[Path]:
    """Every file of that name in a checkpoint's folder and its subfolders."""
    return (path for path in sorted(folder.rglob(FILE)) if not path.is_dir())


def refuse_unsafe(folder: Path) -> None:
    """Examine a checkpoint that has no manifest, before Megatron loads it.

    Raises:
        UsageError: names the file.
        OSError: it can't be read.
    """
    for path in below(folder):
        if (found := problem(path)) is not None:
            raise UsageError(f"{path}: {found}")


def reader(folder: Path) -> FileSystemReader:
    """torch's reader of a checkpoint, with metadata that were examined and stay within the folder.

    Args:
        folder: the checkpoint's.

    Raises:
        UsageError: the metadata name what they may not, a file elsewhere, or tensors larger than the files.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    data = files.read_bytes(folder / FILE, LARGEST)
    found = _examined(data)
    if found is not None:
        raise UsageError(f"{folder / FILE}: {found}")
    try:
        metadata = _Reading(io.BytesIO(data)).load()
        _refuse_misfit(metadata, folder)
    except (AttributeError, TypeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise UsageError(f"{folder / FILE}: is not the metadata of a distributed checkpoint ({error})") from None

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(folder)


def _refuse_misfit(metadata: Any, folder: Path) -> None:
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

    names = {info.relative_path for info in metadata.storage_data.values()}
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise ValueError(f"{brief(name)} is no file of the checkpoint")
    there = sum(_size(folder / name) for name in names)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and math.prod(entry.size) * entry.properties.dtype.itemsize > there:
            raise ValueError(f"{brief(key)} would be larger than all files of the checkpoint")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()


def _size(path: Path) -> int:
    found = path.stat()
    files.refuse_special(path, found)
    return found.st_size
