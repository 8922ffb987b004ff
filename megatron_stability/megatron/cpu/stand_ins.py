"""What stands in for a CUDA device on the host: streams, events, properties, and calls that take a device.

A tensor of the stand-in device is a host tensor, so "host" and "device" tensors can't be told apart. Two rules follow:
a copy to the host (`.cpu()`, `.to("cpu")`) really copies, as it does from a GPU (an asynchronous checkpoint would
otherwise be written from weights that the next step changes), and random numbers are drawn by two generators (`rows`).
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[..., Any]
CPU = torch.device("cpu")


class Event:
    """`torch.cuda.Event` of a device that has finished all its work when a call returns; times by the host clock."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded = 0.0

    def record(self, _stream: object = None) -> None:
        """Note the time."""
        self._recorded = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end._recorded - self._recorded) * 1e3

    def query(self) -> bool:
        """Whether the work before this event is done: always."""
        return True

    def wait(self, _stream: object = None) -> None:
        """Nothing is ever outstanding."""

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


class Stream:
    """`torch.cuda.Stream` of a device with one queue, executed in program order: every stream is the same stream."""

    device = torch.device("cuda", 0)
    device_index = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """(lowest, highest) priority."""
        return (0, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)

    def query(self) -> bool:
        """Whether the stream is idle: always."""
        return True

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def wait_event(self, _event: object) -> None:
        """Nothing is ever outstanding."""

    def wait_stream(self, _stream: object) -> None:
        """Nothing is ever outstanding."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one."""
        event = event or Event()
        event.record()
        return event


def current_stream(device: object = None) -> Stream:
    """The one stream there is."""
    return Stream()


def default_stream(device: object = None) -> Stream:
    """The one stream there is."""
    return Stream()


@contextmanager
def stream_context(stream: object) -> Iterator[object]:
    """`with torch.cuda.stream(s)`: no order to keep, there is one queue."""
    yield stream


def get_device_properties(device: object = None) -> SimpleNamespace:
    """Properties of an Ampere-like device: the oldest that Megatron's argument checks ask nothing special of."""
    return SimpleNamespace(
        name="megatron-stability CPU stand-in", major=8, minor=0, total_memory=0, multi_processor_count=1, uuid="cpu"
    )


def memory_stats(device: object = None) -> dict[str, int]:
    """Allocator statistics in bytes: host memory isn't counted, so every key reads 0."""
    return defaultdict(int)


def _is_device(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )


def _host(value: object) -> object:
    """`value` with a CUDA device (also a bare index) named as the host; anything else unchanged."""
    is_index = isinstance(value, int) and not isinstance(value, bool)
    return CPU if is_index or _is_device(value) else value


def factory(original: Call) -> Call:
    """A tensor factory whose `device=` may name the stand-in, and which pins nothing."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return call


def random_factory(original: Call, host_generator: torch.Generator) -> Call:
    """A factory of random tensors: without a device it draws from the host's generator, with one from the device's."""
    on_device = factory(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        wants_host = kwargs.get("device") is None or str(kwargs["device"]) == "cpu"
        if wants_host and kwargs.get("generator") is None and torch.get_default_device() == CPU:
            kwargs["generator"] = host_generator
        return on_device(*args, **kwargs)

    return call


def tensor_to(original: Call) -> Call:
    """`Tensor.to`: to the stand-in is a no-op, to the host is a copy."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get("device")
        if args:
            args = (_host(args[0]), *args[1:])
        elif target is not None:
            kwargs["device"] = _host(target)
        moved = original(self, *args, **kwargs)
        names_host = isinstance(target, str | torch.device) and str(target) == "cpu"
        return moved.clone() if names_host and moved is self else moved

    return to


def tensor_cpu(original: Call) -> Call:
    """`Tensor.cpu` that copies."""

    @functools.wraps(original)
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved = original(self, *args, **kwargs)
        return moved.clone() if moved is self else moved

    return cpu


def tensor_type(original: Call) -> Call:
    """`Tensor.type`: Megatron's optimizers compare the name with "torch.cuda.BFloat16Tensor" and its like."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch.", 1), *args[1:])
        return original(self, *args, **kwargs)

    return type_


def identity(self: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    """`Tensor.cuda`, `Tensor.pin_memory`: the tensor is where it has to be."""
    return self


def data_loader_init(original: Call, host_generator: torch.Generator) -> Call:
    """`DataLoader.__init__`: base seeds come from the host's generator (trap: only TP rank 0 has a loader)."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        if kwargs.get("generator") is None:
            kwargs["generator"] = host_generator
        original(self, *args, **kwargs)

    return init


def _as_ints(splits: Any) -> Any:
    return splits.tolist() if hasattr(splits, "tolist") else splits


def all_to_all_single(original: Call) -> Call:
    """gloo takes split sizes as ints; Megatron's MoE dispatcher moves them to the host only from a CUDA tensor."""

    @functools.wraps(original)
    def call(
        output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return original(output, input, _as_ints(output_split_sizes), _as_ints(input_split_sizes), *args, **kwargs)

    return call


def all_reduce(original: Call) -> Call:
    """`all_reduce` with ReduceOp.AVG, which gloo lacks: a sum of terms divided beforehand."""

    @functools.wraps(original)
    def call(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.AVG:
            tensor.div_(dist.get_world_size(group))
            op = dist.ReduceOp.SUM
        return original(tensor, op=op, group=group, async_op=async_op)

    return call


def barrier(original: Call) -> Call:
    """`barrier` without its `device_ids`, which name GPUs and which gloo refuses."""

    @functools.wraps(original)
    def call(group: Any = None, async_op: bool = False, device_ids: object = None) -> Any:
        return original(group=group, async_op=async_op)

    return call


def reduce_scatter_tensor(original: Call) -> Call:
    """`reduce_scatter_tensor` with ReduceOp.AVG, as `all_reduce`; the input stays as it is."""

    @functools.wraps(original)
    def call(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            input = input / dist.get_world_size(group)
            op = dist.ReduceOp.SUM
        return original(output, input, op=op, group=group, async_op=async_op)

    return call
