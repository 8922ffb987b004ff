"""What stands in a Megatron tree (a clone's root, or a site-packages), and which patch set fits it; writes nothing."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PathDistribution
from importlib.util import find_spec
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron_stability import extras
from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching.anchor import by_anchor
from megatron_stability.megatron.patching.diff import ContextError, read_text
from megatron_stability.megatron.patching.patch_set import PatchSet, load_patch_set, patches_root, supported_versions

_PACKAGE_INFO = Path("megatron", "core", "package_info.py")
_BRIDGE_INFO = Path("megatron", "bridge", "package_info.py")
BRIDGE = "bridge"  # the folder, among those of megatron-core's versions, of the folders of megatron-bridge's


class State(StrEnum):
    """How a tree stands to its patch set."""

    NOT_APPLIED = "not_applied"
    APPLIED = "applied"
    HALF_APPLIED = "half_applied"  # some files are stock, the others patched: an apply or revert was killed


@dataclass(frozen=True)
class TargetFile:
    """One file of the patch set: its text before (None: absent) and after the series, and whether it has the latter."""

    path: str
    stock: str | None
    patched: str
    applied: bool


@dataclass(frozen=True)
class Tree:
    """A Megatron tree in which every target file is, to the byte, either stock or patched.

    `version` is what the tree says of itself; `patch_set.version` may differ for a clone. `by_anchor` says that no
    committed diffs fit, so that the seams were placed by their anchors.
    """

    root: Path
    version: str
    patch_set: PatchSet
    files: tuple[TargetFile, ...]
    by_anchor: bool = False

    @property
    def stock_digest(self) -> str:
        """sha256, 12 digits of it, of the stock text of the target files."""
        return by_anchor.stock_digest({file.path: file.stock for file in self.files})

    @property
    def said(self) -> str:
        """What the tree is, in a few words."""
        if not self.by_anchor:
            return f"megatron-core {self.version}"
        return f"unknown Megatron {self.version} (digest {self.stock_digest}), seams placed by anchor"

    @property
    def state(self) -> State:
        """Whether all, none or some of the files are patched."""
        applied = {file.applied for file in self.files}
        if len(applied) == 2:
            return State.HALF_APPLIED
        return State.APPLIED if applied == {True} else State.NOT_APPLIED

    def paths(self, applied: bool) -> tuple[str, ...]:
        """The target files that are patched, or those that are not."""
        return tuple(file.path for file in self.files if file.applied == applied)


def _root_with(info: Path) -> Path | None:
    spec = find_spec("megatron")
    roots = [Path(location).parent for location in (spec.submodule_search_locations or [])] if spec else []
    return next((root for root in roots if (root / info).is_file()), None)


def installed_root() -> Path:
    """Finds the installed Megatron without importing anything.

    Returns:
        The folder from which `import megatron.core` would load.

    Raises:
        UsageError: megatron-core is not installed.
    """
    root = _root_with(_PACKAGE_INFO)
    if root is not None:
        return root
    raise UsageError(
        f"megatron-core is not installed in this environment: {extras.command('megatron')}, "
        "put a Megatron-LM clone on PYTHONPATH, or name one with --target."
    )


def detect_version(root: Path) -> tuple[str, bool]:
    """Reads which megatron-core a tree holds, without importing it.

    Args:
        root: a clone's root or a site-packages folder.

    Returns:
        The version, and whether a wheel installed it (else the tree is a clone).

    Raises:
        UsageError: `root` holds no megatron/core, or says no version.
    """
    info = root / _PACKAGE_INFO
    if not info.is_file():
        raise UsageError(
            f"{root} holds no {_PACKAGE_INFO.as_posix()}: --target takes the root of a Megatron-LM clone, or a "
            "site-packages folder with megatron-core."
        )
    wheels = sorted(root.glob("megatron_core-*.dist-info"))
    if len(wheels) > 1:
        raise UsageError(
            f"{root} holds {' and '.join(w.name for w in wheels)}: reinstall megatron-core, so that one is left."
        )
    if wheels:
        return PathDistribution(wheels[0]).version, True
    try:
        body = ast.parse(info.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:  # ValueError: a byte 0
        raise UsageError(f"{info} can't be read as Python ({error}); restore it, to say the version.") from None
    values: dict[str, object] = {}
    for node in body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            values[node.targets[0].id] = node.value.value
    try:
        return "".join(
            [".".join(str(values[k]) for k in ("MAJOR", "MINOR", "PATCH")), str(values["PRE_RELEASE"])]
        ), False
    except KeyError as missing:
        raise UsageError(f"{info} has no line {missing} = …, so the version of megatron-core is unknown.") from missing


def read_tree(root: Path, patches: Path | None = None) -> Tree:
    """Reads every target file below `root` and finds the patch set that fits.

    A release with diffs of its own has its very bytes: a wheel its very version, a clone any version of the same minor
    release whose target files the diffs fit (the tag core_v0.19.0 calls itself 0.19.1). In every other tree the seams
    are placed by their anchors, all or none.

    Args:
        root: a clone's root or a site-packages folder.
        patches: the folder of patch folders; `patches_root()` by default. Anchors belong to the default alone.

    Returns:
        The tree and its patch set, whatever its state.

    Raises:
        UsageError: no Megatron there, or a file in which a seam does not hold; names the file, the function, the seam
            and what stands there.
    """
    own = patches is None or patches == patches_root()
    patches = patches or patches_root()
    version, is_wheel = detect_version(root)
    supported = supported_versions(patches)
    try:
        Version(version)
    except InvalidVersion:
        raise UsageError(f"{root} says it is megatron-core {version!r}, which is no version; reinstall it.") from None
    same_minor = _same_minor(version, supported)
    candidates = [version] if version in supported else [] if is_wheel else same_minor
    if not candidates and not own:
        load_patch_set(version, patches)  # says which there are
    misfit: ContextError | None = None
    for candidate in candidates:
        patch_set = load_patch_set(candidate, patches)
        try:
            return Tree(root, version, patch_set, tuple(_read_file(root, patch_set, path) for path in patch_set.paths))
        except ContextError as error:
            misfit = misfit or error
    if own:
        return _read_by_anchor(root, version, supported)
    raise UsageError(
        f"{root} (megatron-core {version}) can't be patched: {misfit}; supported are megatron-core "
        f"{', '.join(supported)} with unchanged target files; nothing was changed."
    ) from misfit


def _read_by_anchor(root: Path, version: str, supported: tuple[str, ...]) -> Tree:
    files = by_anchor.read_files(root)
    if not all(file.holds for file in files):
        raise UsageError(
            f"{root} (megatron-core {version}) can't be patched: {by_anchor.refusal(files)}; `megatron-stability patch "
            f"check --target {root}` shows every seam; nothing was changed."
        )
    targets = tuple(TargetFile(f.path, f.stock, f.patched or "", f.applied) for f in files)
    return Tree(root, version, by_anchor.patch_set(files, version, supported), targets, by_anchor=True)


def read_bridge(patches: Path | None = None, root: Path | None = None) -> Tree:
    """Reads every target file of the installed megatron-bridge; a wheel's very version is asked for.

    Args:
        patches: the folder of patch folders; `patches_root() / BRIDGE` by default.
        root: the site-packages folder that holds it; by default the one that Python imports from.

    Returns:
        The tree and its patch set, whatever its state.

    Raises:
        UsageError: megatron-bridge is not installed, its version has no patches, or a file is neither stock nor
            patched.
    """
    root = root or _root_with(_BRIDGE_INFO)
    if root is None:
        raise UsageError(f"megatron-bridge is not installed in this environment: {extras.command('nemo')}.")
    wheels = sorted(root.glob("megatron_bridge-*.dist-info"))
    if len(wheels) != 1:
        raise UsageError(f"{root} holds megatron/bridge and {len(wheels)} megatron_bridge-*.dist-info: reinstall it.")
    version = PathDistribution(wheels[0]).version
    patch_set = load_patch_set(version, patches or patches_root() / BRIDGE, "megatron-bridge")
    try:
        files = tuple(_read_file(root, patch_set, path) for path in patch_set.paths)
    except ContextError as error:
        raise UsageError(f"{root} (megatron-bridge {version}) can't be patched: {error}; reinstall it.") from error
    return Tree(root, version, patch_set, files)


def _same_minor(version: str, supported: tuple[str, ...]) -> list[str]:
    """The supported versions of the same minor release, newest first."""
    return [s for s in reversed(supported) if Version(s).release[:2] == Version(version).release[:2]]


def _read_file(root: Path, patch_set: PatchSet, path: str) -> TargetFile:
    """Classifies one file; raises ContextError where it is neither stock nor patched."""
    file = root / path
    try:
        text = read_text(file) if file.exists() else None
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}.") from error
    if not file.parent.is_dir():
        raise ContextError(f"{path} can't be created: its folder is missing")
    try:
        patched = patch_set.apply(path, text)
    except ContextError as misfit:
        try:
            stock = patch_set.revert(path, text)
        except ContextError:
            if text is not None and "megatron_stability" in text:
                raise ContextError(
                    f"{misfit} (the file calls megatron_stability: perhaps another release patched it, or some of the "
                    "patches only; revert with that release, or reinstall Megatron)"
                ) from misfit
            raise misfit from None
        assert text is not None  # revert() would have raised
        return TargetFile(path, stock, text, applied=True)
    return TargetFile(path, text, patched, applied=False)
