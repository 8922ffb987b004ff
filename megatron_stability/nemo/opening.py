"""Opens the seams, in memory: megatron-core's, as under Megatron's own loop, and those of Megatron-Bridge's loop."""

from __future__ import annotations

from megatron_stability.megatron.patching import in_memory
from megatron_stability.megatron.patching.in_memory import InMemoryPatches
from megatron_stability.megatron.patching.tree import read_bridge


def install() -> tuple[InMemoryPatches, InMemoryPatches]:
    """Serve patched source for the modules imported from now on; before the first import of megatron.

    Returns:
        The installations in megatron-core and in megatron-bridge.

    Raises:
        UsageError: megatron-core or megatron-bridge is missing, of a version without patches, or imported already.
    """
    bridge = read_bridge()  # first, so that a wrong version leaves nothing half-opened
    return in_memory.install(), in_memory.serve(bridge)
