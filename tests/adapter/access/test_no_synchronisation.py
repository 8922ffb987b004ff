"""What is measured in every step waits for no device: counted on tensors of a device that is not there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_stability.numerics.attention_probe import HeadStatistics
from megatron_stability.observe.fp8.telemetry import binades, worst

pytestmark = pytest.mark.megatron
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2"}


class Waits(TorchDispatchMode):
    """Operations for which the host waits: a value read, a shape that depends on values, a copy from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if name in WAITS:
            self.seen.append(name)
        found = func(*args, **(kwargs or {}))
        source, target = (given[-1], found) if name in ("_to_copy", "copy_") else (None, None)
        if source is not None and source.device.type == "cuda" and target.device.type == "cpu":
            self.seen.append(f"{name} to the host")
        return found


def waits(made: Callable[[], Callable[[], Any]]) -> list[str]:
    """What `made()`'s result waits for when it is called."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        call = made()
        with Waits() as mode:
            call()
    return mode.seen


def _cuda(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_the_count_sees_each_kind_of_wait() -> None:
    assert waits(lambda: (x := _cuda(3)) is not None and (lambda: x.cpu())) == ["_to_copy to the host"]
    with pytest.raises(Exception, match="_local_scalar_dense"):
        waits(lambda: (x := _cuda(1)) is not None and (lambda: x.item()))


def test_gradients_are_searched_without_a_wait() -> None:
    from megatron_stability.megatron.access.optimizer_state import grad_amax

    def made() -> Callable[[], Any]:
        grads = [SimpleNamespace(grad=_cuda(64, dtype=torch.bfloat16)) for _ in range(3)]
        return lambda: grad_amax([SimpleNamespace(parameters=lambda: grads)])

    assert waits(made) == []


def test_attention_maxima_are_reduced_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_stability.megatron.attention import monitor

    monkeypatch.setattr(monitor.dist, "all_reduce", lambda *given, **how: None)

    def made() -> Callable[[], Any]:
        seen = HeadStatistics(_cuda(4), _cuda(4), _cuda(4))
        reduced = object.__new__(monitor.AttentionMonitor)
        reduced.layers = [SimpleNamespace(largest_gain=lambda: _cuda(1)[0])] * 2
        reduced._monitors = [SimpleNamespace(statistics=lambda: seen)] * 2
        reduced.heads, reduced._entropy, reduced._group = 8, True, None
        reduced._alike = [([0, 1], slice(0, 4))]
        return lambda: reduced.reduce(torch.device("cuda"))

    assert waits(made) == []


def test_fp8_signals_are_made_without_a_wait() -> None:
    def made() -> Callable[[], Any]:
        amax, scale, normal = _cuda(6), _cuda(6), _cuda(6)
        orders = _cuda(6, dtype=torch.float64)
        return lambda: worst("fp8/amax_rise", amax, orders) | binades(amax, scale, normal, orders)

    assert waits(made) == []
