"""The patches of one version of a package: where they are, which versions have them, their digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching.diff import (
    ContextError,
    FileDiff,
    Patch,
    apply_text,
    parse_patch,
    read_text,
    revert_text,
)

_INSTALLED = ("share", "megatron-stability", "patches")


@dataclass(frozen=True)
class PatchSet:
    """The series of patches for one megatron-core version, in the order of their names; applied all or none.

    `supported` names every version that has a folder beside this one, for errors.
    """

    version: str
    patches: tuple[Patch, ...]
    supported: tuple[str, ...]

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The files the series touches, relative to the tree's root, sorted."""
        return tuple(sorted({diff.path for patch in self.patches for diff in patch.files}))

    @cached_property
    def digest(self) -> str:
        """sha256, as hex, of what the series does: version, patch names, paths and hunks, without headers.

        Two ranks with one digest run the same patched lines, however the patches were applied.
        """
        content = [self.version, [[p.name, [asdict(diff) for diff in p.files]] for p in self.patches]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def diffs(self, path: str) -> tuple[FileDiff, ...]:
        """The diffs of one file, in the order in which they apply."""
        return tuple(diff for patch in self.patches for diff in patch.files if diff.path == path)

    def apply(self, path: str, text: str | None) -> str:
        """One file after the whole series.

        Args:
            path: one of `paths`.
            text: the file before, None where there is none.

        Returns:
            The file after.

        Raises:
            ContextError: a diff does not fit, or the file is missing, or there is one that a diff would create.
        """
        for diff in self.diffs(path):
            if diff.creates != (text is None):
                raise ContextError(f"{diff.patch} does not fit {path}: the file {_is(text)}")
            text = apply_text(text or "", diff)
        if text is None:
            raise ValueError(f"no patch of the set for {self.version} touches {path}")
        return text

    def revert(self, path: str, text: str | None) -> str | None:
        """The file before the series, None where there was none; errors as in `apply`."""
        for diff in reversed(self.diffs(path)):
            if text is None:
                raise ContextError(f"{diff.patch} can't be reverted in {path}: the file {_is(text)}")
            before = revert_text(text, diff)
            text = None if diff.creates else before
        return text


def _is(text: str | None) -> str:
    return "is missing" if text is None else "exists already"


def patches_root() -> Path:
    """Finds the patches: beside the package's sources, or where a wheel put them.

    Returns:
        The folder that holds one folder of patches a version.

    Raises:
        UsageError: there is neither.
    """
    project = Path(__file__).resolve().parents[3]
    if (project / "setup.py").is_file() and (project / "patches").is_dir():
        return project / "patches"
    try:
        files = distribution("megatron-stability").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.parts[-5:-2] == _INSTALLED:
            return Path(str(file.locate())).resolve().parents[1]
    raise UsageError(
        f"megatron-stability's patches are missing: there is neither {project / 'patches'} nor {'/'.join(_INSTALLED)} "
        "of an installed megatron-stability; reinstall it."
    )


def supported_versions(root: Path | None = None) -> tuple[str, ...]:
    """The megatron-core versions that have patches.

    Args:
        root: the folder of folders; `patches_root()` by default.

    Returns:
        The names of the folders that hold patches, oldest version first.
    """
    folders = [p.name for p in (root or patches_root()).iterdir() if p.is_dir() and any(p.glob("*.patch"))]
    try:
        return tuple(sorted(folders, key=Version))
    except InvalidVersion as error:
        raise UsageError(
            f"{root or patches_root()}: a folder's name is not a megatron-core version: {error}"
        ) from error


def load_patch_set(version: str, root: Path | None = None, package: str = "megatron-core") -> PatchSet:
    """Reads and parses the patches for `version`.

    Args:
        version: of the package; must be one of `supported_versions(root)`.
        root: the folder of folders; `patches_root()` by default.
        package: its name, for errors.

    Returns:
        The series, in the order of the files' names.

    Raises:
        UsageError: no patches for that version, or a malformed patch file.
    """
    root = root or patches_root()
    supported = supported_versions(root)
    if version not in supported:
        raise UsageError(
            f"{package} {version} is not supported: there are patches for {', '.join(supported) or 'no version'}; "
            "install one of these."
        )
    files = sorted((root / version).glob("*.patch"))
    patches = tuple(parse_patch(read_text(file), f"{version}/{file.name}") for file in files)
    for diff in (diff for patch in patches for diff in patch.files):
        if not (diff.path.startswith("megatron/") and diff.path.endswith(".py")):
            raise UsageError(
                f"{diff.patch}: {diff.path} is not a module under megatron/, so it can't be served in memory."
            )
    return PatchSet(version, patches, supported)
