"""Softcap c·tanh(x/c): of attention logits before masking, and of the final logits (Gemma 2: 50 and 30).

Source: Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size". A mask is applied after the
cap: capping a masked logit of -inf would give it the weight of a logit of -c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention


class _Softcap(torch.autograd.Function):
    """Saves its output only; d/dx = 1 - (y/c)²."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        y = x.div(cap).tanh_().mul_(cap)
        ctx.cap = cap
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        slope = y.div(ctx.cap).square_().neg_().add_(1.0)
        return slope.mul_(gradients[0]), None


def softcap(x: Tensor, cap: float) -> Tensor:
    """c·tanh(x/c), elementwise, in x's dtype; |result| ≤ cap.

    Args:
        x: logits of any shape.
        cap: c > 0.
    """
    result: Tensor = _Softcap.apply(x, cap)
    return result


def masked_softmax(
    scores: Tensor,
    *,
    mask: Tensor | None = None,
    cap: float | None = None,
    scale: float = 1.0,
    softmax_offset: Tensor | None = None,
) -> Tensor:
    """Attention probabilities in fp32: scale, cap, mask, softmax, in this order.

    Args:
        scores: [b, H, s_q, s_k] in any float dtype.
        mask: boolean, broadcastable to scores; True keeps a pair out.
        cap: softcap of the scaled scores, None for none.
        scale: factor on the scores before the cap.
        softmax_offset: [H] a logit beside each row's that takes weight and gives no value (attention sink; 0 is
            "softmax off by one"), neither capped nor masked.

    Returns:
        [b, H, s_q, s_k] fp32. A row whose every pair is masked gets equal weights, as a finite mask value gives.
    """
    scores = scores.float()
    if scale != 1.0:
        scores = scores * scale
    if cap is not None:
        scores = softcap(scores, cap)
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(torch.float32).min)
    if softmax_offset is None:
        return torch.softmax(scores, dim=-1)
    sink = softmax_offset.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]


def score_mod(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The softcap as FlexAttention's score_mod; its mask_mod and block mask come after it."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        del batch, head, q_index, k_index
        return cap * torch.tanh(score / cap)

    return capped


def flex_softcap_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cap: float,
    scale: float,
    block_mask: BlockMask | None = None,
    attend: Callable[..., Any] = flex_attention,
) -> Tensor:
    """Softcapped attention by FlexAttention, without the [s, s] matrix.

    Args:
        q: [b, H_q, s_q, d_k].
        k: [b, H_kv, s_k, d_k]; H_q a multiple of H_kv.
        v: [b, H_kv, s_k, d_v].
        cap: softcap of the scaled scores.
        scale: factor on q·k.
        block_mask: what may attend to what; None for everything.
        attend: `flex_attention`, or the compiled one on a GPU.

    Returns:
        [b, H_q, s_q, d_v] in q's dtype.
    """
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = attend(q, k, v, score_mod=score_mod(cap), block_mask=block_mask, scale=scale, enable_gqa=grouped)
    return out
