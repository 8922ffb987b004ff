"""Applies the patches as the modules are imported: nothing on disk changes, not even a bytecode cache.

Python's import system asks the finders on `sys.meta_path` for each module; ours answers for the patched ones alone.
Worker processes started with the "spawn" method import stock Megatron unless they install the patches themselves.
"""

from __future__ import annotations

import importlib.util
import io
import linecache
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching.diff import to_bytes
from megatron_stability.megatron.patching.tree import State, Tree, installed_root, read_tree


class InMemoryPatches:
    """The installed patches: what they are, and the way to take them out again."""

    def __init__(self, tree: Tree, finder: PatchFinder | None) -> None:
        self.tree = tree
        self._finder = finder

    @property
    def digest(self) -> str:
        """The patch set's digest, the same as for an on-disk installation; ranks compare it."""
        return self.tree.patch_set.digest

    @property
    def on_disk(self) -> bool:
        """Whether the tree was patched on disk already, so that nothing is done in memory."""
        return self._finder is None

    def uninstall(self) -> None:
        """Later imports come from disk again; modules imported meanwhile stay patched. A second call does nothing.

        The patched lines leave `linecache`, so that a later stock import isn't shown with patched source.
        """
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            self._finder.forget_source()


def install(root: Path | None = None, patches: Path | None = None) -> InMemoryPatches:
    """Serves patched source for the target modules imported from now on in this process.

    Args:
        root: the Megatron tree; by default the one that `import megatron.core` would load.
        patches: the folder of patch folders; the project's own by default.

    Returns:
        The installation. Where the same patches are on disk already it does nothing, and says so (`on_disk`).

    Raises:
        UsageError: a target module is imported already, the tree is half-applied or does not fit, or the patches are
            installed in this process already.
    """
    return serve(read_tree((root or installed_root()).resolve(), patches))


def serve(tree: Tree) -> InMemoryPatches:
    """As `install`, for a tree that was read already."""
    texts = {module_name(file.path): (tree.root / file.path, file.patched) for file in tree.files}
    if any(isinstance(finder, PatchFinder) and finder.modules & texts.keys() for finder in sys.meta_path):
        raise UsageError("The patches are installed in this process already; uninstall them first.")
    if tree.state is State.APPLIED:
        return InMemoryPatches(tree, None)
    if tree.state is State.HALF_APPLIED:
        raise UsageError(
            f"{tree.root} is half-applied ({', '.join(tree.paths(applied=True))} patched, "
            f"{', '.join(tree.paths(applied=False))} not): run `megatron-stability patch revert --target {tree.root}`."
        )
    imported = [name for name in texts if name in sys.modules]
    if imported:
        raise UsageError(
            f"The patches can't be applied in memory: {', '.join(imported)} is imported already; "
            "install them before the first import of megatron, or patch on disk."
        )
    finder = PatchFinder(texts)
    sys.meta_path.insert(0, finder)
    return InMemoryPatches(tree, finder)


def module_name(path: str) -> str:
    """The module of a source path: megatron.core.x for "megatron/core/x.py" and "megatron/core/x/__init__.py"."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _spans(path: Sequence[str], folder: Path) -> bool:
    """Whether a package's `__path__` holds the folder."""
    return any(Path(entry).resolve() == folder.resolve() for entry in path)


class PatchFinder(MetaPathFinder):
    """Finds the modules whose patched source it holds, and no others.

    Args:
        texts: a module's name to its file (which need not exist) and its patched source.
    """

    def __init__(self, texts: Mapping[str, tuple[Path, str]]) -> None:
        self._texts = MappingProxyType(dict(texts))
        self._loaders: list[PatchLoader] = []

    @property
    def modules(self) -> frozenset[str]:
        """The names of the modules that it serves."""
        return frozenset(self._texts)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Python's question for one module; called by the import system.

        Args:
            fullname: the module's full name.
            path: the parent package's `__path__`.
            target: the module that is reloaded, if any.

        Returns:
            The spec that loads the patched source, or None for a module that is not patched.

        Raises:
            UsageError: Python would import the module from another tree than the one that was read.
        """
        if fullname not in self._texts:
            return None
        file, text = self._texts[fullname]
        is_package = file.name == "__init__.py"
        stock = PathFinder.find_spec(fullname, path, target)
        origin = stock.origin if stock is not None else None
        if origin is None and _spans(path or (), file.parent.parent if is_package else file.parent):
            origin = str(file)  # a file that only the diffs hold
        if origin is None or Path(origin).resolve() != file.resolve():
            raise UsageError(
                f"{fullname} would be imported from {origin or path}, but the patches were made for {file}: "
                "put the tree you mean first on PYTHONPATH."
            )
        loader = PatchLoader(fullname, origin, text)
        self._loaders.append(loader)
        locations = [str(Path(origin).parent)] if is_package else None
        return importlib.util.spec_from_file_location(
            fullname, origin, loader=loader, submodule_search_locations=locations
        )

    def forget_source(self) -> None:
        """Takes the served sources out of `linecache`."""
        for loader in self._loaders:
            linecache.cache.pop(loader.path, None)


class PatchLoader(SourceFileLoader):
    """Loads one module from patched source; reads and writes no bytecode cache."""

    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._source = to_bytes(text)

    def get_data(self, path: str) -> bytes:
        """The patched source for the module's own path; other files (package data) as they are."""
        return self._source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the patched source; the bytecode cache beside the file is stock's and stays untouched."""
        source = importlib.util.decode_source(self._source)
        # An entry without mtime is never checked against the file on disk, which holds the stock source.
        linecache.cache[self.path] = (len(self._source), None, io.StringIO(source).readlines(), self.path)
        return self.source_to_code(self._source, self.path)
