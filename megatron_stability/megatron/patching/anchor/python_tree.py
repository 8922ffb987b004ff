"""Names in a tree of Python sources, found without importing any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_stability.megatron.patching.anchor.pattern import FUNCTIONS, SCOPES

_DEEPEST = 8  # imports followed from one module to the next


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: its module, and its node (None for a submodule, or for what is only assigned)."""

    module: str
    node: ast.AST | None


class PythonTree:
    """The modules below a folder.

    Args:
        root: the folder that stands on the import path.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parsed: dict[str, ast.Module | None] = {}
        self._defined: dict[str, dict[str, ast.AST]] = {}

    def has(self, module: str) -> bool:
        """Whether there is such a module, compiled ones and namespace packages too."""
        base = self._root / module.replace(".", "/")
        return base.is_dir() or base.with_suffix(".py").exists() or any(base.parent.glob(f"{base.name}.*"))

    def find(self, module: str, name: str, depth: int = 0) -> Definition | None:
        """Where `from module import name` gets the name from; None where it would fail."""
        node = self._names(module).get(name)
        if isinstance(node, ast.ImportFrom) and depth < _DEEPEST:
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            source = self._absolute(module, node)
            if source.split(".")[0] != module.split(".")[0] or not self.has(source):
                return Definition(module, None)
            return self.find(source, original, depth + 1)
        if node is not None:
            return Definition(module, node)
        if self.has(f"{module}.{name}"):
            return Definition(f"{module}.{name}", None)
        stars = (n for n in self._names(module).values() if isinstance(n, ast.ImportFrom) and n.names[0].name == "*")
        found = (self.find(self._absolute(module, star), name, depth + 1) for star in stars if depth < _DEEPEST)
        return next((one for one in found if one is not None), None)

    def attributes(self, module: str, owner: str, depth: int = 0) -> frozenset[str] | None:
        """Every attribute that a class or a base of it in the tree sets or defines; None where there is no class."""
        found = self.find(module, owner)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        names = {name for node in found.node.body for name in _defined_by(node)}
        names |= {
            node.attr
            for node in ast.walk(found.node)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        for base in found.node.bases:
            last = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
            if last and depth < _DEEPEST:
                names |= self.attributes(found.module, last, depth + 1) or frozenset()
        return frozenset(names)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self._root / module.replace(".", "/") / "__init__.py").exists()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _names(self, module: str) -> dict[str, ast.AST]:
        if module not in self._defined:
            parsed = self._parse(module)
            self._defined[module] = dict(_definitions(parsed.body)) if parsed else {}
        return self._defined[module]

    def _parse(self, module: str) -> ast.Module | None:
        base = self._root / module.replace(".", "/")
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_bytes())
        return None


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """What a module's own statements bind, those under `if` and `try` too."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.stmt):
            yield from ((name, node) for name in _defined_by(node))
        if not isinstance(node, SCOPES):
            waiting += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt | ast.ExceptHandler)]


def _defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or (alias.name if alias.name == "*" else alias.name.split(".")[0]) for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
