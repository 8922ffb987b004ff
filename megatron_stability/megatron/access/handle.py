"""The one installed runtime: the seams ask it, and what builds models reads its settings."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any, Protocol

from megatron_stability.megatron.access import processes

if TYPE_CHECKING:
    from megatron_stability.config import StabilityConfig
    from megatron_stability.megatron.access.host import Host


class Installed(Protocol):
    """What the rooms below the runtime know of it; only the seams ask it for more."""

    config: StabilityConfig
    host: Host

    def close(self) -> None:
        """Close what it holds open."""

    def ending(self, code: int, reason: str) -> None:
        """Say in the ledger that the run is about to end, and why."""


class Slot[R]:
    """Holds the runtime.

    Attributes:
        runtime: set by `install`, cleared by `uninstall`.
    """

    runtime: R | None = None


SLOT: Slot[Any] = Slot()  # the package's one global


def install(runtime: Installed) -> None:
    """Make `runtime` the one that the seams ask."""
    if SLOT.runtime is not None and SLOT.runtime is not runtime:
        raise RuntimeError("a megatron_stability runtime is installed already; uninstall it first")
    SLOT.runtime = runtime
    atexit.register(uninstall)  # a script of one's own, in a patched clone, knows nothing of it
    processes.end_daemons_at_exit()
    processes.follow_torchrun()


def uninstall() -> None:
    """Forget the runtime and close what it holds open; from here on a patched Megatron runs as stock."""
    if SLOT.runtime is not None:
        SLOT.runtime.close()
    SLOT.runtime = None
    atexit.unregister(uninstall)


def installed() -> Installed | None:
    """The installed runtime."""
    runtime: Installed | None = SLOT.runtime
    return runtime
