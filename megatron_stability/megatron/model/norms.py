"""Norms of the layer specs: layer norms that support sequence parallel, and QK-norm.

Megatron's local norm (`core/transformer/torch_norm.py`) refuses sequence parallel and zero-centred gains; without
Transformer Engine and Apex there is no other. The classes here are what a spec's builder wants: callables that take
(config, hidden_size, eps) and give a module.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_stability.numerics.config import Model
from megatron_stability.numerics.qk_norm import QKNorm, Variant


class LayerNorm(torch.nn.Module):
    """RMSNorm or LayerNorm, as `config.normalization` says, by torch's own functions; any `--apply-layernorm-1p`.

    Each tensor-parallel rank sees its part of the sequence under sequence parallel, so its gains' gradients are parts
    of a sum: the flag `sequence_parallel` on a parameter makes Megatron's `finalize_model_grads` sum them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        del unused  # persist_layer_norm and the like choose among Apex's kernels
        self.normalization, self.hidden_size, self.eps = config.normalization, hidden_size, eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered_gamma else torch.ones
        place = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(initial(hidden_size, **place))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if self.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **place))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] normalised over h, in x's dtype."""
        gain = self.weight + 1 if self.zero_centered_gamma else self.weight
        if self.normalization == "LayerNorm":
            return F.layer_norm(x, (self.hidden_size,), gain, self.bias, self.eps)
        return F.rms_norm(x, (self.hidden_size,), gain, self.eps)


class QKNormBuilder:
    """Builds the q or the k norm when the attention layer asks for it with its head size.

    A gain is whole on every tensor-parallel rank and each rank's gradient is its part of the sum, with and without
    sequence parallel (queries and keys hold the whole sequence and a part of the heads). Megatron sums the gradients
    of parameters whose name contains `q_layernorm` or `k_layernorm` where `config.qk_layernorm` is set, which the
    settings see to.
    """

    def __init__(self, model: Model, *, query: bool) -> None:
        """Args: model: the settings; query: whether it norms the queries."""
        self.model, self.query = model, query

    def __call__(self, config: TransformerConfig, hidden_size: int, eps: float) -> QKNorm:
        """The norm of heads of `hidden_size`, on the current device in the parameters' dtype."""
        heads = config.num_attention_heads if self.query else config.num_query_groups
        group = parallel_state.get_tensor_model_parallel_group()
        norm = QKNorm(
            Variant(self.model.qk_norm),
            heads,
            hidden_size,
            eps=eps,
            zero_centred=config.layernorm_zero_centered_gamma,
            scale=self.model.qk_norm_scale,
            group=group if group.size() > 1 else None,
        )
        return norm.to(device=torch.cuda.current_device(), dtype=config.params_dtype)
