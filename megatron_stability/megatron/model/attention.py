"""Core attentions with a logit softcap: dense (local), FlexAttention, and Transformer Engine's own argument."""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import print_rank_0
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_stability.errors import UsageError
from megatron_stability.megatron.attention.core_attention import CoreAttention
from megatron_stability.numerics import block_mask
from megatron_stability.numerics.config import Model
from megatron_stability.numerics.softcap import flex_softcap_attention

# A release after 0.19 has it (Megatron-LM pull request 6590), and passes it on to Transformer Engine.
_MEGATRONS_OWN = "attn_logit_softcapping"


def megatron_caps(model: Model, config: TransformerConfig) -> bool:
    """Gives the cap to Megatron where its configuration has a field for it and Transformer Engine is to compute it.

    The local kernel stays ours: QK-clip reads its logits before the cap.

    Args:
        model: the settings, with an attention softcap.
        config: the model's configuration; its field is set.

    Returns:
        Whether Megatron caps the logits, so that nothing else may.

    Raises:
        UsageError: the field holds another cap.
    """
    engine = config.transformer_impl == "transformer_engine" and model.attention_softcap_kernel == "auto"
    theirs = getattr(config, _MEGATRONS_OWN, None)
    if theirs is not None and (not engine or theirs != model.attention_softcap):
        raise UsageError(
            f"--stability-model-attention-softcap {model.attention_softcap} with Megatron's own {_MEGATRONS_OWN} "
            f"{theirs}: the logits would be capped twice; drop one of them"
        )
    if not engine or not hasattr(config, _MEGATRONS_OWN):
        return False
    setattr(config, _MEGATRONS_OWN, model.attention_softcap)
    _say_once(f"> megatron-stability: attention softcap {model.attention_softcap} by Megatron's own {_MEGATRONS_OWN}")
    return True


@cache
def _say_once(line: str) -> None:
    print_rank_0(line)


def softcap_attention(model: Model, config: TransformerConfig) -> Any:
    """The builder of a layer's core attention with `model.attention_softcap`.

    Raises:
        UsageError: Transformer Engine's version has no softcap.
    """
    cap = model.attention_softcap
    assert cap is not None
    if model.attention_softcap_kernel == "flex":
        return partial(FlexAttention, cap=cap)
    if config.transformer_impl == "transformer_engine" and model.attention_softcap_kernel == "auto":
        return partial(transformer_engine_attention(), softcap=cap)
    return partial(CoreAttention, cap=cap)


class FlexAttention(DotProductAttention):
    """Megatron's local core attention by FlexAttention: causal or sliding window, no [s, s] matrix, no dropout.

    For a GPU whose Transformer Engine has no softcap. Compiled on a GPU; eager on a CPU, where it has no backward.
    """

    def __init__(self, *args: Any, cap: float, **kwargs: Any) -> None:
        """As Megatron's, with the cap.

        Args:
            args: Megatron's positional arguments.
            cap: c of c·tanh(x/c) on the scaled logits.
            kwargs: Megatron's keyword arguments.

        Raises:
            UsageError: attention dropout or a softmax offset, which FlexAttention does not have.
        """
        super().__init__(*args, **kwargs)
        self.cap = cap
        if self.attention_dropout.p > 0:
            raise UsageError(
                "--stability-model-attention-softcap-kernel flex with --attention-dropout above 0: FlexAttention has "
                "no dropout; use --attention-dropout 0 or the kernel `dense`"
            )
        if self.config.softmax_type != "vanilla":
            raise UsageError(
                f"--stability-model-attention-softcap-kernel flex with --softmax-type {self.config.softmax_type}: "
                "FlexAttention has no softmax offset; use the kernel `dense`"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[s_q, b, heads of this rank · d_v] of query [s_q, b, heads, d_k], key and value [s_k, b, groups, d].

        Raises:
            UsageError: a mask other than causal or a sliding window, a bias, or packed sequences.
        """
        kind = attn_mask_type or self.attn_mask_type
        if attention_bias is not None or packed_seq_params is not None or attention_mask is not None:
            raise UsageError(
                "--stability-model-attention-softcap-kernel flex: a mask tensor, a bias or packed sequences; use "
                "--no-create-attention-mask-in-dataloader or the kernel `dense`"
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        coefficient = self.scale_mask_softmax.scale
        window = self.scale_mask_softmax.window_size
        causal = kind == AttnMaskType.causal
        out = flex_softcap_attention(
            q,
            k,
            v,
            cap=self.cap,
            scale=self.softmax_scale * (1.0 if coefficient is None else coefficient),
            block_mask=_block_mask(q.shape[2], k.shape[2], causal, window, str(q.device)),
            attend=_compiled() if q.is_cuda else flex_attention,
        )
        return out.permute(2, 0, 1, 3).flatten(2)


@cache
def _block_mask(queries: int, keys: int, causal: bool, window: tuple[int, int] | None, device: str) -> BlockMask | None:
    """The mask of Megatron's softmax: a window (left, right) around the diagonal, or causal, or none."""
    if window is not None:
        return block_mask.within(queries, keys, *window, keys - queries, device)
    if causal and queries > 1:
        return block_mask.within(queries, keys, queries + keys, 0, 0, device)
    return None


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def transformer_engine_attention(stock: Any = None) -> Any:
    """Megatron's TEDotProductAttention as a class with an argument `softcap`, where TE's own attention has one.

    It has one from 2.20 on. `score_mod`, from 2.18 on, is no substitute: it runs without a mask only
    (`get_attention_backend`). Megatron's class passes no softcap on. The class made here stands before TE's in the
    resolution order, so that Megatron's `super().__init__(…)` reaches it, and adds the argument.

    Args:
        stock: the class to extend; None for Megatron's.

    Raises:
        UsageError: no Transformer Engine, or one without the argument.
    """
    from megatron.core.extensions import transformer_engine as extension

    if stock is None and extension.HAVE_TE:
        stock = extension.TEDotProductAttention
    engine = stock.__bases__[0] if stock is not None else object
    if "softcap" not in inspect.signature(engine.__init__).parameters:
        raise UsageError(
            "--stability-model-attention-softcap with --transformer-impl transformer_engine: the installed Transformer "
            "Engine's DotProductAttention has no `softcap` (2.20 has it; `score_mod` of 2.18 takes no causal mask); "
            "upgrade it, or use --stability-model-attention-softcap-kernel flex or --transformer-impl local"
        )

    class Engine(engine):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, softcap=self._softcap_asked_for, **kwargs)

    class SoftcapTEDotProductAttention(stock, Engine):
        def __init__(self, *args: Any, softcap: float, **kwargs: Any) -> None:
            object.__setattr__(self, "_softcap_asked_for", softcap)  # Module.__init__ has not run yet
            super().__init__(*args, **kwargs)

    return SoftcapTEDotProductAttention
