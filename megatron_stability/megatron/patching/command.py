"""`megatron-stability patch apply|check|revert|status`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.tree import State, Tree, installed_root, read_tree

_EPILOG = """\
apply    patches all target files, or none; a second time it does nothing
check    the same without writing: exit code 0 if `apply` would succeed
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
        tree, code = _act(args.action, root, patches)
    except UsageError as error:
        print(f"megatron-stability patch: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(_as_json(tree), indent=2))
    else:
        print(_as_text(tree))
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
    return parser


def _act(action: str, root: Path, patches: Path | None) -> tuple[Tree, int]:
    """The tree after the action, and the exit code."""
    if action == "apply":
        on_disk.apply(root, patches)
    elif action == "revert":
        on_disk.revert(root, patches)
    tree = read_tree(root, patches)
    findings = {"check": {State.HALF_APPLIED}, "status": {State.NOT_APPLIED, State.HALF_APPLIED}}
    return tree, EXIT_FINDING if tree.state in findings.get(action, set()) else EXIT_FINE


def _as_json(tree: Tree) -> dict[str, Any]:
    patches = tree.patch_set.patches
    return {
        "target": str(tree.root),
        "megatron_core": tree.version,
        "patch_set": tree.patch_set.version,
        "state": str(tree.state),
        "digest": tree.patch_set.digest,
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
        f"{tree.root}: megatron-core {tree.version}, patches for {tree.patch_set.version} {state}",
        f"digest {tree.patch_set.digest}",
    ]
    lines += [f"  {patch.name}: {patch.what}" for patch in tree.patch_set.patches]
    if tree.state is State.HALF_APPLIED:
        lines += [f"  {'patched' if file.applied else 'stock  '} {file.path}" for file in tree.files]
    return "\n".join(lines)
