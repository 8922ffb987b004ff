"""`megatron-stability patch apply|check|revert|status`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.survey import Row, Survey, survey
from megatron_stability.megatron.patching.tree import State, Tree, installed_root, read_tree

_EPILOG = """\
apply    patches all target files, or none; a second time it does nothing
check    looks without writing, on any tree: a row for each seam, and what else the plugin reads of Megatron and is not
         there; exit code 0 if all is; --diff prints what `apply` writes
revert   restores the stock bytes; also the way out of a half-applied tree
status   exit code 0 if the tree is patched, 1 if it is stock or half-applied

exit codes: 0 fine, 1 a finding (check, status), 2 unusable input, nothing changed

example:
  megatron-stability patch apply --target ~/Megatron-LM
"""


def run(argv: Sequence[str], patches: Path | None = None) -> int:
    """Runs the subcommand and prints its result, or one sentence on standard error.

    Args:
        argv: the arguments after `megatron-stability patch`.
        patches: the folder of patch folders; the project's own by default.

    Returns:
        The exit code: 0 fine, 1 a finding, 2 unusable input.
    """
    args = _parser().parse_args(argv)
    try:
        root = installed_root() if args.target is None else args.target
        if args.action == "check" and patches is None:
            return _check(root, args.json, args.diff)
        tree, code, changed = _act(args.action, root, patches)
    except UsageError as error:
        print(f"megatron-stability patch: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(_as_json(tree) | {"changed": changed}, indent=2))
    else:
        print(_as_text(tree))
        if args.action in ("apply", "revert"):
            print(f"{args.action}: {len(changed)} files changed" if changed else f"{args.action}: nothing to do")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability patch",
        description="Opens and closes megatron-stability's seams in a Megatron-LM clone or a wheel.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["apply", "check", "revert", "status"])
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="root of a Megatron-LM clone, or a site-packages folder (default: the megatron-core that Python imports)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--diff", action="store_true", help="check: print the diffs that `apply` would write")
    return parser


def _check(root: Path, as_json: bool, with_diff: bool) -> int:
    """Prints what every seam finds in a tree; the exit code says whether all hold and none is half-applied."""
    found = survey(root)
    half_applied = not all(row.holds for row in found.rows) or read_tree(root).state is State.HALF_APPLIED
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(_table(found)))
    if with_diff:
        print("\n".join(found.diffs.values()), end="")
    return EXIT_FINE if found.holds and not half_applied else EXIT_FINDING


def _table(found: Survey) -> Iterator[str]:
    yield f"{found.root}: megatron-core {found.version} (digest {found.digest}), compared with {found.compared_with}"
    for row in found.rows:
        changed = "; the function around it is another" if row.function_changed else ""
        at = f":{row.line}" if row.line else ""
        yield f"  {row.patch:03} {row.seam:<46} {row.state:<22} {row.file}{at}{changed}"
        if not row.holds:
            yield from _why(row)
    for need in found.missing:
        yield f"  missing: {need.what} of {need.module} ({need.reason}), read by {need.read_by}"
    held = sum(row.holds for row in found.rows)
    needs = (
        f"{len(found.missing)} names that the plugin reads are missing" if found.missing else "all it reads is there"
    )
    yield f"{held} of {len(found.rows)} seams hold; {needs}"


def _why(row: Row) -> Iterator[str]:
    yield f"      {row.function or 'the module'}: {row.reason}"
    if row.there:
        yield f"      there stands: {row.there}"


def _act(action: str, root: Path, patches: Path | None) -> tuple[Tree, int, list[str]]:
    """The tree after the action, the exit code, and the files that it changed."""
    before = read_tree(root, patches)
    if action == "apply":
        on_disk.apply(root, patches)
    elif action == "revert":
        on_disk.revert(root, patches)
    tree = read_tree(root, patches)
    findings = {"check": {State.HALF_APPLIED}, "status": {State.NOT_APPLIED, State.HALF_APPLIED}}
    was = {file.path: file.applied for file in before.files}
    changed = [file.path for file in tree.files if file.applied != was.get(file.path)]
    return tree, EXIT_FINDING if tree.state in findings.get(action, set()) else EXIT_FINE, changed


def _as_json(tree: Tree) -> dict[str, Any]:
    patches = tree.patch_set.patches
    return {
        "target": str(tree.root),
        "megatron_core": tree.version,
        "patch_set": tree.patch_set.version,
        "state": str(tree.state),
        "digest": tree.patch_set.digest,
        "by_anchor": tree.by_anchor,
        "files": {file.path: "patched" if file.applied else "stock" for file in tree.files},
        "patches": [
            {
                "name": patch.name,
                "what": patch.what,
                "why": patch.why,
                "upstream": patch.upstream,
                "remove_when": patch.remove_when,
                "files": [diff.path for diff in patch.files],
            }
            for patch in patches
        ],
    }


def _as_text(tree: Tree) -> str:
    state = str(tree.state).replace("_", " ")
    lines = [
        f"{tree.root}: {tree.said}, patches for {tree.patch_set.version} {state}",
        f"digest {tree.patch_set.digest}",
    ]
    lines += [f"  {patch.name}: {patch.what}" for patch in tree.patch_set.patches]
    if tree.state is State.HALF_APPLIED:
        lines += [f"  {'patched' if file.applied else 'stock  '} {file.path}" for file in tree.files]
    return "\n".join(lines)
