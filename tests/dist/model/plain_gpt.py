"""A whole GPT in plain, unsharded PyTorch, from the formulas: what every layout is compared with.

Weights are whole tensors by Megatron's names, as `prevention_models` cuts them; the shapes and settings are the
`configuration` that a model is built from, and the `model` section.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_stability.numerics.config import Model
from tests.dist.model import prevention_models as small
from tests.unit.numerics import prevention_references as reference

Weights = dict[str, Tensor]
Batch = tuple[Tensor, Tensor, Tensor]


def random_weights(config: dict[str, Any], model: Model, seed: int = 3) -> Weights:
    """fp32; large enough that attention is not flat and that caps and norms matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config, model).items():
        norm = name.endswith(("layernorm.weight", "norm.weight"))
        if name.endswith("softmax_offset"):
            weights[name] = torch.randn(shape, generator=generator)
        elif norm:
            gain = 0.5 + torch.rand(shape, generator=generator)
            weights[name] = gain - 1 if config.get("layernorm_zero_centered_gamma") else gain
        elif name.endswith("bias"):
            weights[name] = 0.3 * torch.randn(shape, generator=generator)
        else:
            weights[name] = 0.3 * torch.randn(shape, generator=generator)
    return weights


def shapes(config: dict[str, Any], model: Model) -> dict[str, tuple[int, ...]]:
    """Of every weight, by name."""
    hidden = config["hidden_size"]
    found = {"embedding.word_embeddings.weight": (small.PADDED, hidden), "output_layer.weight": (small.PADDED, hidden)}
    found |= _norm("decoder.final_layernorm", hidden, config["normalization"])
    for layer in range(config["num_layers"]):
        found |= _layer(f"decoder.layers.{layer}.", config, model)
    for depth in range(config.get("mtp_num_layers") or 0):
        prefix = f"mtp.layers.{depth}."
        found |= {f"{prefix}eh_proj.weight": (hidden, 2 * hidden)}
        for name in ("enorm", "hnorm", "final_layernorm"):
            found |= _norm(prefix + name, hidden, config["normalization"])
        found |= _layer(f"{prefix}mtp_model_layer.", config, model)
    return found


def _norm(name: str, width: int, kind: str) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if kind.lower() == "layernorm" else ("weight",)
    return {f"{name}.{part}": (width,) for part in parts}


def _layer(prefix: str, config: dict[str, Any], model: Model) -> dict[str, tuple[int, ...]]:
    hidden, heads, groups = (config[name] for name in ("hidden_size", "num_attention_heads", "num_query_groups"))
    width, ffn = config["kv_channels"], config["ffn_hidden_size"]
    rows = (heads * (2 if config.get("attention_output_gate") else 1) + 2 * groups) * width
    found = _norm(f"{prefix}input_layernorm", hidden, config["normalization"])
    found |= _norm(f"{prefix}pre_mlp_layernorm", hidden, config["normalization"])
    found[f"{prefix}self_attention.linear_qkv.weight"] = (rows, hidden)
    found[f"{prefix}self_attention.linear_proj.weight"] = (hidden, heads * width)
    if config.get("softmax_type") == "learnable":
        found[f"{prefix}self_attention.core_attention.softmax_offset"] = (heads,)
    if model.qk_norm not in ("none", "rms_no_gain"):
        whole = model.qk_norm == "rmsnorm_whole"
        for part, count in (("q", heads), ("k", groups)):
            size = count * width if whole else width
            found |= _norm(f"{prefix}self_attention.{part}_layernorm", size, model.qk_norm)
    mlps = [f"{prefix}mlp."]
    if experts := config.get("num_moe_experts"):
        found[f"{prefix}mlp.router.weight"] = (experts, hidden)
        mlps = [f"{prefix}mlp.experts.local_experts.{expert}." for expert in range(experts)]
    for mlp in mlps:
        found |= {f"{mlp}linear_fc1.weight": (2 * ffn, hidden), f"{mlp}linear_fc2.weight": (hidden, ffn)}
    return found


class PlainGPT:
    """The model of some weights; fp64 if they are."""

    def __init__(self, weights: Weights, config: dict[str, Any], model: Model) -> None:
        self.weights, self.config, self.model = weights, config, model

    def objective(self, batches: list[Batch]) -> tuple[Tensor, list[Tensor]]:
        """What a step differentiates, and the [b, s] losses of each micro-batch: (cross-entropy + β·log-Z²) of every
        valid token over the number of valid tokens of the global batch, or of the micro-batch and micro-batches.
        """
        per_token = self.config.get("calculate_per_token_loss", False)
        everything = sum(float(mask.sum()) for *_, mask in batches)
        total, losses = torch.zeros((), dtype=torch.float64), []
        for tokens, labels, mask in batches:
            count = everything if per_token else len(batches) * float(mask.sum())
            hidden = self.hidden(tokens)
            loss, differentiated = self.token_losses(self.final(hidden), labels)
            losses.append(loss.detach())
            total = total + (differentiated * mask).sum() / count
            total = total + self.multi_token(hidden, tokens, labels, mask) * float(mask.sum()) / count
        return total, losses

    def token_losses(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(cross-entropy, cross-entropy + β·log-Z²) of each token."""
        vocab_size = small.VOCAB if self.model.changes_loss else small.PADDED  # stock Megatron counts padding in
        logits = hidden @ self.weights["output_layer.weight"].T
        loss, log_z = reference.token_losses(logits, labels, vocab_size, self.model.final_softcap, 0.0)
        return loss, loss + self.model.z_loss * log_z.square()

    def logits(self, tokens: Tensor) -> Tensor:
        """[b, s, PADDED], capped."""
        logits = self.final(self.hidden(tokens)) @ self.weights["output_layer.weight"].T
        cap = self.model.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def hidden(self, tokens: Tensor) -> Tensor:
        """[b, s, h] before the final norm."""
        x = self.weights["embedding.word_embeddings.weight"][tokens]
        for layer in range(self.config["num_layers"]):
            x = self.layer(x, f"decoder.layers.{layer}.")
        return x

    def final(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden, "decoder.final_layernorm")

    def multi_token(self, hidden: Tensor, tokens: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """The heads' share, a mean over their own valid tokens (DeepSeek-V3, arXiv:2412.19437)."""
        total = torch.zeros((), dtype=torch.float64)
        depths = self.config.get("mtp_num_layers") or 0
        hidden = self.final(hidden)
        for depth in range(depths):
            prefix = f"mtp.layers.{depth}."
            tokens, labels, mask = (F.pad(x[:, 1:], (0, 1)) for x in (tokens, labels, mask))
            embedded = self.weights["embedding.word_embeddings.weight"][tokens]
            both = torch.cat([self.norm(embedded, f"{prefix}enorm"), self.norm(hidden, f"{prefix}hnorm")], dim=-1)
            hidden = self.layer(both @ self.weights[f"{prefix}eh_proj.weight"].T, f"{prefix}mtp_model_layer.")
            hidden = self.norm(hidden, f"{prefix}final_layernorm")
            _, differentiated = self.token_losses(hidden, labels)
            scale = self.config["mtp_loss_scaling_factor"] / depths
            total = total + scale * (differentiated * mask).sum() / float(mask.sum())
        return total

    def layer(self, x: Tensor, prefix: str) -> Tensor:
        x = x + self.attention(self.norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attention.")
        y = self.norm(x, f"{prefix}pre_mlp_layernorm")
        return x + (self.experts if self.config.get("num_moe_experts") else self.mlp)(y, f"{prefix}mlp.")

    def norm(self, x: Tensor, name: str) -> Tensor:
        kind, gain = self.config["normalization"].lower(), self.weights[f"{name}.weight"]
        gain = gain + 1 if self.config.get("layernorm_zero_centered_gamma") else gain
        return reference.norm(x, kind, gain, self.weights.get(f"{name}.bias"), self.config["layernorm_epsilon"])

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (x @ self.weights[f"{prefix}linear_fc1.weight"].T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.weights[f"{prefix}linear_fc2.weight"].T

    def experts(self, x: Tensor, prefix: str) -> Tensor:
        scores, chosen = (x @ self.weights[f"{prefix}router.weight"].T).topk(self.config["moe_router_topk"])
        share = torch.zeros(*x.shape[:-1], self.config["num_moe_experts"], dtype=x.dtype)
        share = share.scatter(-1, chosen, scores.softmax(-1))
        made = [self.mlp(x, f"{prefix}experts.local_experts.{e}.") for e in range(share.shape[-1])]
        return sum(share[..., e : e + 1] * one for e, one in enumerate(made))

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_query_groups"]
        width, gated = self.config["kv_channels"], self.config.get("attention_output_gate", False)
        share = heads // groups
        rows = (x @ self.weights[f"{prefix}linear_qkv.weight"].T).unflatten(-1, (groups, -1, width))
        sizes = (share, share, 1, 1) if gated else (share, 1, 1)
        q, *gate, k, v = rows.split(sizes, dim=-2)
        q, k = q.flatten(-3, -2), k.flatten(-3, -2)  # [b, s, heads or groups, d]
        q, k = rotated(self.qk_norm(q, f"{prefix}q_layernorm")), rotated(self.qk_norm(k, f"{prefix}k_layernorm"))
        k, v = k.repeat_interleave(share, dim=2), v.flatten(-3, -2).repeat_interleave(share, dim=2)
        probabilities = self.probabilities(torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width), prefix)
        out = torch.einsum("bhqk,bkhd->bqhd", probabilities, v)
        if gated:
            out = out * gate[0].flatten(-3, -2).sigmoid()
        return out.flatten(-2) @ self.weights[f"{prefix}linear_proj.weight"].T

    def qk_norm(self, x: Tensor, name: str) -> Tensor:
        if self.model.qk_norm == "none":
            return x
        gain, bias = self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        if gain is not None and self.config.get("layernorm_zero_centered_gamma"):
            gain = gain + 1
        normed = reference.norm(x, self.model.qk_norm, gain, bias, self.config["layernorm_epsilon"])
        return self.model.qk_norm_scale * normed

    def probabilities(self, scores: Tensor, prefix: str) -> Tensor:
        if (cap := self.model.attention_softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        place = torch.arange(scores.shape[-1])
        behind = place.unsqueeze(1) - place
        window = self.config.get("window_size")
        hidden = (behind < 0) | (behind > (len(place) if window is None else window[0]))
        weights = scores.exp().masked_fill(hidden, 0.0)
        below = weights.sum(-1, keepdim=True)
        if (sink := self.weights.get(f"{prefix}core_attention.softmax_offset")) is not None:
            below = below + sink.exp().view(1, -1, 1, 1)
        return weights / below


def rotated(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding of [b, s, heads, d]: the first half of the channels is turned with the second."""
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = (torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(1) * rate).unsqueeze(1)
    first, second = x.split(half, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)
