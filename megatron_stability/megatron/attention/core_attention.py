"""The local core attention of our layer specs: Megatron's own, with a logit softcap and MLA's channel arguments.

Measuring needs nothing from this class: `attention_monitor` hooks `scale_mask_softmax` of any local core attention and
reads the scores that are there already, before the cap. So a cap hides nothing from QK-clip, and there is no second
matmul. In a spec: `ModuleSpec(module=CoreAttention, params={"cap": 50.0})`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import get_default_causal_mask, get_sliding_window_causal_mask

from megatron_stability.numerics.softcap import masked_softmax


class SoftcapScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """Megatron's scale, mask and softmax with c·tanh(x/c) between scale and mask (Gemma 2, arXiv:2408.00118).

    The mask comes after the cap: a capped -inf would be -c, and forbidden keys would be attended to.

    Attributes:
        cap: c, finite and positive; dimensionless like a logit.
        logit_scale: what `--apply-query-key-layer-scaling` leaves to the softmax, applied before the cap; 1 otherwise.
    """

    def __init__(self, stock: FusedScaleMaskSoftmax, cap: float) -> None:
        """Takes the settings of `stock`, the module that it stands in for."""
        super().__init__(
            stock.input_in_fp16,
            stock.input_in_bf16,
            stock.attn_mask_type,
            stock.scaled_masked_softmax_fusion,
            stock.mask_func,
            stock.softmax_in_fp32,
            None,
            stock.window_size,
        )
        self.cap = cap
        self.logit_scale = 1.0 if stock.scale is None else float(stock.scale)

    def forward(
        self, input: torch.Tensor, mask: torch.Tensor | None, softmax_offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Probabilities [b, n, sq, sk] of scores [b, n, sq, sk]; `mask` is True where attention is forbidden.

        Always in fp32: bf16 holds a capped logit of 50 in steps of 0.25. So Megatron's fused bf16 kernels are not used.
        """
        return masked_softmax(
            input, mask=self._mask(input, mask), cap=self.cap, scale=self.logit_scale, softmax_offset=softmax_offset
        ).to(input.dtype)

    def _mask(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask that Megatron's softmax would use: a sliding window over all, else the given one, else causal."""
        queries, keys = scores.shape[-2:]
        if self.window_size is not None:
            mask = get_sliding_window_causal_mask(queries, keys, self.window_size)
        elif self.attn_mask_type == AttnMaskType.causal and mask is None and queries > 1:
            mask = get_default_causal_mask(queries)
        return mask


class CoreAttention(DotProductAttention):
    """Megatron's `DotProductAttention` that can cap its logits, and whose keys and values may differ in size (MLA)."""

    def __init__(
        self,
        *args: Any,
        cap: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """As Megatron's, and three arguments of our own or of MLA.

        Args:
            args: Megatron's positional arguments.
            cap: c of c·tanh(x/c) on the scaled logits, before the mask; None: no cap.
            k_channels: MLA's query and key head size; only the softmax scale, which MLA passes, depends on it.
            v_channels: MLA's value head size.
            kwargs: Megatron's keyword arguments.
        """
        super().__init__(*args, **kwargs)
        del k_channels
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if cap is not None:
            self.scale_mask_softmax = SoftcapScaleMaskSoftmax(self.scale_mask_softmax, cap)  # type: ignore[has-type]
