"""What the adapter reads of Megatron beside the seams, looked for in a tree without importing it.

Imports, and the keywords of calls to what was imported, are taken from the adapter's own source, so that none can be
forgotten here. Attributes of Megatron's objects can't be, for their types stand nowhere: they are in `ATTRIBUTES`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_stability.megatron.patching.adapter.needs_table import ARGUMENT_SOURCES, ATTRIBUTES, OURS
from megatron_stability.megatron.patching.anchor.python_tree import Definition, PythonTree

_ADAPTER = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Missing:
    """One thing that the adapter reads and the tree has not: what, in which module, and which file of ours reads it."""

    what: str
    module: str
    read_by: str
    reason: str


@dataclass(frozen=True)
class _Import:
    """One name that a file of ours imports from Megatron, and the keywords with which the file calls it."""

    file: str
    module: str
    name: str
    keywords: frozenset[str]
    caught: bool  # in a `try` that goes on without it


def missing_needs(root: Path) -> tuple[Missing, ...]:
    """Everything that the adapter reads and a Megatron tree has not.

    Args:
        root: a clone's root or a site-packages folder.
    """
    tree = PythonTree(root)
    found = [*_missing_imports(tree), *_missing_attributes(tree), *_missing_arguments(root)]
    return tuple(dict.fromkeys(found))


@functools.cache
def _adapter_sources() -> tuple[tuple[str, ast.Module], ...]:
    files = (file for file in sorted(_ADAPTER.rglob("*.py")) if "patching" not in file.relative_to(_ADAPTER).parts)
    return tuple((f"megatron/{f.relative_to(_ADAPTER).as_posix()}", ast.parse(f.read_bytes())) for f in files)


@functools.cache
def imports() -> tuple[_Import, ...]:
    """Every import of Megatron's in the adapter."""
    return tuple(need for file, module in _adapter_sources() for need in _imports(file, module))


def _imports(file: str, module: ast.Module) -> Iterator[_Import]:
    caught = {
        inner
        for node in ast.walk(module)
        if isinstance(node, ast.Try) and node.handlers
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("megatron.core", "megatron.training")):
            for alias in node.names:
                keywords = _keywords(module, alias.asname or alias.name)
                yield _Import(file, node.module or "", alias.name, keywords, node in caught)


def _keywords(module: ast.Module, name: str) -> frozenset[str]:
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
    return frozenset(
        keyword.arg
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == name
        for keyword in call.keywords
        if keyword.arg
    )


def _missing_imports(tree: PythonTree) -> Iterator[Missing]:
    for need in imports():
        if need.caught:
            continue
        found = tree.find(need.module, need.name)
        if found is None:
            why = "the module has no such name" if tree.has(need.module) else "there is no such module"
            yield Missing(need.name, need.module, need.file, why)
            continue
        unknown = sorted(need.keywords - (_accepted(found) or need.keywords))
        if unknown:
            yield Missing(f"{need.name}({', '.join(unknown)}=)", need.module, need.file, "it takes no such argument")


def _accepted(found: Definition) -> frozenset[str] | None:
    """The keywords that a function or a class with `__init__` takes; None for any, or where it can't be told."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if not isinstance(node, ast.FunctionDef) or node.args.kwarg or node.decorator_list:
        return None
    return frozenset(arg.arg for arg in (*node.args.args, *node.args.kwonlyargs))


def _missing_attributes(tree: PythonTree) -> Iterator[Missing]:
    for need in ATTRIBUTES:
        have = tree.attributes(need.module, need.owner)
        for name in need.names:
            if have is None:
                yield Missing(f"{need.owner}.{name}", need.module, need.read_by, f"there is no {need.owner}")
            elif name not in have:
                yield Missing(f"{need.owner}.{name}", need.module, need.read_by, "the class sets no such attribute")


@functools.cache
def arguments() -> dict[str, str]:
    """Every attribute of Megatron's arguments that the adapter reads without a default, and a file that reads it."""
    found: dict[str, str] = {}
    for file, module in _adapter_sources():
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and _is_args(node.value) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, file)
    return {name: file for name, file in found.items() if name not in OURS and not name.startswith("stability")}


def _is_args(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id == "args"
    return isinstance(node, ast.Attribute) and node.attr in ("args", "_args")


def _missing_arguments(root: Path) -> Iterator[Missing]:
    words = _words(file for pattern in ARGUMENT_SOURCES for file in sorted(root.glob(pattern)))
    for name, file in arguments().items():
        if name not in words:
            yield Missing(f"args.{name}", "megatron.training", file, "no argument has that name")


def _words(files: Iterable[Path]) -> frozenset[str]:
    words: set[bytes] = set()
    for file in files:
        words.update(re.findall(rb"[A-Za-z_][A-Za-z0-9_-]*", file.read_bytes()))
    return frozenset(word.decode().replace("-", "_") for word in words)
