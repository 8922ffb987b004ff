"""QK-clip on Megatron's own modules: what a recomputed forward shows, in every layout; no cut changes a bit."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch

from megatron_stability.errors import UsageError
from megatron_stability.records import StepRecord
from tests.dist.attention import attention_models as models
from tests.dist.attention.hook_steps import record as step_record
from tests.dist.attention.hook_steps import step as run_step
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron
KINDS = ("mha", "gqa", "mqa", "mla")


def after_a_clip(
    context: Context, kind: str, tp: int, options: dict[str, Any], qk_norm: str = "none"
) -> tuple[Any, Any]:
    context.megatron(tp=tp)
    gpt = models.model(models.config(kind, tp, **options), qk_norm=qk_norm)
    models.fill(gpt)
    hook = models.hook([gpt], tau=3.0)
    _, before = run_step(context, hook, lambda: models.forward(gpt))
    _, after = run_step(context, hook, lambda: models.forward(gpt), updated=False)
    return before, after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_head_is_at_most_tau_after_a_clip(megatron_ranks: Pool, kind: str, tp: int) -> None:
    results = megatron_ranks.run(after_a_clip, kind, tp, {}, world=tp)
    for before, after in results:
        assert repr(before) == repr(results[0][0])  # NaN is not equal to itself
        (hot,), (now,), (factor,) = before.max_logit_lh, after.max_logit_lh, before.factor_lh
        assert len(hot) == models.HEADS
        assert max(hot) > 3.3
        for was, new, f in zip(hot, now, factor, strict=True):
            assert new <= 3.0 * (1 + 1e-3)
            assert new == pytest.approx(min(was, 3.0), rel=1e-4)
            assert f == pytest.approx(min(1.0, 3.0 / was))
        assert all(0 <= entropy <= math.log(models.SEQ) for entropy in before.entropy_lh[0])


@pytest.mark.parametrize("tp", [1, 2])
def test_case_10_qk_norm_on_the_gains_are_clipped(megatron_ranks: Pool, tp: int) -> None:
    options = {"qk_layernorm": True, "num_query_groups": 2}
    for before, after in megatron_ranks.run(after_a_clip, "gqa", tp, options, world=tp):
        worst = max(before.max_logit_lh[0])
        assert worst > 3.0
        assert max(after.max_logit_lh[0]) <= 3.0 * (1 + 1e-3)
        for was, now in zip(before.max_logit_lh[0], after.max_logit_lh[0], strict=True):
            assert now == pytest.approx(was * 3.0 / worst, rel=1e-4)
        assert after.max_gain_l[0] < before.max_gain_l[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_gains_of_a_norm_over_the_whole_projection_are_clipped_head_by_head(megatron_ranks: Pool, tp: int) -> None:
    options = {"qk_layernorm": True, "layernorm_zero_centered_gamma": False}
    for before, after in megatron_ranks.run(after_a_clip, "gqa", tp, options, "rmsnorm_whole", world=tp):
        assert max(before.max_logit_lh[0]) > 3.0 > min(before.max_logit_lh[0])
        for was, now in zip(before.max_logit_lh[0], after.max_logit_lh[0], strict=True):
            assert now == pytest.approx(min(was, 3.0), rel=1e-4)


def refusals(context: Context) -> list[str]:
    """What a layer says that can't be measured or clipped."""
    from megatron.core.transformer.attention import CrossAttention

    from megatron_stability.megatron.model.attention import FlexAttention

    context.megatron()
    gainless = models.model(models.config("gqa", qk_layernorm=True), qk_norm="rms_no_gain")
    flex = models.model(models.config("gqa"))
    flex.decoder.layers[0].self_attention.core_attention.__class__ = FlexAttention
    cross = models.model(models.config("gqa"))
    cross.decoder.layers[0].self_attention.__class__ = CrossAttention
    sentences = []
    for gpt in (gainless, flex, cross):
        with pytest.raises(UsageError) as refused:
            models.hook([gpt])
        sentences.append(str(refused.value))
    return sentences


def test_what_can_not_be_clipped_or_measured_is_refused_by_name(megatron_ranks: Pool) -> None:
    ((gainless, flex, cross),) = megatron_ranks.run(refusals, world=1)
    assert "a q-norm that has no gain (decoder.layers.0: QKNorm)" in gainless
    assert "FlexAttention of decoder.layers.0 shows no logits" in flex
    assert "CrossAttention at decoder.layers.0.self_attention: its attention logits can't be measured" in cross


def test_case_5_attention_output_gate(megatron_ranks: Pool) -> None:
    ((before, after),) = megatron_ranks.run(after_a_clip, "gqa", 1, {"attention_output_gate": True}, world=1)
    assert max(before.max_logit_lh[0]) > 3.3
    assert max(after.max_logit_lh[0]) <= 3.0 * (1 + 1e-3)


def given_maxima(context: Context, kind: str, tp: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    from megatron_stability.megatron.attention.attention_layers import find
    from megatron_stability.megatron.attention.qk_clip import Clip
    from megatron_stability.numerics.qk_clip import gamma
    from megatron_stability.observe.config import QKClip

    context.megatron(tp=tp)
    gpt = models.model(models.config(kind, tp, layers=2, **options))
    models.fill(gpt)
    s_lh = torch.rand(2, models.HEADS, generator=torch.Generator().manual_seed(5)) * 200 - 20
    Clip(find([gpt]), None, QKClip(tau=30.0, alpha=0.4))(gamma(s_lh, 30.0))
    return {
        name: parameter.detach().clone()
        for name, parameter in gpt.named_parameters()
        if any(part in name for part in ("linear_qkv.", "linear_q_up", "linear_kv_up", "q_layernorm", "k_layernorm"))
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in KINDS] + [("gqa", {"attention_output_gate": True}), ("gqa", {"qk_layernorm": True})],
    ids=[*KINDS, "gate", "qk_layernorm"],
)
def test_case_1_shards_concatenated_equal_tp_1_bit_for_bit(
    megatron_ranks: Pool, kind: str, options: dict[str, Any]
) -> None:
    (whole,) = megatron_ranks.run(given_maxima, kind, 1, options, world=1)
    for tp in (2, 4):
        shards = megatron_ranks.run(given_maxima, kind, tp, options, world=tp)
        for name, value in whole.items():
            parts = [shard[name] for shard in shards]
            if "layernorm" in name:
                assert all(torch.equal(part, value) for part in parts)
            else:
                assert torch.equal(torch.cat(parts), value)


def frozen_and_untouched(context: Context) -> dict[str, bool]:
    """Bit-identity of everything that no rule names, and of a frozen layer."""
    context.megatron()
    gpt = models.model(models.config("gqa", layers=2, attention_output_gate=True))
    models.fill(gpt)
    gpt.decoder.layers[1].self_attention.linear_qkv.weight.requires_grad = False
    kept = {name: parameter.detach().clone() for name, parameter in gpt.named_parameters()}
    run_step(context, models.hook([gpt], tau=1.0), lambda: models.forward(gpt))
    same = {name: torch.equal(parameter, kept[name]) for name, parameter in gpt.named_parameters()}
    first = gpt.decoder.layers[0].self_attention.linear_qkv
    was = {"weight": kept["decoder.layers.0.self_attention.linear_qkv.weight"], "bias": first.bias}
    was["bias"] = kept["decoder.layers.0.self_attention.linear_qkv.bias"]
    for name in ("weight", "bias"):  # [q 4, gate 4, k, v] heads a group
        now, before = (x.view(2, 10, models.HEAD, -1) for x in (getattr(first, name).detach(), was[name]))
        same[f"gate {name}"] = torch.equal(now[:, 4:8], before[:, 4:8])
        same[f"v {name}"] = torch.equal(now[:, 9:], before[:, 9:])
        same[f"q {name}"] = torch.equal(now[:, :4], before[:, :4])
    return same


def test_gate_and_value_rows_and_frozen_layers_keep_their_bits(megatron_ranks: Pool) -> None:
    (same,) = megatron_ranks.run(frozen_and_untouched, world=1)
    changed = {name for name, equal in same.items() if not equal}
    qkv = "decoder.layers.0.self_attention.linear_qkv"
    assert changed == {f"{qkv}.weight", f"{qkv}.bias", "q weight", "q bias"}


def skipped(context: Context) -> bool:
    context.megatron()
    gpt = models.model(models.config("gqa"))
    models.fill(gpt)
    kept = [parameter.detach().clone() for parameter in gpt.parameters()]
    record, table = run_step(context, models.hook([gpt], tau=1.0), lambda: models.forward(gpt), updated=False)
    assert record.signals["qk_clip/heads"] > 0
    assert set(table.factor_lh[0]) == {1.0}
    return all(torch.equal(a, b) for a, b in zip(kept, gpt.parameters(), strict=True))


def test_case_6_a_skipped_step_clips_nothing(megatron_ranks: Pool) -> None:
    assert megatron_ranks.run(skipped, world=1) == [True]


def not_finite(context: Context, bad: float) -> tuple[bool, StepRecord]:
    """Rank 1's data make one head's logits NaN or Inf; rank 0's are hot and finite."""
    context.megatron()
    gpt = models.model(models.config("gqa"))
    models.fill(gpt)
    kept = [parameter.detach().clone() for parameter in gpt.parameters()]
    hook = models.hook([gpt], tau=1.0)

    def spoil(module: Any, inputs: Any) -> None:
        if context.rank == 1:
            inputs[0][0, 5, 3, 2] = bad

    softmax = gpt.decoder.layers[0].self_attention.core_attention.scale_mask_softmax
    handle = softmax.register_forward_pre_hook(spoil, prepend=True)
    record, _ = run_step(context, hook, lambda: models.forward(gpt))
    handle.remove()
    return all(torch.equal(a, b) for a, b in zip(kept, gpt.parameters(), strict=True)), record


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_case_3_nan_or_inf_in_one_head_writes_nothing_and_is_a_finding(megatron_ranks: Pool, bad: float) -> None:
    from megatron_stability.detect.config import Early, Switch
    from megatron_stability.detect.non_finite import NonFinite

    for same, record in megatron_ranks.run(not_finite, bad, world=2):
        assert same
        assert record.signals["attention/nonfinite_heads"] == 1
        verdict = NonFinite(Switch(), Early()).inspect(record)
        assert verdict is not None
        assert "attention logit in 1 heads" in verdict.reason


def odd_models(context: Context) -> list[Any]:
    """An fp32 model without wrappers, with an MTP block, and a layer without self-attention."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.identity_op import IdentityOp

    context.megatron()
    config = models.config("gqa", layers=3, mtp_num_layers=1)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    middle = block.layer_specs[1] = copy.copy(block.layer_specs[1])
    middle.submodules = dataclasses.replace(middle.submodules, self_attention=IdentityOp)
    gpt = GPTModel(
        config,
        block,
        vocab_size=models.VOCAB,
        max_sequence_length=models.SEQ,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, block.layer_specs[2], use_transformer_engine=False),
    )
    models.fill(gpt)
    from megatron_stability.megatron.attention.attention_layers import find

    return [layer.name for layer in find([gpt])]


def test_case_8_fp32_models_mtp_blocks_and_layers_without_attention(megatron_ranks: Pool) -> None:
    (names,) = megatron_ranks.run(odd_models, world=1)
    assert names[:2] == ["decoder.layers.0", "decoder.layers.2"]
    assert len(names) == 3
    assert names[2].startswith("mtp.")


def refused_flags(context: Context) -> dict[str, str]:
    from argparse import Namespace

    from megatron_stability.config import StabilityConfig
    from megatron_stability.megatron.attention.qk_clip import refuse_what_cannot_work

    def ask(tree: dict[str, Any], **flags: Any) -> str:
        args = Namespace(**{"context_parallel_size": 1} | flags)
        try:
            refuse_what_cannot_work(StabilityConfig.model_validate(tree), args)
        except UsageError as error:
            return str(error)
        return ""

    on = {"qk_clip": {"enabled": True}}
    probe = {"qk_clip": {"measure": "probe"}, "observe": {"attention": {"enabled": True}}}
    flags = (
        "qk_clip",
        "qk_l2_norm",
        "fp8_param_gather",
        "optimizer_cpu_offload",
    )
    answers = {name: ask(on, **{name: True}) for name in (*flags, "overlap_param_gather_with_optimizer_step")}
    answers |= {"context_parallel_size": ask(probe, context_parallel_size=2)}
    answers |= {"overlap_param_gather": ask(probe, overlap_param_gather=True)}
    assert ask(on, overlap_param_gather=True) == ask({}, qk_clip=True) == ask(on) == ""
    return answers


def test_flags_that_can_not_be_had_together_are_refused_by_name(megatron_ranks: Pool) -> None:
    (answers,) = megatron_ranks.run(refused_flags, world=1)
    for name, sentence in answers.items():
        assert "--" + name.replace("_", "-") in sentence


def trained(context: Context, tau: float) -> list[float]:
    """Muon at a rate that makes logits run away; the largest logit of every step's own forward, on new tokens each."""
    context.megatron()
    gpt = models.model(models.config("gqa"))
    models.fill(gpt, 0.2)
    ddp, optimizer = models.wrapped(gpt, "dist-muon", lr=0.01)
    hook = models.hook([ddp], optimizer, tau=tau, headroom=0.5)
    largest = []
    for step in range(1, 61):
        hook.step_begins(step)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        models.forward(ddp, rows=4, seed=2 * step + context.rank).mean().backward()
        ddp.finish_grad_sync()
        record = step_record(context, hook, step)
        assert optimizer.step()[0]
        hook.update_done(record, updated=True)
        largest.append(record.signals["attention/max_logit"])
    return largest


def test_muon_runs_away_without_the_clip_and_stays_below_tau_with_it(megatron_ranks: Pool) -> None:
    """Sixty steps; 300 of whole models are in `docs/muonclip.json`."""
    free = megatron_ranks.run(trained, 1e9, world=2, timeout=120)[0]
    assert max(free) > 40.0
    for largest in megatron_ranks.run(trained, 20.0, world=2, timeout=120):
        assert 10.0 < max(largest) <= 20.0
