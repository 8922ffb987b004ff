"""Normalisation of queries and keys before q·k, and what it bounds.

    per head           RMSNorm or LayerNorm over d_k with one gain [d_k] for all heads (Dehghani et al. 2023, "Scaling
                       Vision Transformers to 22 Billion Parameters"; Qwen3, Gemma 3)
    no gain            RMS over d_k, nothing learned (Llama 4)
    whole projection   RMSNorm over all heads, a gain for every channel [H·d_k] (OLMo 2); the statistic spans the
                       tensor-parallel ranks

With a zero-centred gain the stored weight is w and the gain 1 + w. An optional fixed scale multiplies what comes out.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Variant(StrEnum):
    """What is normalised, and over what."""

    RMSNORM = "rmsnorm"  # per head
    LAYERNORM = "layernorm"  # per head
    RMS_NO_GAIN = "rms_no_gain"  # per head
    RMSNORM_WHOLE = "rmsnorm_whole"  # over all heads


class _WholeRMS(torch.autograd.Function):
    """x / sqrt(mean(x²) + eps) over the last dimension of the unsharded tensor.

    Forward and backward sum one number a position over the group, in fp32. With r = (mean(x²) + eps)^-½ over N values:
    dx = r·dy - x·r³/N · Σ(x·dy), the sum again over all N.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: dist.ProcessGroup | None) -> Tensor:
        x_float = x.float()
        square_sum = x_float.square().sum(-1, keepdim=True)
        ctx.group, ctx.width = group, x.shape[-1]
        if group is not None:
            dist.all_reduce(square_sum, group=group)
            ctx.width *= dist.get_world_size(group)
        inverse = torch.rsqrt(square_sum / ctx.width + eps)
        ctx.save_for_backward(x, inverse)
        return (x_float * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        gradient = gradients[0].float()
        x_float = x.float()
        dot = (x_float * gradient).sum(-1, keepdim=True)
        if ctx.group is not None:
            dist.all_reduce(dot, group=ctx.group)
        gradient = inverse * gradient - x_float * (inverse.pow(3) * dot / ctx.width)
        return gradient.to(x.dtype), None, None


def whole_rms(x: Tensor, eps: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """RMS normalisation over the last dimension, which is sharded over `group`.

    Args:
        x: [..., n] this rank's channels; every rank of the group holds equally many of the same positions.
        eps: added to the mean square.
        group: tensor-parallel group; None for one rank. Collective: one all-reduce of [...] forward, one backward.

    Returns:
        [..., n] in x's dtype, computed in fp32.
    """
    result: Tensor = _WholeRMS.apply(x, eps, group)
    return result


class QKNorm(torch.nn.Module):
    """One norm of queries or of keys.

    `weight` (and LayerNorm's `bias`) is whole on every rank: for `rmsnorm_whole` each rank uses its slice of [H·d_k],
    so that the gradients of the ranks, summed over the tensor-parallel group, are the gradient of the whole gain; the
    other variants share one gain [d_k] among heads, whose ranks' gradients are summed in the same way.

    Args:
        variant: what is normalised.
        heads: heads over all ranks.
        head_dim: d_k.
        eps: added to the mean square or variance.
        zero_centred: store w, use 1 + w.
        scale: fixed factor on the output; queries and keys both, so logits get its square.
        group: tensor-parallel group, None for one rank.
    """

    def __init__(
        self,
        variant: Variant,
        heads: int,
        head_dim: int,
        *,
        eps: float = 1e-6,
        zero_centred: bool = False,
        scale: float = 1.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.variant, self.head_dim, self.eps = variant, head_dim, eps
        self.zero_centred, self.scale, self.group = zero_centred, scale, group
        width = heads * head_dim if variant is Variant.RMSNORM_WHOLE else head_dim
        if variant is not Variant.RMS_NO_GAIN:
            initial = torch.zeros if zero_centred else torch.ones
            self.weight = torch.nn.Parameter(initial(width))
        if variant is Variant.LAYERNORM:
            self.bias = torch.nn.Parameter(torch.zeros(width))

    def gain(self) -> Tensor | None:
        """γ, [d_k] or [H·d_k], or None where there is none."""
        if self.variant is Variant.RMS_NO_GAIN:
            return None
        return self.weight + 1 if self.zero_centred else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, d_k], normalised, in x's dtype."""
        gain = self.gain()
        if self.variant is Variant.RMSNORM_WHOLE:
            assert gain is not None
            flat = x.flatten(-2)
            rank = 0 if self.group is None else dist.get_rank(self.group)
            gain = gain[rank * flat.shape[-1] : (rank + 1) * flat.shape[-1]]
            out = (whole_rms(flat, self.eps, self.group) * gain.to(x.dtype)).view(x.shape)
        elif self.variant is Variant.LAYERNORM:
            out = F.layer_norm(x, (self.head_dim,), gain, self.bias, self.eps)
        else:
            out = F.rms_norm(x, (self.head_dim,), gain, self.eps)
        return out if self.scale == 1.0 else out * self.scale


@torch.no_grad()
def logit_bound(q_norm: QKNorm, k_norm: QKNorm, softmax_scale: float) -> float:
    """The largest |softmax_scale · q·k| that these norms allow, whatever the weights before them.

    A per-head norm leaves a vector no longer than sqrt(d_k)·max|γ| (LayerNorm: plus |β|); a whole-projection norm can
    put all of sqrt(H·d_k) into one head. With the softmax scale 1/sqrt(d_k) that is sqrt(d_k)·max|γq|·max|γk| per
    head, and sqrt(H_q·H_kv·d_k)·max|γq|·max|γk| for the whole projection. Rotary embedding keeps lengths.
    """

    def longest(norm: QKNorm) -> float:
        gain = norm.gain()
        width = norm.head_dim if gain is None else gain.numel()
        length = math.sqrt(width) * (1.0 if gain is None else float(gain.abs().max()))
        if norm.variant is Variant.LAYERNORM:
            length += float(torch.linalg.vector_norm(norm.bias))
        return length * abs(norm.scale)

    return abs(softmax_scale) * longest(q_norm) * longest(k_norm)
