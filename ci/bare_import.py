"""Imports every pure room, and asks the command for its help, where Megatron and its companions can't be imported.

The rooms are those that the import-linter contract in pyproject.toml names. The contract reads the sources; this runs
them, so that an import hidden behind importlib or a dependency's plugin shows as well.
"""

import contextlib
import importlib
import importlib.abc
import importlib.util
import io
import pkgutil
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCKED = frozenset({"megatron", "transformer_engine", "modelopt", "apex", "amp_C", "nvdlfw_inspect"})


class Blocker(importlib.abc.MetaPathFinder):
    """Makes the packages in `BLOCKED` as good as not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Refuses a blocked name and leaves every other to the next finder."""
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked by {Path(__file__).name}", name=name)
        return None


def pure_modules() -> Iterator[str]:
    """Names of all modules in the rooms of the contract."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (rooms,) = [c["source_modules"] for c in contracts if c["name"].startswith("Pure rooms")]
    for room in rooms:
        yield room
        spec = importlib.util.find_spec(room)
        if spec is not None and spec.submodule_search_locations:
            for module in pkgutil.walk_packages(spec.submodule_search_locations, room + "."):
                yield module.name


def main() -> int:
    """Exit code 0 when all of them import and the help is printed."""
    sys.meta_path.insert(0, Blocker())
    sys.path.insert(0, str(ROOT))
    names = list(pure_modules())
    for name in names:
        importlib.import_module(name)
    cli = importlib.import_module("megatron_stability.cli")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = cli.main(["--help"])
    if code != 0 or "usage: megatron-stability" not in shown.getvalue():
        print(f"`megatron-stability --help` ended with {code} and printed {shown.getvalue()!r}", file=sys.stderr)
        return 1
    print(f"{len(names)} modules and the command's help, without {', '.join(sorted(BLOCKED))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
