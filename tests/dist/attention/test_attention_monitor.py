"""What is measured, and by what: local softmax, a kernel, the probe; global over ranks, and of one step alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.dist.attention import attention_models as models
from tests.dist.attention.hook_steps import record as step_record
from tests.dist.attention.hook_steps import step as run_step
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron


def stages(context: Context) -> list[Any]:
    """PP 2, TP 1: each rank runs its stage; the hottest head is on stage 0. Then all logits negative."""
    from megatron.core import parallel_state

    context.megatron(pp=2)
    first = parallel_state.is_pipeline_first_stage()
    gpt = models.model(models.config("gqa", pp=2, layers=2), pre=first, post=not first)
    models.fill(gpt, 0.9 if first else 0.3)
    hook = models.hook([gpt], tau=1e6)

    def forward() -> None:
        tokens, positions = models.batch()
        if not first:
            gpt.set_input_tensor(torch.randn(models.SEQ, 2, models.HIDDEN))
        gpt(tokens, positions, None, labels=None if first else tokens)

    seen = [run_step(context, hook, forward)]
    core = gpt.decoder.layers[0].self_attention.core_attention
    core.register_forward_pre_hook(lambda _, inputs: (inputs[0].abs(), -inputs[1].abs(), *inputs[2:]))
    seen.append(run_step(context, hook, forward, number=2))
    return [(record.signals, table) for record, table in seen]


def test_case_7_the_logged_maximum_is_global_and_negative_ones_are_reported_as_they_are(megatron_ranks: Pool) -> None:
    results = megatron_ranks.run(stages, world=2)
    assert repr(results[0]) == repr(results[1])
    (signals, table), (negative, below) = results[0]
    assert table.layers == ("decoder.layers.0", "decoder.layers.1")
    assert max(table.max_logit_lh[0]) > max(table.max_logit_lh[1])
    assert signals["attention/max_logit"] == max(table.max_logit_lh[0])
    assert negative["attention/max_logit"] == max(max(row) for row in below.max_logit_lh) < 0
    assert negative["attention/nonpositive_heads"] == 2 * models.HEADS


def cooling(context: Context) -> tuple[list[float], int]:
    import gc

    context.megatron()
    gpt = models.model(models.config("gqa"))
    models.fill(gpt)
    hook = models.hook([gpt], tau=1e6)
    maxima, counts = [], []
    core = gpt.decoder.layers[0].self_attention.core_attention
    handle = core.register_forward_pre_hook(lambda _, inputs: (3 * inputs[0], *inputs[1:]))
    for step in range(1, 1001):
        if step == 3:
            handle.remove()
        record, _ = run_step(context, hook, lambda: models.forward(gpt, rows=1), number=step)
        maxima.append(record.signals["attention/max_logit"])
        if step in (10, 1000):
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    return maxima, counts[1] - counts[0]


def test_case_9_the_maximum_is_of_the_step_and_nothing_is_retained(megatron_ranks: Pool) -> None:
    ((maxima, more_tensors),) = megatron_ranks.run(cooling, world=1, timeout=240)
    assert maxima[0] == maxima[1] == pytest.approx(3 * maxima[2])
    assert set(maxima[2:]) == {maxima[2]}
    assert more_tensors == 0


def monitor_only(context: Context, measure: str) -> Any:
    from megatron_stability.config import StabilityConfig
    from megatron_stability.megatron.attention.qk_clip import AttentionHook, wanted

    context.megatron()
    gpt = models.model(models.config("gqa"), cap=2.0)
    models.fill(gpt)
    tree = StabilityConfig.model_validate(
        {"observe": {"attention": {"enabled": True, "every": 1}}, "qk_clip": {"measure": measure}}
    )
    assert wanted(tree)
    hook = AttentionHook(tree, [gpt], None, torch.device("cpu"))
    hook.train_begins()
    kept = [parameter.detach().clone() for parameter in gpt.parameters()]
    record, table = run_step(context, hook, lambda: models.forward(gpt, rows=1))
    assert all(torch.equal(a, b) for a, b in zip(kept, gpt.parameters(), strict=True))
    if measure == "probe":  # what it saw after the update is in the next step's record
        assert not record.signals
        hook.step_begins(2)
        record = step_record(context, hook)
    assert "qk_clip/heads" not in record.signals
    assert record.signals["attention/max_logit"] == max(table.max_logit_lh[0])
    return table


def test_case_10_a_monitor_without_clipping_collects_and_sees_through_a_cap(megatron_ranks: Pool) -> None:
    tables = [megatron_ranks.run(monitor_only, measure, world=1)[0] for measure in ("forward", "probe")]
    assert max(tables[0].max_logit_lh[0]) > 2.0  # the cap's
    for forward, probe in zip(tables[0].max_logit_lh[0], tables[1].max_logit_lh[0], strict=True):
        assert probe == pytest.approx(forward, rel=1e-5)
    for forward, probe in zip(tables[0].entropy_lh[0], tables[1].entropy_lh[0], strict=True):
        assert probe == pytest.approx(forward, rel=1e-4)


def from_the_kernel(context: Context, tp: int) -> tuple[Any, Any, Any]:
    """A core attention that keeps its heads' maxima as TEDotProductAttention does, over two micro-batches."""
    from megatron_stability.megatron.attention.core_attention import CoreAttention
    from megatron_stability.numerics.attention_probe import Mask, of_queries_and_keys

    class Kernel(CoreAttention):
        def forward(self, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            largest = of_queries_and_keys(query, key, Mask(), scale=models.HEAD**-0.5, entropy=False).max_h
            before = self.current_max_attn_logits
            self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)
            return super().forward(query, key, *args, **kwargs)

    context.megatron(tp=tp)
    gpt = models.model(models.config("gqa", tp))
    models.fill(gpt)
    forwards = lambda: [models.forward(gpt, rows=1, seed=seed) for seed in (0, 1)]  # noqa: E731
    _, local = run_step(context, models.hook([gpt], tau=1e9), forwards)
    core = gpt.decoder.layers[0].self_attention.core_attention
    core.__class__, core.current_max_attn_logits = Kernel, None
    hook = models.hook([gpt], tau=3.0)
    _, before = run_step(context, hook, forwards)
    _, after = run_step(context, hook, forwards, updated=False)
    return local, before, after


@pytest.mark.parametrize("tp", [1, 2])
def test_maxima_that_the_kernel_returns_are_the_ones_clipped(megatron_ranks: Pool, tp: int) -> None:
    for local, before, after in megatron_ranks.run(from_the_kernel, tp, world=tp):
        assert before.max_logit_lh[0] == pytest.approx(local.max_logit_lh[0], rel=1e-5)
        assert all(math.isnan(entropy) for entropy in before.entropy_lh[0])  # it returns none
        assert after.max_logit_lh[0] == pytest.approx([min(was, 3.0) for was in before.max_logit_lh[0]], rel=1e-3)


def probed(context: Context, kind: str, tp: int) -> list[float]:
    """The update itself makes heads hot: twice as large projections, after the forward and before the clip."""
    context.megatron(tp=tp)
    gpt = models.model(models.config(kind, tp))
    models.fill(gpt)
    hook = models.hook([gpt], tau=3.0, measure="probe")
    hook.step_begins(1)
    models.forward(gpt, rows=1)
    record = step_record(context, hook)
    for name, parameter in gpt.named_parameters():
        if "linear_qkv" in name or "_up_proj" in name:
            parameter.data.mul_(2)
    before = hook.update_done(record, updated=True)
    hook.step_begins(2)
    models.forward(gpt, rows=1)
    after = hook.update_done(step_record(context, hook, 2), updated=True)
    return [max(before.max_logit_lh[0]), max(after.max_logit_lh[0]), min(after.factor_lh[0])]


@pytest.mark.parametrize(("kind", "tp"), [("gqa", 1), ("gqa", 4), ("mla", 2)])
def test_the_probe_sees_the_updated_weights_and_leaves_every_head_at_most_at_tau(
    megatron_ranks: Pool, kind: str, tp: int
) -> None:
    for before, after, _ in megatron_ranks.run(probed, kind, tp, world=tp):
        assert before > 12.0
        assert after <= 3.0 * (1 + 1e-3)
