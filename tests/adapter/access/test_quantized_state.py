"""Weights and moments of Transformer Engine's classes: fingerprints and digests of replicas read the codes."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_stability.observe.fingerprint import digest
from tests.unit.observe.quantized_tensors import Float8Tensor, Quantized, codes, every_kind

pytestmark = pytest.mark.megatron


class Model(torch.nn.Module):
    """Two quantized weights of one shape, and one of bf16."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        for number in (0, 1):
            quantized = every_kind(seed=100 * number)[kind][0]
            self.register_parameter(f"weight{number}", torch.nn.Parameter(quantized, requires_grad=False))
        self.gain = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", every_kind())
def test_each_weight_has_a_fingerprint_of_its_own_codes(kind: str) -> None:
    from megatron_stability.megatron.access import rank_state

    model, no_optimizer = Model(kind), SimpleNamespace(chained_optimizers=[])
    found = rank_state.measure([model], no_optimizer)
    assert list(found) == ["model0.weight0", "model0.weight1", "model0.gain"]
    assert len(set(found.values())) == 3
    before = int(digest(tensor for _, tensor in rank_state.weights([model])))
    dict(rank_state.weights([model]))["model0.weight1"].view(-1)[7] ^= 1
    changed = rank_state.measure([model], no_optimizer)
    assert [name for name in found if changed[name] != found[name]] == ["model0.weight1"]
    assert int(digest(tensor for _, tensor in rank_state.weights([model]))) != before
    assert "differs in its bits" in str(rank_state.complaint(changed, {n: (p.bits, p.amax) for n, p in found.items()}))


def _with_moments(moments: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    master = torch.nn.Parameter(torch.ones(8))
    inner = SimpleNamespace(param_groups=[{"params": [master]}], state={master: moments})
    return SimpleNamespace(optimizer=inner), master


def test_fp8_moments_are_read_where_a_checkpoint_is_saved() -> None:
    from megatron_stability.megatron.access import rank_state

    first = codes(1, 8)
    moments: dict[str, Quantized | torch.Tensor] = {
        "exp_avg": Float8Tensor((8,), _data=first, _scale_inv=torch.ones(1), _transpose=None),
        "exp_avg_sq": Float8Tensor((8,), _data=codes(2, 8), _scale_inv=torch.ones(1), _transpose=None),
    }
    optimizer, master = _with_moments(moments)
    tensors = dict(rank_state.optimizer_tensors(optimizer))
    assert list(tensors) == [f"optimizer0.group0.0.{name}" for name in ("weight", "exp_avg", "exp_avg_sq")]
    assert tensors["optimizer0.group0.0.weight"] is master
    assert tensors["optimizer0.group0.0.exp_avg"] is first
    found = rank_state.measure([], optimizer)
    assert found["optimizer0.group0.0.exp_avg"] != found["optimizer0.group0.0.exp_avg_sq"]


def test_weights_are_looked_up_at_each_digest() -> None:
    """Transformer Engine may give a weight new storage: what was found at the start would never change again."""
    from megatron_stability.megatron.observers.replicas import ReplicaHook
    from megatron_stability.observe.config import Replicas
    from megatron_stability.observe.wide import Replicas as Groups

    model = Model("mxfp8")
    args = Namespace(save=None, expert_model_parallel_size=1)
    hook = ReplicaHook(Replicas(weights_every=1), [model], torch.device("cpu"), args, 8)
    hook._signals["weights"] = Groups(((0,),), 0)
    hook.step_begins(1)
    before = hook.observe()["weights"].clone()
    model.weight0._rowwise_data = codes(77, 8, 64)
    hook.step_begins(2)
    assert not torch.equal(hook.observe()["weights"], before)
