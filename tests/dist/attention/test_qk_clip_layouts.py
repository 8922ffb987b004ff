"""After a clip every head of a recomputed forward is at τ or as it was: in every layout, with every optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.attention import attention_models as models
from tests.dist.attention.hook_steps import step as run_step
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron
FP32, BF16 = 1e-3, 2.0**-6  # docs/qk_clip.md says where they come from

#: World size, tensor, pipeline and virtual size, kind of attention, optimizer (bf16 unless it says fp32), and more.
CASES: dict[str, dict[str, Any]] = {
    "sequence parallel": {"world": 2, "tp": 2, "options": {"sequence_parallel": True}},
    "case 8: sequence parallel, fp32": {
        "world": 2,
        "tp": 2,
        "optimizer": "fp32",
        "options": {"sequence_parallel": True},
    },
    "sequence parallel, QK-norm over the whole projection": {
        "world": 2,
        "tp": 2,
        "options": {"sequence_parallel": True, "qk_layernorm": True},
        "settings": {"qk_norm": "rmsnorm_whole"},
    },
    "virtual pipeline": {"world": 2, "pp": 2, "vpp": 2},
    "virtual pipeline, fp32 shards": {"world": 4, "pp": 2, "vpp": 2, "kind": "mha", "optimizer": "fp32-distributed"},
    "tensor x pipeline, layer-wise Muon": {"world": 4, "tp": 2, "pp": 2, "optimizer": "dist-muon"},
    "tensor x pipeline x data, shards": {"world": 8, "tp": 2, "pp": 2, "optimizer": "distributed"},
    "more ranks than key heads": {"world": 4, "tp": 4, "kind": "mqa", "optimizer": "distributed"},
    "overlap-param-gather": {"world": 2, "optimizer": "overlap"},
    "overlap-param-gather, tensor x data": {"world": 4, "tp": 2, "kind": "mha", "optimizer": "overlap"},
    "layer-wise Muon": {"world": 2, "optimizer": "dist-muon"},
    "case 8: MTP": {"world": 2, "tp": 2, "options": {"mtp_num_layers": 1}},
    "MLA": {"world": 4, "tp": 2, "kind": "mla", "optimizer": "distributed"},
    "case 8: hybrid, a stage without attention": {"world": 2, "pp": 2, "hybrid": "*-|--"},
    "frozen layer": {"world": 1, "frozen": "decoder.layers.1"},
}


def clipped(context: Context, case: dict[str, Any]) -> tuple[float, Any, Any, list[bool]]:
    """Forward, clip, a step with zero gradients, and the forward again: τ, both tables; bf16 == cast(master).

    Attention adds nothing to the residual stream, so that every layer's input is the same again. τ is in the middle.
    """
    import torch

    from megatron_stability.megatron.access.master_weights import copies
    from megatron_stability.megatron.attention.attention_layers import find

    tp, pp, vpp = case.get("tp", 1), case.get("pp", 1), case.get("vpp")
    context.megatron(tp=tp, pp=pp, vpp=vpp)
    options = {"virtual_pipeline_model_parallel_size": vpp, "normalization": "RMSNorm"} | case.get("options", {})
    pattern = case.get("hybrid")
    config = models.config(case.get("kind", "gqa"), tp, pp, layers=4 if vpp or pattern else 2, **options)
    chunks = models.hybrid(config, pattern) if pattern else models.chunks(config, **case.get("settings", {}))
    for chunk in chunks:
        models.fill(chunk)
        for name, parameter in chunk.named_parameters():
            if "linear_proj" in name:
                parameter.data.zero_()
            parameter.requires_grad = not name.startswith(case.get("frozen", "-") + ".")
    model, optimizer = models.wrapped_chunks(chunks, case.get("optimizer", "float16"))

    def zero_gradient_step() -> None:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        assert optimizer.step()[0]
        if model[0].ddp_config.overlap_param_gather:
            for chunk in model:
                chunk.start_param_sync(force_sync=True)

    zero_gradient_step()  # an optimizer's state begins with its first step
    _, free = run_step(context, models.hook(model, optimizer, tau=1e9), lambda: models.scheduled_forward(model))
    maxima = sorted(sum(free.max_logit_lh, ()))
    tau = (maxima[len(maxima) // 2 - 1] + maxima[len(maxima) // 2]) / 2
    hook = models.hook(model, optimizer, tau=tau)
    record, before = run_step(context, hook, lambda: models.scheduled_forward(model))
    zero_gradient_step()
    _, after = run_step(context, hook, lambda: models.scheduled_forward(model), updated=False)
    assert record.signals["attention/max_logit"] == maxima[-1]  # of every layer, stage and rank
    same = []
    for layer in find(model):
        for scaled in layer.scaled(torch.ones(1, layer.heads), 0.5):
            weight, *masters = copies(scaled.of(layer), optimizer)
            same += [
                torch.equal(weight.flat[m.start : m.start + m.flat.numel()], m.flat.to(weight.flat)) for m in masters
            ]
    return tau, before, after, same


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_head_is_at_most_tau_after_a_clip_in_every_layout(megatron_ranks: Pool, case: dict[str, Any]) -> None:
    results = megatron_ranks.run(clipped, case, world=case["world"])
    tau, before, after, _ = results[0]
    rtol = FP32 if "fp32" in case.get("optimizer", "") else BF16
    layers = (4 if "vpp" in case else 2) + case.get("options", {}).get("mtp_num_layers", 0)
    layers = case["hybrid"].count("*") if "hybrid" in case else layers
    assert len(before.layers) == len(set(before.layers)) == layers
    for other_tau, *tables, same in results:
        assert (other_tau, repr(tables)) == (tau, repr([before, after]))  # NaN is not equal to itself
        assert all(same)
    assert max(sum(before.max_logit_lh, ())) > 1.1 * tau
    for name, was, now in zip(before.layers, before.max_logit_lh, after.max_logit_lh, strict=True):
        assert len(was) == models.HEADS
        frozen = name == case.get("frozen")
        assert now == (was if frozen else pytest.approx([min(logit, tau) for logit in was], rel=rtol))
    assert "frozen" in case or max(sum(after.max_logit_lh, ())) <= tau * (1 + rtol)
