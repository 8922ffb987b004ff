"""What is installed on a rank, as one digest; ranks compare it before step 0."""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.package_info import __version__ as megatron_core_version
from packaging.version import Version

import megatron_stability
from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching.adapter.needs import missing_needs
from megatron_stability.megatron.patching.tree import Tree, installed_root, read_bridge, read_tree


@cache
def _tree(root: Path) -> Tree:
    """Read once a process, a tenth of a second each time: what was loaded doesn't change with the files."""
    return read_tree(root)


def versions() -> dict[str, str]:
    """Names and versions that decide what this rank computes; Megatron-Bridge's where it is the loop that runs."""
    tree = _tree(installed_root())
    known = {
        "megatron_stability": megatron_stability.__version__,
        "megatron_core": Version(megatron_core_version).public,  # without the hash of whatever repository we run in
        "patches": tree.patch_set.digest,
    }
    if tree.by_anchor:
        known["megatron_tree"] = tree.said
    if "megatron.bridge" not in sys.modules:
        return known
    bridge = read_bridge()
    return known | {"megatron_bridge": bridge.version, "bridge_patches": bridge.patch_set.digest}


def missing_names() -> str | None:
    """What rank 0 has to say against an unknown Megatron: each name that the adapter reads and it has not.

    Returns:
        One sentence, for `compare`; None on other ranks, in a known release, and where nothing is missing.
    """
    root = installed_root()
    tree = _tree(root)
    if dist.get_rank() != 0 or not tree.by_anchor:
        return None
    missing = [f"{need.what} of {need.module} ({need.reason})" for need in missing_needs(root)]
    if not missing:
        return None
    return (
        f"{tree.said}; but the plugin reads what is not there: {', '.join(missing)}; docs/porting.md says how to port"
    )


def compare(group: dist.ProcessGroup | None, config: StabilityConfig, complaint: str | None = None) -> None:
    """Collective: stop before the first step where ranks differ in versions, patches or configuration.

    Args:
        group: every rank that must agree.
        config: this rank's tree.
        complaint: why this rank alone can't begin; it stops all, for the others would wait for it for ever.

    Raises:
        UsageError: on every rank alike; names the ranks that differ from rank 0 and in what, or is the complaint.
    """
    mine: dict[str, Any] = versions() | {
        "configuration": hashlib.sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
    }
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (mine, complaint), group=group)
    for _, reason in answers:
        if reason is not None:
            raise UsageError(reason)
    everyone = [theirs for theirs, _ in answers]
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            names = ", ".join(name for name in mine if other.get(name) != everyone[0].get(name))
            raise UsageError(f"rank {rank} differs from rank 0 in {names}; install the same on every node")
