"""Training with prevention: gains stay equal, sequence parallel without TE, embedding clip, checkpoints, µP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stability.numerics.config import Init, Model
from tests.dist.model import prevention_models as small
from tests.dist.pool import Context, Pool
from tests.unit.numerics.prevention_references import relative

pytestmark = pytest.mark.megatron


def train(
    context: Context, where: dict[str, Any], model: Model, steps: int, flags: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Losses, replicated weights and word-embedding rows' norms after `steps` steps on one batch."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from megatron_stability.megatron.model.embedding_clip import EmbeddingClipHook

    dtypes = {"bf16": flags["bf16"], "params_dtype": _dtype(flags), "pipeline_dtype": _dtype(flags)}
    where = where | {"more": where["more"] | dtypes}
    chunks = small.build(context, where, model, None)
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=flags["sharded"])
    inner = [Float16Module(config, chunk) if flags["bf16"] else chunk for chunk in chunks]
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in inner]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=0.02,
            bf16=flags["bf16"],
            params_dtype=_dtype(flags),
            use_distributed_optimizer=flags["sharded"],
            weight_decay=0.0,
        ),
        wrapped,
    )
    clip = (
        None if model.embedding_norm_clip is None else EmbeddingClipHook(model.embedding_norm_clip, wrapped, optimizer)
    )
    generator = torch.Generator().manual_seed(7 + context.rank // where["tp"])
    tokens = torch.randint(0, small.VOCAB, (2, small.SEQUENCE), generator=generator)
    losses: list[float] = []

    def forward_step(iterator: Any, chunk: Any) -> Any:
        del iterator
        output = chunk(tokens, small.positions(tokens), None, labels=tokens.roll(-1, 1))
        return output, lambda out: (out.float().mean(), {"loss": losses.append(float(out.detach().float().mean()))})

    for _ in range(steps):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter([]) for _ in wrapped] if len(wrapped) > 1 else iter([]),
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=1,
            seq_length=small.SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        if clip is not None:
            clip.update_done(None, updated)
    named = {n: p for chunk in chunks for n, p in chunk.named_parameters()}
    replicated = {n: p.detach().clone() for n, p in named.items() if not getattr(p, "tensor_model_parallel", False)}
    ends = ("word_embeddings.weight", *(("output_layer.weight",) if where["tied"] else ()))
    embeddings = [p.detach().float() for n, p in named.items() if n.endswith(ends)]
    return losses, replicated, embeddings


def _dtype(flags: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if flags["bf16"] else torch.float32


PLAIN = {"bf16": False, "sharded": False}


def variants(context: Context, sp: bool) -> list[Any]:
    """Each QK-norm variant trained 20 steps at TP 2, with the softcaps and the z-loss."""
    results = []
    for variant in ("rmsnorm", "layernorm", "rms_no_gain", "rmsnorm_whole"):
        model = Model(qk_norm=variant, attention_softcap=20.0, final_softcap=10.0, z_loss=1e-3)
        results.append(train(context, small.layout(2, tp=2, sp=sp, num_layers=2), model, 20, PLAIN))
    return results


@pytest.mark.parametrize("sp", [False, True], ids=["no-sp", "sp"])
def test_case_12_replicated_weights_stay_equal_over_20_steps(megatron_ranks: Pool, sp: bool) -> None:
    first, second = megatron_ranks.run(variants, sp, world=2, timeout=500)
    for (losses, weights, _), (_, others, _) in zip(first, second, strict=True):
        assert losses[-1] < 0.7 * losses[0]
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
        gains = [w for n, w in weights.items() if n.endswith(("q_layernorm.weight", "k_layernorm.weight"))]
        assert all((gain != 1).any() for gain in gains)
    assert len([n for n in first[3][1] if "q_layernorm" in n]) == 2
    assert first[3][1]["decoder.layers.0.self_attention.q_layernorm.weight"].shape == (small.HEADS * small.HEAD_DIM,)


CLIP = Model(qk_norm="rmsnorm", attention_softcap=20.0, embedding_norm_clip=0.12)


def clips(context: Context) -> list[Any]:
    """DP 2: fp32 and bf16, whole and sharded masters."""
    flags = [{"bf16": bf16, "sharded": sharded} for bf16 in (False, True) for sharded in (False, True)]
    return [train(context, small.layout(2), CLIP, 4, one) for one in flags]


def test_embedding_clip_with_every_kind_of_master(megatron_ranks: Pool) -> None:
    """A sharded master trains the rest of the model, gains included, to the same weights."""
    first, second = megatron_ranks.run(clips, world=2, timeout=400)
    for place, ((_, _, (mine,)), (_, _, (theirs,))) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(mine, theirs), place
        norms = mine.norm(dim=1)
        rounding = 2**-8 if place >= 2 else 1e-6
        assert norms.max() <= 0.12 * (1 + rounding)
        assert (norms > 0.11).any()
    assert relative(first[0][2][0], first[1][2][0]) < 1e-5
    assert relative(first[2][2][0], first[3][2][0]) < 1e-3
    for whole, sharded, tolerance in ((0, 1, 1e-5), (2, 3, 1e-2)):
        weights, others = first[whole][1], first[sharded][1]
        assert any("q_layernorm" in name for name in weights)
        assert max(relative(others[name], weight) for name, weight in weights.items()) < tolerance


def tied_clips(context: Context) -> list[Any]:
    """TP 2 × PP 2, one embedding on the first stage and its copy in the last stage's head."""
    where = small.layout(4, tp=2, pp=2, sp=True, tied=True)
    flags = [PLAIN, {"bf16": True, "sharded": False}, {"bf16": True, "sharded": True}]
    return [train(context, where, CLIP, 4, one) for one in flags]


def test_embedding_clip_of_tied_copies_on_two_stages(megatron_ranks: Pool) -> None:
    for place, run in enumerate(zip(*megatron_ranks.run(tied_clips, world=4, timeout=400), strict=True)):
        embeddings = [rank[2][0] for rank in run]
        for tensor_rank in (0, 1):
            assert torch.equal(embeddings[tensor_rank], embeddings[tensor_rank + 2]), "both copies are clipped alike"
        norms = torch.cat(embeddings[:2]).norm(dim=1)
        assert norms.max() <= 0.12 * (1 + (2**-8 if place else 1e-6))
        assert (norms > 0.11).any()


# --- checkpoints ----------------------------------------------------------------------------------------------------

VARIANTS = {
    "rmsnorm": Model(qk_norm="rmsnorm", attention_softcap=20.0, final_softcap=10.0),
    "layernorm": Model(qk_norm="layernorm"),
    "rms_no_gain": Model(qk_norm="rms_no_gain", qk_norm_scale=1.5, attention_softcap=20.0),
    "rmsnorm_whole": Model(qk_norm="rmsnorm_whole", final_softcap=10.0),
}
FOUR_GROUPS = {"num_query_groups": 4}


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def save(context: Context, where: dict[str, Any], folder: str, tokens: Tensor) -> dict[str, Tensor | None]:
    """Logits of the models that are saved, on the last stage."""
    from megatron.core import dist_checkpointing

    found = {}
    for name, model in VARIANTS.items():
        chunks = small.build(context, where, model, None)
        torch.manual_seed(1)  # gains are replicated: the same on every rank
        for key, parameter in chunks[0].named_parameters():
            if "layernorm" in key:
                torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
        target = Path(folder) / name
        if context.rank == 0:
            target.mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(chunks[0].sharded_state_dict(metadata=_metadata()), str(target))
        found[name] = small.logits_of(chunks, model, tokens)
    return found


def load(context: Context, where: dict[str, Any], folder: str, tokens: Tensor) -> dict[str, Tensor | None]:
    from megatron.core import dist_checkpointing

    found = {}
    for name, model in VARIANTS.items():
        (chunk,) = small.build(context, where, model, None)
        state = dist_checkpointing.load(chunk.sharded_state_dict(metadata=_metadata()), str(Path(folder) / name))
        chunk.load_state_dict(state)
        found[name] = small.logits_of([chunk], model, tokens)
    return found


def test_checkpoint_of_tp2_pp2_at_tp1_and_tp4(megatron_ranks: Pool, tmp_path: Path) -> None:
    """The saving model's logits, up to the order of sums; without pipeline stages, to the bit."""
    tokens = torch.randint(0, small.VOCAB, (2, small.SEQUENCE), generator=torch.Generator().manual_seed(0))
    layouts = (small.layout(tp, tp=tp, **FOUR_GROUPS) for tp in (1, 2, 4))
    saved = megatron_ranks.run(
        save, small.layout(4, tp=2, pp=2, **FOUR_GROUPS), str(tmp_path), tokens, world=4, timeout=400
    )[-1]
    one, two, four = (
        megatron_ranks.run(load, where, str(tmp_path), tokens, world=where["world"], timeout=400)[0]
        for where in layouts
    )
    for name in VARIANTS:
        assert torch.equal(two[name], saved[name])
        assert relative(one[name], saved[name]) < 1e-5
        assert relative(four[name], saved[name]) < 1e-5
        assert saved[name].std() > 0
    assert relative(saved["rmsnorm"], saved["rmsnorm_whole"]) > 1e-2  # gains and norms of a variant do matter


# --- initialisation ------------------------------------------------------------------------------------------


def deviations(context: Context) -> tuple[str, float, float]:
    from megatron_stability.megatron.model import init as built
    from megatron_stability.numerics import init_std

    model = Model(init=Init(qk="d_model", embedding="d_model"))
    where = small.layout(
        2, tp=2, embedding_init_method_std=init_std.d_model_std(small.HIDDEN), attention_output_gate=True
    )
    chunk = small.build(context, where, model, None)[0]
    rows = init_std.measure(built.expected_std([chunk], chunk.config, model))
    wrong = [row for row in rows if not row.agrees]
    assert not wrong, init_std.table(wrong)
    expected = {row.name.split("layers.0.")[-1]: row.expected for row in rows}
    return init_std.table(rows), expected["self_attention.linear_qkv.weight[q]"], expected["mlp.linear_fc2.weight"]


def test_deviations_are_read_back_from_a_built_model(megatron_ranks: Pool) -> None:
    table, q, residual = megatron_ranks.run(deviations, world=2, timeout=200)[0]
    assert "linear_qkv.weight[gate]" in table
    assert "differs" not in table
    assert q == pytest.approx(small.HIDDEN**-0.5)
    assert residual == pytest.approx(0.02 / math.sqrt(2 * small.LAYERS))


# --- µP -------------------------------------------------------------------------------------------------------------

WIDTHS = (64, 128, 256, 512)


def coordinates(context: Context) -> dict[bool, list[list[float]]]:
    """With and without µP, at each width and one head size: RMS, after 5 steps of Adam, of what every layer's
    attention and MLP give, of the hidden state before the head, and of the logits' change in these steps.
    """
    context.megatron()
    return {use_mup: [activations(context, width, use_mup) for width in WIDTHS] for use_mup in (True, False)}


def activations(context: Context, width: int, use_mup: bool) -> list[float]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_mup_config_overrides
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    shape = {"hidden_size": width, "num_attention_heads": width // 16, "num_query_groups": width // 16}
    shape |= {"kv_channels": 16, "ffn_hidden_size": 2 * width, "num_layers": 2, "init_method_std": 0.1}
    where = small.layout(1, **shape, use_mup=use_mup, mup_base_hidden_size=64 if use_mup else None)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    chunk = small.build(context, where, Model(qk_norm="rmsnorm"), None)[0]
    layers = chunk.decoder.layers
    expected = 1 / 16 if use_mup else 16**-0.5
    assert all(layer.self_attention.core_attention.softmax_scale == expected for layer in layers)
    seen: list[Tensor] = []
    for module in [part for layer in layers for part in (layer.self_attention, layer.mlp)] + [layers[-1]]:
        module.register_forward_hook(lambda _, inputs, out: seen.append(out[0].detach()))
    wrapped = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    settings = OptimizerConfig(lr=0.01, weight_decay=0.0)
    overrides = get_mup_config_overrides(settings, chunk.config.mup_width_mult) if use_mup else None
    optimizer = get_megatron_optimizer(settings, [wrapped], config_overrides=overrides)
    for group in optimizer.param_groups:  # µP's rates are the scheduler's maxima; without one they would not be used
        group["lr"] = group.get("max_lr") or settings.lr
    assert len({group["lr"] for group in optimizer.param_groups}) == (2 if use_mup and width > 64 else 1)
    tokens = torch.randint(0, small.VOCAB, (2, small.SEQUENCE), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = chunk(tokens, small.positions(tokens), None)
    for _ in range(5):
        wrapped.zero_grad_buffer()
        chunk(tokens, small.positions(tokens), None, labels=tokens.roll(-1, 1)).mean().backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    seen.clear()
    with torch.no_grad():
        after = chunk(tokens, small.positions(tokens), None)
    return [float(x.square().mean().sqrt()) for x in (*seen, (after - before)[..., : small.VOCAB])]


def test_coordinates_stay_flat_with_mup_and_grow_without(megatron_ranks: Pool) -> None:
    by_width = megatron_ranks.run(coordinates, world=1, timeout=300)[0]
    flat, growing = (list(zip(*by_width[use_mup], strict=True)) for use_mup in (True, False))
    assert all(max(values) < 1.6 * min(values) for values in flat), flat
    assert all(values[-1] > 2.0 * values[0] for values in growing), growing
