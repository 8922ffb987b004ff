"""QK-clip of a step against Megatron's own `clip_qk`: time, collectives and host synchronisations.

    python -m benchmarks.qk_clip [--layers 48] [--heads 32] [--repeats 30] [--json FILE]

Both work on the same model (Float16Module and DDP around a GPT with multi-head attention, fp32 masters) on 2 and 4
data-parallel gloo ranks of this machine's CPU, and are given the same maxima of every head. Stock reduces and reads a
layer at a time; ours reduces all at once, and reads the count of hot heads from the StepRecord, whose all-gather and
copy to the host every step makes with or without QK-clip (so they are neither timed nor counted here).

Two cases: no head above τ, and one hot head in every layer; in the second both leave the same weights (checked). The
layers are narrow, so that what is compared is the protocol and not the multiplication of weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.dist.attention import attention_models as models
from tests.dist.pool import Context, Pool, megatron_on_cpu

TAU = 100.0


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives, and reads of a tensor by the host, made inside."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, kind: str) -> Any:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return real(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor"):
            stack.enter_context(count(dist, name, "collectives"))
        for name in ("item", "tolist", "__bool__", "__float__"):
            stack.enter_context(count(torch.Tensor, name, "host syncs"))
        yield counts


def _record(context: Context, extra: Any, ways: Any) -> Any:
    from megatron_stability.observe.reduction import LocalSignals, Reduction

    local = LocalSignals(
        step=1,
        first_sample=0,
        samples=1,
        loss_sums_n2=torch.ones(1, 2),
        grad_norm=1.0,
        extra=extra,
    )
    return Reduction(context.group, torch.device("cpu"), ways)(local)


def measure(context: Context, layers: int, heads: int, repeats: int) -> dict[str, Any]:
    """Milliseconds (median), collectives and host synchronisations of both ways, in both cases."""
    from megatron.core.optimizer.qk_clip import clip_qk

    from megatron_stability.megatron.attention.qk_clip import AttentionHook, StabilityConfig
    from megatron_stability.numerics.attention_probe import HeadStatistics

    context.megatron()
    sizes = {"num_attention_heads": heads, "num_query_groups": heads, "kv_channels": 4, "ffn_hidden_size": 4}
    config = models.config("mha", layers=layers, hidden_size=heads * 4, **sizes)
    gpt = models.model(config)
    ddp, optimizer = models.wrapped(gpt, "float16")
    config.qk_clip, config.qk_clip_threshold, config.qk_clip_alpha = True, TAU, 0.5
    tree = {"qk_clip": {"enabled": True, "tau": TAU}, "observe": {"attention": {"every": 10**9}}}
    ours = AttentionHook(StabilityConfig.model_validate(tree), [ddp], optimizer, torch.device("cpu"))
    ours.train_begins()
    attentions = [layer.self_attention for layer in gpt.decoder.layers]
    weights = [w for a in attentions for w in (a.linear_qkv.weight, a.linear_qkv.weight.main_param)]
    kept = [weight.detach().clone() for weight in weights]

    def given(hot: bool) -> list[torch.Tensor]:
        s_lh = torch.full((layers, heads), 10.0)
        s_lh[:, 3] = 250.0 if hot else 20.0
        return list(s_lh)

    def prepare(way: str, hot: bool) -> None:
        for weight, value in zip(weights, kept, strict=True):
            weight.data.copy_(value)
        ours.step_begins(1)
        for attention, monitor, s_h in zip(attentions, ours._monitor._monitors, given(hot), strict=True):
            attention.core_attention.current_max_attn_logits = s_h if way == "stock" else None
            monitor._seen = HeadStatistics(s_h, torch.zeros(heads), torch.zeros(heads))

    def run(way: str, clock: Callable[[], float]) -> float:
        """One step's clip; what `clock` shows at its end less at its beginning, without the StepRecord."""
        dist.barrier(group=context.group)
        begin = clock()
        if way == "stock":
            clip_qk([ddp])
            return clock() - begin
        extra = ours.observe()
        spent = clock() - begin
        record = _record(context, extra, ours.signals)
        begin = clock()
        ours.update_done(record, updated=True)
        return spent + clock() - begin

    found: dict[str, Any] = {}
    for hot in (False, True):
        left = {}
        for way in ("stock", "ours"):
            seconds = []
            for _ in range(repeats + 3):
                prepare(way, hot)
                seconds.append(run(way, time.perf_counter))
            left[way] = [weight.detach().clone() for weight in weights]
            row: dict[str, float] = {"ms": 1e3 * statistics.median(seconds[3:])}
            for kind in ("collectives", "host syncs"):
                prepare(way, hot)
                with counted() as counts:
                    row[kind] = run(way, lambda kind=kind, counts=counts: counts[kind])
            found[f"{'one hot head a layer' if hot else 'no hot head'}: {way}"] = row
        for stock, own in zip(left["stock"], left["ours"], strict=True):
            torch.testing.assert_close(own, stock)
            assert hot != torch.equal(own, kept[0]) or not hot
    return found


def main() -> int:
    """Measure, print a table, and say by exit code whether the claim (5 times less time) holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, value in (("layers", 48), ("heads", 32), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    pool, results, holds = Pool(megatron_on_cpu), {}, True
    try:
        for world in (2, 4):
            ranks = pool.run(measure, options.layers, options.heads, options.repeats, world=world, timeout=500)
            results[f"{world} ranks"] = slowest = ranks[0]
            for case in ("no hot head", "one hot head a layer"):
                stock, ours = slowest[f"{case}: stock"], slowest[f"{case}: ours"]
                ratio = stock["ms"] / ours["ms"]
                holds &= ratio >= 5
                print(
                    f"{world} ranks, {options.layers} layers x {options.heads} heads, {case}: {ratio:.1f} x less time"
                )
                for way, row in (("stock", stock), ("ours", ours)):
                    print(
                        f"    {way:6}{row['ms']:8.2f} ms   {row.get('collectives', 0):3} collectives"
                        f"   {row.get('host syncs', 0):3} host syncs"
                    )
    finally:
        pool.close()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
