"""After a clip every head of a recomputed forward is at τ or as it was: in every layout, with every optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import attention_models as models
from tests.dist.hook_steps import step as run_step
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron
TAU = 3.0
FP32, BF16 = 1e-3, 2.0**-6  # docs/qk_clip.md says where they come from

#: World size, tensor, pipeline and virtual size, kind of attention, optimizer (bf16 unless it says fp32), and more.
CASES: dict[str, dict[str, Any]] = {
    "sequence parallel": {"world": 2, "tp": 2, "options": {"sequence_parallel": True}},
    "sequence parallel, fp32": {"world": 2, "tp": 2, "optimizer": "fp32", "options": {"sequence_parallel": True}},
    "virtual pipeline": {"world": 2, "pp": 2, "vpp": 2},
    "virtual pipeline, fp32 shards": {"world": 4, "pp": 2, "vpp": 2, "kind": "mha", "optimizer": "fp32-distributed"},
    "tensor x pipeline, layer-wise Muon": {"world": 4, "tp": 2, "pp": 2, "optimizer": "dist-muon"},
    "more ranks than key heads": {"world": 4, "tp": 4, "kind": "mqa", "optimizer": "distributed"},
    "overlap-param-gather": {"world": 2, "optimizer": "overlap"},
    "overlap-param-gather, tensor x data": {"world": 4, "tp": 2, "kind": "mha", "optimizer": "overlap"},
    "layer-wise Muon": {"world": 2, "optimizer": "dist-muon"},
    "MTP": {"world": 2, "tp": 2, "options": {"mtp_num_layers": 1}},
    "MLA": {"world": 4, "tp": 2, "kind": "mla", "optimizer": "distributed"},
    "frozen layer": {"world": 1, "frozen": "decoder.layers.1."},
}


def clipped(context: Context, case: dict[str, Any]) -> tuple[Any, Any, list[bool]]:
    """Forward, clip, a step with zero gradients, and the forward again: both tables; bf16 == cast(master)."""
    import torch

    from megatron_stability.megatron.attention_layers import find
    from megatron_stability.megatron.master_weights import copies

    tp, pp, vpp = case.get("tp", 1), case.get("pp", 1), case.get("vpp")
    context.megatron(tp=tp, pp=pp, vpp=vpp)
    options = {"virtual_pipeline_model_parallel_size": vpp, "normalization": "RMSNorm"} | case.get("options", {})
    config = models.config(case.get("kind", "gqa"), tp, pp, layers=4 if vpp else 2, **options)
    chunks = models.chunks(config)
    for chunk in chunks:
        models.fill(chunk)
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad = not name.startswith(case.get("frozen", "-"))
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
    hook = models.hook(model, optimizer, tau=TAU)
    _, before = run_step(context, hook, lambda: models.scheduled_forward(model))
    zero_gradient_step()
    _, after = run_step(context, hook, lambda: models.scheduled_forward(model), updated=False)
    same = []
    for layer in find(model):
        for scaled in layer.scaled(torch.ones(1, layer.heads), 0.5):
            weight, *masters = copies(scaled.of(layer), optimizer)
            same += [
                torch.equal(weight.flat[m.start : m.start + m.flat.numel()], m.flat.to(weight.flat)) for m in masters
            ]
    return before, after, same


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_head_is_at_most_tau_after_a_clip_in_every_layout(megatron_ranks: Pool, case: dict[str, Any]) -> None:
    results = megatron_ranks.run(clipped, case, world=case["world"])
    before, after, _ = results[0]
    rtol = FP32 if "fp32" in case.get("optimizer", "") else BF16
    layers = (4 if "vpp" in case else 2) + case.get("options", {}).get("mtp_num_layers", 0)
    assert len(before.layers) == len(set(before.layers)) == layers
    for other, _, same in results:
        assert repr(other) == repr(before)  # NaN is not equal to itself
        assert all(same)
    for at, name in enumerate(before.layers):
        hot, now = before.max_logit_lh[at], after.max_logit_lh[at]
        assert len(hot) == models.HEADS
        assert max(hot) > 1.1 * TAU
        if name.startswith(case.get("frozen", "-")[:-1]):
            assert now == hot
            continue
        assert max(now) <= TAU * (1 + rtol)
        if at == 0:  # what later layers are given is another input now
            assert now == pytest.approx([min(was, TAU) for was in hot], rel=rtol)
            assert min(hot) < TAU
