"""The table: every attribute that the CPU backend replaces, with what and why."""

from __future__ import annotations

import functools
import importlib
import multiprocessing.forkserver
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.cuda.memory
import torch.distributed
import torch.utils.data
from torch.utils._device import _device_constructors

from megatron_stability.errors import UsageError
from megatron_stability.megatron.cpu import stand_ins as s

FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full"),
    *("full_like", "linspace", "logspace", "ones", "ones_like", "rand_like", "randint_like", "randn_like"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)
RANDOM_FACTORIES = ("rand", "randint", "randn", "randperm")
NEW_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


class Row(NamedTuple):
    """One replacement: `owner.attribute` becomes `replacement` because of `why`."""

    owner: Any
    attribute: str
    replacement: Any
    why: str


def _const(value: object) -> s.Call:
    return lambda *_args, **_kwargs: value


def torch_rows(host_generator: torch.Generator) -> Iterator[Row]:
    """Rows for torch.

    The device's generator is torch's own default one, because every in-place draw and every dropout on a host tensor
    takes it; the host's is `host_generator`, which torch.manual_seed, torch.get_rng_state, data loaders and
    random factories without a device use. If both were one, the data loader's base seed, drawn on TP rank 0 alone,
    would put dropout masks out of step, and replicated weights would drift apart between TP ranks.
    """
    # torch caches this list at its first use; it must never hold our stand-ins.
    _device_constructors()
    device_generator = torch.default_generator
    yield Row(torch, "default_generator", host_generator, "host RNG")
    yield Row(
        torch.random, "default_generator", host_generator, "host RNG: manual_seed, get_rng_state, fork_rng read it"
    )
    cuda = torch.cuda
    yield Row(cuda, "default_generators", (device_generator,), "device RNG: torch.cuda.random reads it")
    yield from _device_rows()
    for name in ("memory_stats", "reset_peak_memory_stats", "mem_get_info", "memory_snapshot"):
        stand_in = {"memory_stats": s.memory_stats, "mem_get_info": _const((0, 0)), "memory_snapshot": _const([])}
        for owner in (cuda, cuda.memory):
            yield Row(owner, name, stand_in.get(name, _const(None)), "no device allocator to ask")
    for name in FACTORIES:
        yield Row(torch, name, s.factory(getattr(torch, name)), "device= may name the stand-in")
    for name in RANDOM_FACTORIES:
        yield Row(torch, name, s.random_factory(getattr(torch, name), host_generator), "no device: host RNG")
    yield from _tensor_rows()
    loader = torch.utils.data.DataLoader
    yield Row(loader, "__init__", s.data_loader_init(loader.__init__, host_generator), "host RNG; nothing is pinned")
    server: Any = multiprocessing.forkserver._forkserver
    preload = ["megatron_stability.megatron.cpu.worker", *server._preload_modules]
    yield Row(server, "_preload_modules", preload, "the asynchronous checkpoint worker needs the backend too")
    dist = torch.distributed
    yield Row(dist, "all_to_all_single", s.all_to_all_single(dist.all_to_all_single), "gloo takes int split sizes")
    yield Row(dist, "all_reduce", s.all_reduce(dist.all_reduce), "gloo has no AVG")
    yield Row(dist, "barrier", s.barrier(dist.barrier), "gloo takes no device_ids")
    yield Row(dist, "reduce_scatter_tensor", s.reduce_scatter_tensor(dist.reduce_scatter_tensor), "gloo has no AVG")


def _device_rows() -> Iterator[Row]:
    """One device, number 0, initialised, idle; torch's own seeds and RNG states then work on `default_generators`."""
    cuda = torch.cuda
    for name, value in (
        ("is_available", True), ("is_initialized", True), ("device_count", 1), ("current_device", 0),
        ("set_device", None), ("_exchange_device", 0), ("_maybe_exchange_device", 0), ("synchronize", None),
        ("is_current_stream_capturing", False), ("set_stream", None), ("ipc_collect", None),
        ("_is_in_bad_fork", False),  # else torch.manual_seed skips the device's generator in a forked process
    ):  # fmt: skip
        for owner in (cuda, cuda.random):  # torch.cuda.random has names of its own for some of them
            if name in vars(owner):
                yield Row(owner, name, _const(value), "one idle device")
    yield Row(cuda, "get_device_properties", s.get_device_properties, "argument checks ask for the architecture")
    yield Row(cuda, "Stream", s.Stream, "one queue")
    yield Row(cuda, "Event", s.Event, "timers, overlap")
    yield Row(cuda, "stream", s.stream_context, "one queue")
    yield Row(cuda, "current_stream", s.current_stream, "one queue")
    yield Row(cuda, "default_stream", s.default_stream, "one queue")


def _tensor_rows() -> Iterator[Row]:
    """Methods of torch.Tensor; nn.Module.cuda and .to go through them."""
    tensor = torch.Tensor
    yield Row(tensor, "cuda", s.identity, "already there")
    yield Row(tensor, "pin_memory", s.identity, "nothing is pinned")
    yield Row(tensor, "record_stream", _const(None), "one queue")
    yield Row(tensor, "cpu", s.tensor_cpu(tensor.cpu), "a copy to the host copies")
    yield Row(tensor, "to", s.tensor_to(tensor.to), "device may name the stand-in")
    yield Row(tensor, "type", s.tensor_type(tensor.type), "optimizers compare type names")
    for name in NEW_METHODS:
        yield Row(tensor, name, s.factory(getattr(tensor, name)), "device= may name the stand-in")


def megatron_rows() -> Iterator[Row]:
    """Rows for Megatron. Imports `megatron.core`, so the rows of torch are in place before."""
    import megatron.core.datasets.utils as utils
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    stock = utils.compile_helpers

    @functools.wraps(stock)
    def compile_helpers() -> None:
        helper = "megatron.core.datasets.helpers_cpp"
        try:
            importlib.import_module(helper)
            return
        except ImportError:
            if not Path(utils.__file__).with_name("Makefile").is_file():
                raise UsageError(
                    "megatron-core's compiled dataset helper is missing, and there is no Makefile to make it with: "
                    "install the megatron-core wheel again"
                ) from None
        try:
            stock()  # a fresh clone: with `make`, as without the CPU backend
            importlib.invalidate_caches()
            importlib.import_module(helper)
        except (ImportError, OSError, SystemExit) as error:
            raise UsageError(
                f"megatron-core's compiled dataset helper could not be made ({type(error).__name__}: {error}): "
                f"`make -C {Path(utils.__file__).parent}` says why; it needs make, g++ and pybind11"
            ) from None

    yield Row(utils, "compile_helpers", compile_helpers, "the wheel holds the compiled helper but no Makefile")
    yield Row(
        PersistentAsyncCaller,
        "_get_process",
        classmethod(_from_the_fork_server(vars(PersistentAsyncCaller)["_get_process"].__func__)),
        "a run's last save comes after its checkpoint worker was ended, and spawns another, without the CPU backend: "
        "that one would die, and its rank wait for it",
    )


def _from_the_fork_server(get_process: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_process)
    def started(cls: type, rank: int, mp_mode: str = "forkserver", *priorities: Any) -> Any:
        return get_process(cls, rank, mp_mode, *priorities)

    return started
