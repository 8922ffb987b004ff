"""Every prevention setting, in every layout, against one plain unsharded model in fp64: losses, logits, gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stability.numerics.config import Model
from tests.dist.model import plain_gpt
from tests.dist.model import prevention_models as small
from tests.dist.pool import Context, Pool
from tests.unit.numerics.prevention_references import relative

pytestmark = pytest.mark.megatron

SHAPE = {
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "calculate_per_token_loss": True,
}  # GQA that TP 4 can share out
ATTENTION: dict[str, tuple[Model, dict[str, Any]]] = {
    "rmsnorm": (Model(qk_norm="rmsnorm", final_softcap=2.0, z_loss=0.05), {"calculate_per_token_loss": False}),
    "layernorm": (Model(qk_norm="layernorm", attention_softcap=2.0), {"normalization": "LayerNorm"}),
    "rms_no_gain": (
        Model(qk_norm="rms_no_gain", qk_norm_scale=1.5, attention_softcap=3.0, z_loss=0.02),
        {"attention_output_gate": True},
    ),
    "rmsnorm_whole": (
        Model(qk_norm="rmsnorm_whole", final_softcap=3.0),
        {"attention_output_gate": True, "layernorm_zero_centered_gamma": True},
    ),
    "window-and-sink": (
        Model(attention_softcap=1.5, z_loss=0.05),
        {"window_size": (5, 0), "softmax_type": "learnable"},
    ),
}
QK_NORMS = ("rmsnorm", "layernorm", "rms_no_gain", "rmsnorm_whole")
MTP: dict[str, tuple[Model, dict[str, Any]]] = {
    f"mtp-{norm}": (
        Model(qk_norm=norm, attention_softcap=2.0, final_softcap=2.0, z_loss=0.05),
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
    )
    for norm in QK_NORMS
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
MOE: dict[str, tuple[Model, dict[str, Any]]] = {
    f"moe-{norm}": (Model(qk_norm=norm, attention_softcap=2.0, final_softcap=2.0, z_loss=0.05), EXPERTS)
    for norm in QK_NORMS
}
ALL = ATTENTION | MTP | MOE
WITH_MTP = (*ATTENTION, "mtp-rmsnorm_whole")
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp1": (small.layout(1), WITH_MTP),
    "tp2": (small.layout(2, tp=2), tuple(ATTENTION)),
    "tp2-sp": (small.layout(2, tp=2, sp=True), (*ATTENTION, *MTP)),
    "tp4": (small.layout(4, tp=4), tuple(ATTENTION)),
    "dp2": (small.layout(2), tuple(ATTENTION)),
    "pp2-vpp2": (small.layout(2, pp=2, vpp=2), WITH_MTP),
    "tp2-pp2-sp": (small.layout(4, tp=2, pp=2, sp=True), WITH_MTP),
    "ep2-dp2": (small.layout(2, ep=2), tuple(MOE)),
    "ep2-tp2-sp": (small.layout(2, tp=2, sp=True, ep=2), ("moe-rmsnorm_whole",)),
}


def settings_of(name: str, where: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    model, more = ALL[name]
    return model, where | {"more": SHAPE | more | where["more"]}


@cache
def expected(name: str) -> tuple[plain_gpt.Weights, list[Tensor], Tensor, plain_gpt.Weights]:
    """Weights, and what the plain model makes of them: losses, logits of the first micro-batch, gradients."""
    model, where = settings_of(name, small.layout(1))
    config = small.configuration(where, model)
    weights = plain_gpt.random_weights(config, model)
    wide = {key: weight.double().requires_grad_() for key, weight in weights.items()}
    plain = plain_gpt.PlainGPT(wide, config, model)
    total, losses = plain.objective(small.batches())
    total.backward()
    logits = plain.logits(small.batches()[0][0]).detach()
    return weights, losses, logits, {key: weight.grad for key, weight in wide.items()}


def run(context: Context, where: dict[str, Any], cases: list[tuple[str, plain_gpt.Weights]]) -> list[Any]:
    """Of each case: losses, gradients and logits; a second run must be equal to the bit."""
    results = []
    for name, weights in cases:
        model, here = settings_of(name, where)
        steps = [small.train_step(context, here, model, weights, small.batches()) for _ in range(2)]
        (losses, gradients), (again, gradients_again) = steps
        assert all(torch.equal(a, b) for a, b in zip(losses, again, strict=True))
        assert all(torch.equal(gradients[key][2], gradients_again[key][2]) for key in gradients), name
        results.append((losses, gradients, small.logits(context, here, model, weights, small.batches()[0][0])))
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_plain_model(megatron_ranks: Pool, layout: str) -> None:
    where, names = LAYOUTS[layout]
    cases = [(name, expected(name)[0]) for name in names]
    ranks = megatron_ranks.run(run, where, cases, world=where["world"], timeout=400)
    for (name, _), results in zip(cases, zip(*ranks, strict=True), strict=True):
        _, losses, logits, gradients = expected(name)
        last_stage = results[-where["world"] // where["pp"] :]
        for rank, (got, _, got_logits) in enumerate(last_stage):
            data_rank, data_ranks = rank // where["tp"], len(last_stage) // where["tp"]
            assert relative(torch.stack(got), torch.stack(losses[data_rank::data_ranks])) < 1e-5, name
            assert relative(got_logits[..., : small.VOCAB], logits[..., : small.VOCAB]) < 1e-5, name
        found = small.whole_gradients(where, [result[:2] for result in results])
        assert found.keys() == gradients.keys(), name
        worst = {key: relative(found[key], gradients[key]) for key in gradients}
        assert max(worst.values()) < 1e-5, (name, sorted(worst.items(), key=lambda item: -item[1])[:4])


RECOMPUTE = {
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def recomputed(context: Context, cases: list[tuple[str, plain_gpt.Weights]]) -> None:
    """Gradients with recomputation are those without, to the bit."""
    for name, weights in cases:
        gradients = []
        for more in ({}, *RECOMPUTE.values()):
            model, where = settings_of(name, small.layout(2, tp=2, sp=True, **more))
            gradients.append(small.train_step(context, where, model, weights, small.batches())[1])
        for other in gradients[1:]:
            assert all(torch.equal(gradient, other[key][2]) for key, (_, _, gradient) in gradients[0].items()), name


def test_recomputation_changes_no_bit(megatron_ranks: Pool) -> None:
    cases = [(name, expected(name)[0]) for name in (*WITH_MTP, "moe-rmsnorm_whole")]
    megatron_ranks.run(recomputed, cases, world=2, timeout=400)
