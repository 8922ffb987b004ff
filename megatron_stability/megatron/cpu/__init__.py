"""Run Megatron's real training loop on CPUs with gloo: a dry-run backend for 1 to 8 processes.

`install()` lets the host stand in for one CUDA device: attributes of torch (`rows`) are replaced, and of Megatron only
`compile_helpers`, which needs a Makefile that the wheel lacks. `uninstall()` puts every one back. Numbers are those of
the CPU's kernels; speed and memory say nothing about a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Final

import torch

from megatron_stability import extras
from megatron_stability.errors import UsageError
from megatron_stability.megatron.cpu.rows import Row, megatron_rows, torch_rows

BANNER: Final = (
    "megatron-stability: CPU backend. This is a dry run: Megatron's own training loop on CPU kernels and gloo, "
    "with no CUDA kernels, no Transformer Engine, no FP8; speed and memory figures mean nothing."
)

FLAGS: Final[tuple[str, ...]] = (
    "--transformer-impl", "local",
    "--distributed-backend", "gloo",
    "--use-cpu-initialization",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)  # fmt: skip
"""Megatron flags that a CPU run needs: each turns off a CUDA kernel, NCCL or Transformer Engine."""

_ABSENT: Final = object()


class _Backend:
    """What was replaced, to be put back."""

    def __init__(self) -> None:
        self.rows: list[tuple[Row, object]] = []
        self.environment: list[str] = []
        self.host_generator: torch.Generator | None = None
        self.threads = 0

    def replace(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append((row, vars(row.owner).get(row.attribute, _ABSENT)))
            setattr(row.owner, row.attribute, row.replacement)

    def restore(self) -> None:
        self._restore_names()
        while self.rows:
            row, original = self.rows.pop()
            if original is _ABSENT:
                delattr(row.owner, row.attribute)
            else:
                setattr(row.owner, row.attribute, original)
        if self.host_generator is not None:
            torch.default_generator.set_state(self.host_generator.get_state())
            self.host_generator = None
            torch.set_num_threads(self.threads)
        while self.environment:
            os.environ.pop(self.environment.pop(), None)

    def _restore_names(self) -> None:
        """Modules imported meanwhile took stand-ins by name (`reduce_scatter = torch.distributed.…`): give the real."""
        real = {id(row.replacement): original for row, original in self.rows if isinstance(row.owner, ModuleType)}
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in real:
                    setattr(module, name, real[id(value)])


_BACKEND: Final = _Backend()


def environment() -> dict[str, str]:
    """Environment variables of a CPU run; a launcher sets them before the processes start."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in {name for _, name in socket.if_nameindex()} else {}
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's argument check for TP
        "TORCHDYNAMO_DISABLE": "1",  # torch.compile would call a C++ compiler for each fused function
        "TORCH_COMPILE_DISABLE": "1",  # the same for functions compiled as their module is imported, as Bridge's are
        "OMP_NUM_THREADS": "1",  # ranks share the cores; also the order of sums
        "MKL_NUM_THREADS": "1",
        **loopback,
    }


def installed() -> bool:
    """Whether the backend is installed in this process."""
    return bool(_BACKEND.rows)


def install(*, banner: bool = True) -> None:
    """Let the host stand in for one CUDA device in this process, until `uninstall`; a second call does nothing.

    Call it before Megatron is imported, so that no module takes an unreplaced function from torch, and after an import
    hook that patches Megatron, since it imports `megatron.core`. Missing variables of `environment` are set.

    Args:
        banner: Whether rank 0 prints `BANNER` to the standard error stream.

    Raises:
        UsageError: A CUDA device is visible, Transformer Engine is importable, or megatron-core is not installed.
    """
    if installed():
        return
    if torch.cuda.is_available():
        raise UsageError(
            "The CPU backend refuses to run where a CUDA device is visible: "
            "drop it, or hide the devices with CUDA_VISIBLE_DEVICES= (empty)."
        )
    if importlib.util.find_spec("transformer_engine") is not None:
        raise UsageError(
            "The CPU backend needs an environment without Transformer Engine (Megatron would choose its kernels): "
            "uninstall transformer_engine there."
        )
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UsageError(f"The CPU backend needs megatron-core: {extras.command('megatron')}.")
    for name, value in environment().items():
        if name not in os.environ:
            os.environ[name] = value
            _BACKEND.environment.append(name)
    _BACKEND.threads = torch.get_num_threads()
    host_generator = torch.Generator()
    host_generator.set_state(torch.default_generator.get_state())
    try:
        _BACKEND.replace(list(torch_rows(host_generator)))
        _BACKEND.host_generator = host_generator
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))  # OpenMP allows one a nesting level
        _BACKEND.replace(megatron_rows())
    except BaseException:
        _BACKEND.restore()
        raise
    if banner and os.environ.get("RANK", "0") == "0":
        print(BANNER, file=sys.stderr, flush=True)


def uninstall() -> None:
    """Put every replaced attribute, the thread count and the environment back; without an `install`, do nothing.

    torch's default generator goes on from the host generator's state, as if no device had been there.
    """
    _BACKEND.restore()
