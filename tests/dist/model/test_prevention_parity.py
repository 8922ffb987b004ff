"""Parity with `transformers`: tiny random models, weights copied in, fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_stability.numerics.config import Model
from tests.dist.model import prevention_models as small
from tests.dist.pool import Context, Pool
from tests.unit.numerics.prevention_references import relative, token_losses

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.megatron

LAYOUTS = {"tp1": small.layout(1), "tp2": small.layout(2, tp=2), "tp4": small.layout(4, tp=4)}  # at TP 4, 2 groups


def qkv(q: Tensor, k: Tensor, v: Tensor, groups: int = small.GROUPS) -> Tensor:
    """Megatron's fused rows: of each group its queries, key and value."""
    parts = [x.view(groups, -1, x.shape[-1]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def padded(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, 0, 0, small.PADDED - small.VOCAB))


def from_qwen3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's whole weights (or gradients) from those of a Qwen3ForCausalLM."""
    out = {
        "embedding.word_embeddings.weight": padded(state["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": padded(state["lm_head.weight"]),
    }
    for i in range(small.LAYERS):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        attention = theirs + "self_attn."
        out |= {
            ours + "input_layernorm.weight": state[theirs + "input_layernorm.weight"],
            ours + "pre_mlp_layernorm.weight": state[theirs + "post_attention_layernorm.weight"],
            ours + "self_attention.linear_qkv.weight": qkv(*(state[f"{attention}{x}_proj.weight"] for x in "qkv")),
            ours + "self_attention.q_layernorm.weight": state[attention + "q_norm.weight"],
            ours + "self_attention.k_layernorm.weight": state[attention + "k_norm.weight"],
            ours + "self_attention.linear_proj.weight": state[attention + "o_proj.weight"],
            ours + "mlp.linear_fc1.weight": torch.cat(
                [state[theirs + "mlp.gate_proj.weight"], state[theirs + "mlp.up_proj.weight"]]
            ),
            ours + "mlp.linear_fc2.weight": state[theirs + "mlp.down_proj.weight"],
        }
    return out


@pytest.fixture(scope="module")
def qwen3() -> Any:
    torch.manual_seed(11)
    config = transformers.Qwen3Config(
        vocab_size=small.VOCAB,
        hidden_size=small.HIDDEN,
        intermediate_size=small.FFN,
        num_hidden_layers=small.LAYERS,
        num_attention_heads=small.HEADS,
        num_key_value_heads=small.GROUPS,
        head_dim=small.HEAD_DIM,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        attn_implementation="eager",
        initializer_range=0.2,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def step_and_logits(context: Context, where: dict[str, Any], model: Model, weights: dict[str, Tensor]) -> Any:
    losses, gradients = small.train_step(context, where, model, weights, small.batches())
    return losses, gradients, small.logits(context, where, model, weights, small.batches()[0][0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_qwen3_with_softcap_and_z_loss(megatron_ranks: Pool, qwen3: Any, name: str) -> None:
    """Whole model: per-head QK-norm and GQA are Qwen3's own; final cap and z-loss are the formulas on its logits."""
    where = LAYOUTS[name] | {"more": {"calculate_per_token_loss": True}}
    model = Model(qk_norm="rmsnorm", final_softcap=2.0, z_loss=0.05)
    weights = from_qwen3({k: v.detach() for k, v in qwen3.state_dict().items()})
    results = megatron_ranks.run(step_and_logits, where, model, weights, world=where["world"], timeout=400)

    qwen3.zero_grad()
    total = torch.zeros(())
    everything = sum(float(mask.sum()) for *_, mask in small.batches())
    expected = []
    for tokens, labels, mask in small.batches():
        cross_entropy, log_z = token_losses(qwen3(tokens).logits, labels, small.VOCAB, 2.0, 0.0)
        expected.append(cross_entropy.detach())
        total = total + ((cross_entropy + 0.05 * log_z.square()) * mask).sum() / everything
    total.backward()

    losses, _, logits = results[-1]
    for got, wanted in zip(losses, expected, strict=True):
        assert relative(got, wanted) < 1e-5
    raw = qwen3(small.batches()[0][0]).logits
    assert relative(logits[..., : small.VOCAB], 2.0 * torch.tanh(raw / 2.0)) < 1e-5
    assert logits.abs().max() <= 2.0
    gradients = small.whole_gradients(where, [result[:2] for result in results])
    theirs = from_qwen3({n: p.grad for n, p in qwen3.named_parameters()})
    assert gradients.keys() == theirs.keys()
    worst = {name: relative(gradients[name], theirs[name]) for name in theirs}
    assert max(worst.values()) < 1e-5, worst


# --- one attention layer --------------------------------------------------------------------------------------------


def attention_layer(
    context: Context, where: dict[str, Any], model: Model, weights: dict[str, Tensor], x: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and input gradient of a decoder layer's self-attention, [b, s, h]."""
    chunk = small.build(context, where, model, None)[0]
    attention = chunk.decoder.layers[0].self_attention
    rank = context.rank
    for name, parameter in attention.named_parameters():
        parameter.data.copy_(small.cut(name, weights[name], parameter, rank, where["tp"]))
    rotary = chunk.rotary_pos_emb(small.SEQUENCE)
    inputs = x.transpose(0, 1).contiguous().requires_grad_()
    out, _ = attention(inputs, None, rotary_pos_emb=rotary)
    out.backward(dy.transpose(0, 1))
    return out.detach().transpose(0, 1), inputs.grad.transpose(0, 1)


def hf_attention(kind: str, window: int | None) -> tuple[Any, Any]:
    """(rotary module, attention module with sharpened weights) of a model family."""
    common = {
        "vocab_size": small.VOCAB,
        "hidden_size": small.HIDDEN,
        "intermediate_size": small.FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": small.HEADS,
        "num_key_value_heads": small.GROUPS,
        "rms_norm_eps": 1e-6,
        "attn_implementation": "eager",
    }
    torch.manual_seed(4)
    if kind == "olmo2":
        from transformers.models.olmo2 import modeling_olmo2 as module

        config = transformers.Olmo2Config(**common, rope_theta=10000.0)
        rotary, attention = module.Olmo2RotaryEmbedding(config), module.Olmo2Attention(config, layer_idx=0)
    elif kind == "gemma2":
        from transformers.models.gemma2 import modeling_gemma2 as module

        config = transformers.Gemma2Config(
            **common, head_dim=small.HEAD_DIM, query_pre_attn_scalar=16, sliding_window=window
        )
        rotary, attention = module.Gemma2RotaryEmbedding(config), module.Gemma2Attention(config, layer_idx=0)
        assert config.attn_logit_softcapping == 50.0
    else:
        from transformers.models.gemma3 import modeling_gemma3 as module

        config = transformers.Gemma3TextConfig(
            **common, head_dim=small.HEAD_DIM, query_pre_attn_scalar=16, sliding_window=window
        )
        rotary, attention = module.Gemma3RotaryEmbedding(config), module.Gemma3Attention(config, layer_idx=0)
    for name, parameter in attention.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, -0.5 if kind == "gemma3" else 0.5, 0.5 if kind == "gemma3" else 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.0)  # logits of the cap's size
    return rotary, attention.eval()


KINDS = {
    "olmo2": (Model(qk_norm="rmsnorm_whole"), None, {}),
    "gemma2": (Model(attention_softcap=50.0), 5, {"softmax_scale": 0.25, "window_size": (4, 0)}),
    "gemma3": (
        Model(qk_norm="rmsnorm"),
        5,
        {"softmax_scale": 0.25, "window_size": (4, 0), "layernorm_zero_centered_gamma": True},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_attention_of(megatron_ranks: Pool, kind: str, tp: int) -> None:
    model, window, more = KINDS[kind]
    rotary, attention = hf_attention(kind, window)
    generator = torch.Generator().manual_seed(8)
    x, dy = (torch.randn(2, small.SEQUENCE, small.HIDDEN, generator=generator) for _ in range(2))
    state = {n: p.detach() for n, p in attention.named_parameters()}
    weights = {
        "linear_qkv.weight": qkv(*(state[f"{part}_proj.weight"] for part in "qkv")),
        "linear_proj.weight": state["o_proj.weight"],
    }
    weights |= {
        f"{part}_layernorm.weight": state[f"{part}_norm.weight"] for part in "qk" if f"{part}_norm.weight" in state
    }
    where = small.layout(tp, tp=tp, num_layers=1, **more)
    got = megatron_ranks.run(attention_layer, where, model, weights, x, dy, world=tp, timeout=300)

    position_ids = torch.arange(small.SEQUENCE).unsqueeze(0)
    arguments = ("sliding_attention",) if kind == "gemma3" else ()
    cosine_sine = rotary(x, position_ids, *arguments)
    distance = position_ids.T - position_ids
    hidden = (distance < 0) | (distance >= (window or small.SEQUENCE))
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
    inputs = x.clone().requires_grad_()
    out = attention(inputs, position_embeddings=cosine_sine, attention_mask=mask)[0]
    out.backward(dy)
    for output, gradient in got:
        assert relative(output, out.detach()) < 1e-4
        assert relative(gradient, inputs.grad) < 1e-4


def capped_head(context: Context, where: dict[str, Any], weight: Tensor, hidden: Tensor, cap: float) -> Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_stability.megatron.model.loss import HeadLoss

    chunk = small.build(context, where, Model(), None)[0]
    head = chunk.output_layer
    head.weight.data.copy_(small.cut("output_layer.weight", padded(weight), head.weight, context.rank, where["tp"]))
    with torch.no_grad():
        out, _ = head(hidden.transpose(0, 1))
        capped = HeadLoss(Model(final_softcap=cap), small.VOCAB).capped(out)
        return gather_from_tensor_model_parallel_region(capped).transpose(0, 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_gemma2_final_softcap(megatron_ranks: Pool, tp: int) -> None:
    """Same logits from the same hidden states."""
    config = transformers.Gemma2Config(
        vocab_size=small.VOCAB,
        hidden_size=small.HIDDEN,
        intermediate_size=small.FFN,
        num_hidden_layers=1,
        num_attention_heads=small.HEADS,
        num_key_value_heads=small.GROUPS,
        head_dim=small.HEAD_DIM,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    torch.manual_seed(6)
    gemma = transformers.Gemma2ForCausalLM(config).eval()
    torch.nn.init.normal_(gemma.lm_head.weight, std=5.0)
    tokens = torch.randint(0, small.VOCAB, (2, small.SEQUENCE))
    seen: list[Tensor] = []
    gemma.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        expected = gemma(tokens).logits
    assert expected.abs().max() > 29.0
    where = small.layout(tp, tp=tp, num_layers=1)
    weight = gemma.lm_head.weight.detach()
    for logits in megatron_ranks.run(capped_head, where, weight, seen[0], 30.0, world=tp, timeout=200):
        assert relative(logits[..., : small.VOCAB], expected) < 1e-4
