"""`stability_lineage.json` in a `--save` folder: what was done with the folder that no manifest says."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from megatron_stability import files
from megatron_stability.checkpoints.lineage import SCHEMA, History
from megatron_stability.errors import UsageError

FILE = "stability_lineage.json"


def read(root: Path) -> History:
    """The history of a folder; an empty one where there is none.

    Raises:
        UsageError: the file can't be read as one.
    """
    path = root / FILE
    try:
        found = History.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return History()
    except (OSError, ValidationError):
        found = None
    if found is None or found.schema_version > SCHEMA:
        raise UsageError(f"{path}: is no history that this version reads; restore it, or remove it to go by manifests")
    return found


def write(root: Path, history: History) -> None:
    """Replace the file, atomically and on stable storage.

    Raises:
        OSError: it can't be written.
    """
    files.write_atomically(root / FILE, history.model_dump_json(indent=1).encode())
