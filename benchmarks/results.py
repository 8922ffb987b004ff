"""Committed results: of which commit, versions, command and sources each one is, and whether these still stand.

    python -m benchmarks.results            a row a result; exit code 1 where the code it is of has changed since

A result is written whole by one command. A long one is written row by row: stopped, it goes on where it was, as long
as the code is the same; rows of different code never stand in one file.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("benchmarks/data", "docs", "docs/drills", "tests/campaign", "tests/drills")
PLUGIN: Final = ("megatron_stability", "patches")
PURE: Final = tuple(
    f"megatron_stability/{room}"
    for room in ("act", "checkpoints", "decide", "detect", "ledger", "observe", "pipeline.py", "records.py")
)
_PACKAGES = ("torch", "megatron-core", "megatron-bridge", "nvidia-modelopt", "transformer-engine")
_OF, _SUFFIXES = "of", (".py", ".patch", ".yaml")


def digest(source: str) -> str:
    """Of a file, or of all Python, patches and YAML below a folder, by name and content."""
    place = ROOT / source
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.suffix in _SUFFIXES)
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def stamp(sources: Iterable[str]) -> dict[str, Any]:
    """What a result says of itself.

    Args:
        sources: files and folders, from the project's root, whose change makes the result one of other code.
    """
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or "no repository",
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "sources": {source: digest(source) for source in sources},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write(out: Path, body: Mapping[str, Any], of: Mapping[str, Any]) -> None:
    """A result in one piece; `of`: the stamp, taken before the work began, whatever is committed meanwhile."""
    _replace(out, {_OF: of, **body})


def _replace(out: Path, document: Mapping[str, Any]) -> None:
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(out)


class Results:
    """Rows of one result, by name, each on disk as soon as it is known.

    Attributes:
        rows: those that are known, of this code alone.
    """

    def __init__(self, out: Path, sources: Iterable[str]) -> None:
        """Args: out: the file, kept where it is of the same code, else begun anew; sources: see `stamp`."""
        self._out, self._of = out, stamp(sources)
        held = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        same = held.get(_OF, {}).get("sources") == self._of["sources"]
        self.rows: dict[str, Any] = {name: row for name, row in held.items() if name != _OF} if same else {}

    def put(self, name: str, row: Any) -> None:
        """Add or replace a row."""
        self.rows[name] = row
        _replace(self._out, {_OF: self._of, **self.rows})


def changed(path: Path) -> list[str] | None:
    """The sources of a committed result that are others now; None where it doesn't say what it is of."""
    document = json.loads(path.read_text(encoding="utf-8"))
    of = document.get(_OF) if isinstance(document, dict) else None
    return None if of is None else [source for source, known in of["sources"].items() if digest(source) != known]


def cited(path: Path, text: str) -> bool:
    """Whether a page that names a result says of which commit it is; of one without a stamp there is nothing to say."""
    if path.name not in text or changed(path) is None:
        return True
    return commit_of(path) in text


def commit_of(path: Path) -> str:
    """The commit that a result says it is of."""
    return str(json.loads(path.read_text(encoding="utf-8"))[_OF]["commit"])


def committed() -> list[Path]:
    """Every committed result."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.json"))


def main() -> int:
    """See the module."""
    stale = 0
    for path in committed():
        found = changed(path)
        says = "doesn't say what it is of" if found is None else f"other now: {', '.join(found)}" if found else "stands"
        stale += found != []
        print(f"{path.relative_to(ROOT)!s:45} {'' if found is None else commit_of(path):14} {says}")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
