"""What holds the values of a quantized or distributed tensor; fingerprints read each tensor once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_stability.errors import UsageError
from megatron_stability.observe import fingerprint
from megatron_stability.observe.storage import plain
from tests.unit.observe.quantized_tensors import Quantized, codes, every_kind


@pytest.mark.parametrize("kind", every_kind())
def test_the_codes_are_found_under_each_class_s_own_name(kind: str) -> None:
    tensor, want = every_kind()[kind]
    assert tensor.data_ptr() == 0
    found = plain(tensor)
    assert torch.equal(found, want)
    assert plain(tensor) is found
    parameter = torch.nn.Parameter(tensor, requires_grad=False)  # as weights have it
    assert torch.equal(plain(parameter), want)


def test_what_is_plain_stays_itself() -> None:
    class Marked(torch.Tensor):
        pass

    for tensor in (
        torch.zeros(3),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(0),
        torch.zeros(4).as_subclass(Marked),
    ):
        assert plain(tensor) is tensor


def test_an_unknown_wrapper_is_named() -> None:
    class SomebodysTensor(Quantized):
        pass

    with pytest.raises(UsageError, match="SomebodysTensor: where it keeps its values is not known"):
        plain(SomebodysTensor((2, 2), _packed=torch.zeros(4)))


def test_the_local_shard_of_a_distributed_tensor() -> None:
    from torch.distributed.tensor import DTensor

    local = torch.arange(6.0)
    made = torch.Tensor._make_wrapper_subclass(DTensor, (6,))
    made._local_tensor = local
    assert plain(made) is local


def test_a_tensor_under_two_names_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    whole = fingerprint._of_bytes
    monkeypatch.setattr(fingerprint, "_of_bytes", lambda *given: read.append(given) or whole(*given))
    weight = torch.nn.Parameter(codes(3, 5).float())
    found = fingerprint.fingerprints([("weight", weight), ("master", weight), ("other", weight.detach().clone())])
    assert found["weight"] == found["master"] == found["other"]
    assert len(read) == 2
