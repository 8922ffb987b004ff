"""The self-attention layers of a model: where they are, how their heads are cut, and what QK-clip scales in them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_stability.errors import UsageError
from megatron_stability.numerics import qk_clip
from megatron_stability.numerics.qk_clip import Factors


class Scaled(NamedTuple):
    """A parameter that a clip multiplies, and the factors of its rows, for layers that are alike.

    Attributes:
        module: name of the module of the self-attention that holds it.
        parameter: its name there: a weight [rows, columns], or a bias or gain [rows].
        rows: [layers, rows] fp32, for this rank's rows.
        zero_centred: the parameter holds w of a gain 1 + w.
    """

    module: str
    parameter: str
    rows: torch.Tensor
    zero_centred: bool = False

    def of(self, layer: AttentionLayer) -> torch.nn.Parameter:
        """The parameter in one of the layers."""
        found: torch.nn.Parameter = getattr(getattr(layer.module, self.module), self.parameter)
        return found


@dataclass(frozen=True)
class AttentionLayer:
    """A layer with self-attention. Query heads are cut into equal blocks, in order, over tensor-parallel ranks.

    Attributes:
        name: its path in the model, without wrappers, with the layer's global number, e.g. "decoder.layers.7".
        module: Megatron's SelfAttention or MLASelfAttention.
        heads: query heads of the whole layer, H.
        groups: key heads of the whole layer, G.
        rank: this rank's place among `world` tensor-parallel ranks.
        world: tensor-parallel size.
    """

    name: str
    module: Any
    heads: int
    groups: int
    rank: int
    world: int

    @property
    def here(self) -> slice:
        """This rank's query heads."""
        size = self.heads // self.world
        return slice(self.rank * size, (self.rank + 1) * size)

    @property
    def softmax_scale(self) -> float:
        """What a logit is q·k times, whichever kernel computes it."""
        if isinstance(self.module, MLASelfAttention):
            return float(self.module.softmax_scale)
        scale = self.module.config.softmax_scale
        return float(self.module.hidden_size_per_attention_head**-0.5 if scale is None else scale)

    @property
    def norms(self) -> tuple[Any, Any]:
        """QK-norm of q and of k, None where there is none; MLA's stand before the up-projection and don't count."""
        if isinstance(self.module, MLASelfAttention):
            return None, None
        return _gained(self.module.q_layernorm), _gained(self.module.k_layernorm)

    def scaled(self, gamma_lh: torch.Tensor, alpha: float) -> list[Scaled]:
        """What a clip multiplies on this rank, in this layer and in those of the same `form`.

        Args:
            gamma_lh: [layers, H] of all heads, equal on every tensor-parallel rank.
            alpha: the query's share.

        Returns:
            Parameters and factors.
        """
        if isinstance(self.module, MLASelfAttention):
            return self._mla(gamma_lh, alpha)
        return self._plain(gamma_lh, alpha)

    @property
    def form(self) -> Hashable:
        """Equal for layers that are clipped alike."""
        scaled = self.scaled(torch.ones(1, self.heads), 0.5)
        parts = ((one.module, one.parameter, one.rows.shape, one.zero_centred) for one in scaled)
        return (self.heads, self.groups, *parts)

    @property
    def frozen(self) -> bool:
        """Whether a clip would write to an untrained parameter: then none is made, since half of one is wrong."""
        return not all(one.of(self).requires_grad for one in self.scaled(torch.ones(1, self.heads), 0.5))

    def _mla(self, gamma_lh: torch.Tensor, alpha: float) -> list[Scaled]:
        config = self.module.config
        query = "linear_q_proj" if config.q_lora_rank is None else "linear_q_up_proj"
        q = qk_clip.mla_q_rows(gamma_lh, alpha, config.qk_head_dim, config.qk_pos_emb_head_dim)
        kv = qk_clip.mla_kv_rows(gamma_lh, alpha, config.qk_head_dim, config.v_head_dim)
        return [*self._linear(query, q), *self._linear("linear_kv_up_proj", kv)]

    def _plain(self, gamma_lh: torch.Tensor, alpha: float) -> list[Scaled]:
        q_norm, k_norm = self.norms
        q_shared, k_shared = self._shared(q_norm), self._shared(k_norm)
        factors = qk_clip.split(gamma_lh, self.groups, alpha, q_shared=q_shared, k_shared=k_shared)
        found: list[Scaled] = []
        if q_norm is not None:
            found += self._gains("q_layernorm", factors.q_h, q_shared)
        if k_norm is not None:
            found += self._gains("k_layernorm", factors.k_g, k_shared)
        if q_norm is None or k_norm is None:
            left = Factors(
                factors.q_h if q_norm is None else torch.ones_like(factors.q_h),
                factors.k_g if k_norm is None else torch.ones_like(factors.k_g),
            )
            gate = bool(getattr(self.module.config, "attention_output_gate", False))
            rows = qk_clip.qkv_rows(left, self.module.hidden_size_per_attention_head, gate)
            found += self._linear("linear_qkv", rows)
        return found

    def _linear(self, name: str, rows: torch.Tensor) -> list[Scaled]:
        here = qk_clip.shard(rows, self.rank, self.world)
        return [Scaled(name, parameter, here) for parameter in self._held(name)]

    def _held(self, name: str) -> list[str]:
        bias = getattr(getattr(self.module, name), "bias", None)
        return ["weight"] if bias is None or bias.numel() == 0 else ["weight", "bias"]

    def _shared(self, norm: Any) -> bool:
        return norm is not None and norm.weight.numel() == self.module.hidden_size_per_attention_head

    def _gains(self, name: str, factors: torch.Tensor, shared: bool) -> list[Scaled]:
        norm, size = getattr(self.module, name), self.module.hidden_size_per_attention_head
        if shared:
            factors = factors[..., :1]
        elif norm.weight.numel() < factors.shape[-1] * size:  # this rank's heads alone
            factors = qk_clip.shard(factors, self.rank, self.world)
        rows = factors.repeat_interleave(size, dim=-1)
        return [
            Scaled(name, parameter, rows, parameter == "weight" and self._zero_centred(norm))
            for parameter in self._held(name)
        ]

    def largest_gain(self) -> torch.Tensor | None:
        """max|γ| of QK-norm on this rank, fp32 scalar; None without QK-norm."""
        gains = [
            (1 + norm.weight.float() if self._zero_centred(norm) else norm.weight.float()).abs().amax()
            for norm in self.norms
            if norm is not None
        ]
        return torch.stack(gains).amax() if gains else None

    def _zero_centred(self, norm: Any) -> bool:
        return bool(getattr(norm, "zero_centered_gamma", self.module.config.layernorm_zero_centered_gamma))

    def refuse_what_cannot_be_clipped(self) -> None:
        """Raise for a layer whose logits no parameter of ours bounds.

        Raises:
            UsageError: names the layer.
        """
        if isinstance(self.module, MLASelfAttention):
            return
        for side, norm in (("q", self.module.q_layernorm), ("k", self.module.k_layernorm)):
            if norm is None or type(norm).__name__ == "IdentityOp":
                continue
            gain = getattr(norm, "weight", None)
            if gain is None:
                raise UsageError(
                    f"qk_clip with a {side}-norm that has no gain ({self.name}: {type(norm).__name__}): there is "
                    "nothing to clip; give the norm a gain or set qk_clip.enabled to false"
                )
            size, heads = self.module.hidden_size_per_attention_head, self.heads if side == "q" else self.groups
            known = {size, heads * size} | ({heads // self.world * size} if heads % self.world == 0 else set())
            if gain.numel() not in known:
                raise UsageError(
                    f"qk_clip with a {side}-norm gain of shape {tuple(gain.shape)} in {self.name}: it is neither one "
                    f"gain of {size} for all heads nor {size} for each head, of the layer or of this rank; set "
                    "qk_clip.enabled to false"
                )


def _gained(norm: Any) -> Any:
    """The norm if it has a gain; IdentityOp stands for none."""
    return norm if getattr(norm, "weight", None) is not None else None


def find(model: Sequence[torch.nn.Module]) -> list[AttentionLayer]:
    """Every self-attention layer of this rank's model chunks, in order, whatever wraps them; MTP blocks too.

    Args:
        model: Megatron's list of model chunks.

    Returns:
        The layers; none where a chunk has none (a hybrid stage without attention).

    Raises:
        UsageError: an attention whose heads and weights are laid out in a way that is not known here; names it.
    """
    layers = []
    for chunk in model:
        for path, module in chunk.named_modules():
            if isinstance(module, SelfAttention | MLASelfAttention):
                layers.append(_layer(path, module))
            elif isinstance(module, Attention):
                raise UsageError(
                    f"{type(module).__name__} at {path}: its attention logits can't be measured or clipped; set "
                    "qk_clip.enabled and observe.attention.enabled to false"
                )
    return layers


def _layer(path: str, module: Any) -> AttentionLayer:
    config, group = module.config, module.pg_collection.tp
    groups = config.num_attention_heads if isinstance(module, MLASelfAttention) else config.num_query_groups
    return AttentionLayer(
        name=_name(path, module.layer_number),
        module=module,
        heads=config.num_attention_heads,
        groups=groups,
        rank=group.rank(),
        world=group.size(),
    )


def _name(path: str, number: int) -> str:
    """Without the wrappers' `module.`, and with the layer's number in the model in place of its index in the chunk."""
    parts = [part for part in path.split(".") if part != "module"]
    parts = parts[: -1 if parts[-1].endswith("attention") else None]
    if len(parts) >= 2 and parts[-2] == "layers" and parts[-1].isdigit():
        parts[-1] = str(number - 1)
    return ".".join(parts) or f"layer {number}"
