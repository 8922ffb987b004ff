"""Largest logit and entropy of every head, read from the attention that the model has, whatever it is.

    forward, local attention    the scores that its softmax is given (a hook on that module; no second matmul)
    forward, Transformer Engine `current_max_attn_logits` (TE ≥ 2.9 with --log-max-attention-logit); no entropy
    probe                       q and k that the updated weights make of what the layer was given in the step's first
                                micro-batch (one sequence), by tiles; the layer runs again up to its core attention

Hooks sit on the instances of the model that we were handed. Maxima are over a step's micro-batches; the next step
forgets them. Evaluation (`module.training` False) counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_stability.errors import UsageError
from megatron_stability.megatron.attention.attention_layers import AttentionLayer
from megatron_stability.numerics.attention_probe import HeadStatistics, Mask, of_packed, of_queries_and_keys, of_scores

_ABSENT = torch.finfo(torch.float32).min  # below every logit; a MAX reduction is never given an infinity or NaN


class _Measured(Exception):  # noqa: N818 - not an error: it ends a layer's forward where the probe has what it wants
    """Raised by the probe's hook."""


class LayerMonitor:
    """One layer's statistics of the step under way, for this rank's heads."""

    def __init__(self, layer: AttentionLayer, measure: str) -> None:
        """Installs the hook that `measure` ("forward" or "probe") asks for.

        Raises:
            UsageError: the layer's core attention has nothing to read.
        """
        self.layer, core = layer, layer.module.core_attention
        self.active = self.entropy = False
        self._core, self._softmax = core, getattr(core, "scale_mask_softmax", None)
        self._seen: HeadStatistics | None = None
        self._inputs: dict[str, Any] | None = None
        self._probing = False
        if measure == "probe":
            layer.module.register_forward_pre_hook(self._keep, with_kwargs=True)
            core.register_forward_pre_hook(self._probe, with_kwargs=True)
        elif self._softmax is not None and type(core).forward is DotProductAttention.forward:
            self._softmax.register_forward_pre_hook(self._read)
        elif not hasattr(core, "current_max_attn_logits"):
            raise UsageError(
                f"qk_clip.measure forward: {type(core).__name__} of {layer.name} shows no logits; with Transformer "
                "Engine 2.9 or newer add --log-max-attention-logit, else set qk_clip.measure to probe"
            )

    def begin(self, active: bool, entropy: bool) -> None:
        """A step begins: forget what was seen, and measure it or not."""
        self.active, self.entropy, self._seen, self._inputs = active, entropy, None, None
        if hasattr(self._core, "current_max_attn_logits"):
            self._core.current_max_attn_logits = None

    @torch.no_grad()
    def probe(self) -> None:
        """Collective over tensor-parallel ranks: measure with the weights as they are now."""
        if self._inputs is None:
            return
        given, self._inputs, self._probing = self._inputs, None, True
        try:
            self.layer.module(**given)
        except _Measured:
            return
        finally:
            self._probing = False

    def _keep(self, attention: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Pre-hook of the self-attention: keep what its first micro-batch gives it, one sequence of it."""
        if not (self.active and attention.training and self._inputs is None) or self._probing:
            return
        given = dict(zip(("hidden_states", "attention_mask"), inputs[:2], strict=False)) | options
        hidden, mask = given["hidden_states"].detach(), given.get("attention_mask")  # [s, b, h], [b or 1, 1, sq, sk]
        # a copy: a view would keep the activations of all sequences until the step ends
        one = {"hidden_states": hidden[:, :1].clone(), "attention_mask": mask if mask is None else mask[:1]}
        self._inputs = given | one

    def statistics(self) -> HeadStatistics | None:
        """What this step's forwards gave, [heads of this rank]; None if there was none."""
        from_kernel = getattr(self._core, "current_max_attn_logits", None)
        if self._seen is None and from_kernel is not None:
            zero = torch.zeros_like(from_kernel, dtype=torch.float32)
            return HeadStatistics(from_kernel.float(), zero, zero)
        return self._seen

    def _add(self, found: HeadStatistics) -> None:
        self._seen = found if self._seen is None else self._seen.merge(found)

    def _read(self, softmax: Any, inputs: tuple[Any, ...]) -> None:
        """Pre-hook of the local softmax: (scores [b, n, sq, sk], mask or None, …)."""
        if not (self.active and softmax.training):
            return
        scores, mask = inputs[0].detach(), inputs[1] if len(inputs) > 1 else None
        scale = getattr(softmax, "logit_scale", softmax.scale)
        cap = getattr(softmax, "cap", None)
        scale = 1.0 if scale is None else float(scale)
        self._add(of_scores(scores, self._mask(mask), scale=scale, cap=cap, entropy=self.entropy))

    def _probe(self, core: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Pre-hook of a core attention: (query, key, value, attention_mask, …); acts while `probe` runs the layer."""
        if not self._probing:
            return
        names = ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params")
        given = dict(zip(names, inputs, strict=False)) | options
        query, key = given["query"].detach(), given["key"].detach()
        mask = self._mask(given.get("attention_mask"), given.get("attn_mask_type"))
        caps = (getattr(self._softmax, "cap", None), getattr(core, "cap", None), getattr(core, "softcap", None))
        cap = next((float(cap) for cap in caps if cap), None)
        how: dict[str, Any] = {"scale": self.layer.softmax_scale, "entropy": self.entropy, "cap": cap}
        packed = given.get("packed_seq_params")
        if packed is None:
            self._add(of_queries_and_keys(query, key, mask, **how))
        else:
            padded = getattr(packed, "cu_seqlens_q_padded", None)
            bounds = packed.cu_seqlens_q.tolist(), None if padded is None else padded.tolist()
            self._add(of_packed(query.flatten(0, -3), key.flatten(0, -3), mask, *bounds, **how))
        raise _Measured

    def _mask(self, mask: torch.Tensor | None, kind: AttnMaskType | None = None) -> Mask:
        """Who may attend to whom, as the local softmax or TE has it."""
        config = self.layer.module.config
        window = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer.module.layer_number):
            window = tuple(config.window_size)
        if self._softmax is not None:  # its window stands in for any mask, and a given mask for the causal one
            if window is not None:
                return Mask(causal=False, window=window)
            return Mask(causal=mask is None and self._softmax.attn_mask_type == AttnMaskType.causal, forbidden=mask)
        kind = self.layer.module.attn_mask_type if kind is None else kind
        ignored = kind in (AttnMaskType.causal, AttnMaskType.no_mask)  # TE takes no mask tensor with these
        return Mask(causal="causal" in kind.name, window=window, forbidden=None if ignored else mask)


class Maxima:
    """All layers of a pipeline stage after the one reduction: equal on all its tensor- and data-parallel ranks.

    Attributes:
        max_lh: [L, H] fp32; +inf where a rank saw NaN or Inf, -inf where nothing was measured.
        entropy_lh: [L, H] fp32, nats; the least over ranks of a rank's mean; NaN where nothing was measured.
        gain_l: [L] fp32, max|γ| of QK-norm; NaN without QK-norm.
    """

    def __init__(self, maxima_clh: torch.Tensor) -> None:
        largest, flag, entropy, gain = maxima_clh
        self.max_lh = torch.where(flag > 0, torch.inf, largest.masked_fill(largest == _ABSENT, -torch.inf))
        self.entropy_lh = -entropy.masked_fill(entropy == _ABSENT, torch.nan)
        self.gain_l = gain.masked_fill(gain == _ABSENT, torch.nan)[:, :1].flatten()  # a stage may have no layers


class AttentionMonitor:
    """All self-attention layers of this rank."""

    def __init__(self, layers: Sequence[AttentionLayer], measure: str, group: dist.ProcessGroup) -> None:
        """Installs the hooks.

        Args:
            layers: of this rank, in the order that all ranks of `group` have.
            measure: "forward" or "probe".
            group: tensor-, data- and context-parallel ranks of this pipeline stage.
        """
        self.layers, self._group = layers, group
        self._monitors = [LayerMonitor(layer, measure) for layer in layers]
        self.heads = max((layer.heads for layer in layers), default=0)
        self._entropy = False
        blocks = [(layer.here.start, layer.here.stop) for layer in layers]  # layers alike are packed at once
        self._alike = [
            ([at for at, other in enumerate(blocks) if other == block], slice(*block)) for block in sorted(set(blocks))
        ]

    def begin(self, active: bool, entropy: bool) -> None:
        """A step begins."""
        self._entropy = entropy
        for monitor in self._monitors:
            monitor.begin(active, entropy)

    def probe(self) -> None:
        """Collective over tensor-parallel ranks: measure every layer with the weights as they are now."""
        for monitor in self._monitors:
            monitor.probe()

    @torch.no_grad()
    def reduce(self, device: torch.device) -> Maxima:
        """Collective over the stage: one all-reduce (MAX) for all layers and heads, and no host synchronisation.

        Each tensor-parallel rank fills in its own heads, so that the maximum over the stage is at once the gather over
        tensor-parallel ranks. Finiteness travels as a flag: a MAX of NaN is not NaN on every backend.
        """
        packed_clh = torch.full((4, len(self.layers), self.heads), _ABSENT, device=device)
        packed_clh[1] = 0.0
        for at_l, here in self._alike:
            none = HeadStatistics.none(here.stop - here.start, device)
            seen = [self._monitors[at].statistics() or none for at in at_l]
            max_lh, entropy_lh, queries_lh = (torch.stack(values) for values in zip(*seen, strict=True))
            finite_lh, entropy_lh = torch.isfinite(max_lh), -entropy_lh / queries_lh
            packed_clh[0, at_l, here] = torch.where(finite_lh, max_lh, _ABSENT)
            packed_clh[1, at_l, here] = (~finite_lh & (max_lh != -torch.inf)).float()
            packed_clh[2, at_l, here] = torch.where(torch.isfinite(entropy_lh), entropy_lh, _ABSENT)
        for layer, row_ch in zip(self.layers, packed_clh.unbind(dim=1), strict=True) if self._entropy else ():
            if (gain := layer.largest_gain()) is not None:
                row_ch[3] = torch.nan_to_num(gain, nan=torch.finfo(torch.float32).max)
        if packed_clh.numel():  # a stage without attention is without it on every rank of the group
            dist.all_reduce(packed_clh, op=dist.ReduceOp.MAX, group=self._group)
        return Maxima(packed_clh)
