"""Cross-entropy, final softcap and z-loss of vocabulary-parallel logits in one autograd function.

For a token with capped logits y (y = c·tanh(x/c), or x), log-partition Z = logsumexp(y) over the real vocabulary and
target t:

    returned            CE = Z - y_t                                   (pure: no z term)
    gradient            d/dy [CE + β·Z²] = (1 + 2βZ)·p - onehot(t)     times the token's incoming gradient

So the z-loss takes exactly the weight that the caller gives the token's cross-entropy: masked tokens add 0, and
whatever normalises the cross-entropy (micro-batch mean, or the global count of valid tokens with
`--calculate-per-token-loss`) normalises β·Z². z-loss: de Brébisson & Vincent 2016; Chowdhery et al. 2022 (PaLM).

Memory: the logits stay as they came (bf16: half of a saved fp32 softmax), read in blocks of rows, in fp32 within a
block, once in forward and once in backward. fp32 logits that nobody reads later hold the softmax from forward on, as
with Megatron's `vocab_parallel_cross_entropy`, so that backward computes no exponential; with a cap they hold the
capped logits, so that it computes no tanh. Communication: one all-gather
of three or four fp32 numbers a token and rank, combined in rank order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_ELEMENTS = 1 << 17  # of a block of rows: twice 512 KiB of fp32, which a core's own cache holds


@dataclass
class LogZ:
    """log-Z of the tokens that took part in a backward pass, weighted as their loss was; kept on the device.

    Attributes:
        sums: [3] fp64: Σw, Σw·Z, Σw·Z² since `clear`; w is a token's incoming gradient.
        largest: [] fp32: the largest Z of a token with w ≠ 0, -inf before the first.
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    largest: Tensor = field(default_factory=lambda: torch.tensor(-math.inf))

    def add(self, log_z: Tensor, weight: Tensor) -> None:
        """Take a micro-batch in; [...] both, of one shape."""
        weight = weight.double()
        kept = torch.where(weight == 0, 0.0, log_z.double())  # a masked token's Z may be anything, 0·NaN included
        sums = torch.stack([weight.sum(), (weight * kept).sum(), (weight * kept.square()).sum()])
        largest = torch.where(weight == 0, -math.inf, log_z).amax()
        self.sums = self.sums.to(sums.device) + sums
        self.largest = torch.maximum(self.largest.to(largest.device), largest)

    def clear(self) -> None:
        """Forget everything."""
        self.sums = torch.zeros_like(self.sums)
        self.largest = torch.full_like(self.largest, -math.inf)

    def mean(self) -> Tensor:
        """Weighted mean of Z in nats, NaN where no token counted."""
        return self.sums[1] / self.sums[0]

    def mean_square(self) -> Tensor:
        """Weighted mean of Z²: β times this is the z-loss."""
        return self.sums[2] / self.sums[0]


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What the loss adds to cross-entropy.

    Attributes:
        vocab_size: real vocabulary rows; further rows are padding and take no probability.
        cap: final softcap, None for none.
        beta: z-loss coefficient β ≥ 0.
        label_smoothing: α in [0, 1): weight α spread evenly over the rows other than the target.
    """

    vocab_size: int
    cap: float | None = None
    beta: float = 0.0
    label_smoothing: float = 0.0

    @property
    def smoothing(self) -> float:
        """Weight of the uniform distribution over all V rows in the smoothed target."""
        if self.label_smoothing == 0.0:
            return 0.0
        return self.label_smoothing * self.vocab_size / (self.vocab_size - 1)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        settings: LossSettings,
        group: dist.ProcessGroup | None,
        stats: LogZ | None,
        overwrite: bool,
    ) -> Tensor:
        local_rows = logits.shape[-1]
        first = 0 if group is None else dist.get_rank(group) * local_rows
        real = min(max(settings.vocab_size - first, 0), local_rows)
        flat, owned = logits.reshape(-1, local_rows), target.reshape(-1) - first
        columns = 4 if settings.smoothing else 3
        mine = torch.zeros(columns, flat.shape[0], dtype=torch.float32, device=logits.device)
        mine[0], mine[2] = -math.inf, -math.inf
        kept = overwrite and logits.dtype is torch.float32 and logits.is_contiguous()
        if real:
            room = _room(flat, real)
            for rows in _blocks(flat):
                y, softmax = _measure(flat[rows, :real], owned[rows], settings, mine[:, rows], room)
                if kept:
                    flat[rows, :real] = softmax if settings.cap is None else y
        largest, total, picked, mean = _combine(mine, group, settings)
        share = mine[1] * (mine[0] - largest).exp() / total  # of the probability, on this rank
        log_total = total.log()
        loss = log_total - (picked - largest)  # not log-Z less the logit: a small loss of large logits would be noise
        if settings.smoothing:
            loss = (1.0 - settings.smoothing) * loss + settings.smoothing * (log_total - (mean - largest))
        ignored = target.reshape(-1) < 0
        loss = loss.masked_fill(ignored, 0.0)
        ctx.save_for_backward(logits, target, largest + log_total, share)
        ctx.settings, ctx.stats, ctx.overwrite, ctx.kept = settings, stats, overwrite, kept
        ctx.first, ctx.real = first, real
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, target, log_z, share = ctx.saved_tensors
        weight = gradients[0].reshape(-1).float().masked_fill(target.reshape(-1) < 0, 0.0)
        if ctx.stats is not None:
            ctx.stats.add(log_z, weight)
        out = logits if ctx.overwrite else torch.empty_like(logits, memory_format=torch.contiguous_format)
        local_rows = logits.shape[-1]
        flat, flat_out = logits.reshape(-1, local_rows), out.view(-1, local_rows)
        owned = target.reshape(-1) - ctx.first
        # a token without weight has factor 0 whatever its log-Z is
        factor = torch.where(weight == 0, 0.0, weight * share * (1.0 + 2.0 * ctx.settings.beta * log_z))
        room = _room(flat, ctx.real)
        for rows in _blocks(flat):
            if ctx.real:
                block, token = flat[rows, : ctx.real], (owned[rows], weight[rows], factor[rows])
                if ctx.kept and ctx.settings.cap is None:
                    _to_gradient(block, None, *token, ctx.settings)
                    continue
                y, softmax = _softmax(block, None if ctx.kept else ctx.settings.cap, room)
                _to_gradient(softmax, y, *token, ctx.settings)
                flat_out[rows, : ctx.real] = softmax
        flat_out[:, ctx.real :] = 0.0
        return out, None, None, None, None, None


def _rows(flat: Tensor) -> int:
    rows = max(1, BLOCK_ELEMENTS // flat.shape[-1])
    return min(flat.shape[0], rows * 64 if flat.is_cuda else rows)  # on a GPU a block has to fill the device


def _blocks(flat: Tensor) -> list[slice]:
    rows = max(1, _rows(flat))
    return [slice(start, start + rows) for start in range(0, flat.shape[0], rows)]


def _room(flat: Tensor, columns: int) -> Tensor:
    """For a block's logits and their softmax, in fp32; blocks take turns in it, so that it stays in the cache."""
    return torch.empty(2, _rows(flat), columns, dtype=torch.float32, device=flat.device)


def _measure(block: Tensor, owned: Tensor, settings: LossSettings, out: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Writes max y, Σexp(y - max), the target's logit where this rank owns it, and (smoothing) Σy; y and softmax."""
    y, p = _softmax(block, settings.cap, room)
    here = (owned >= 0) & (owned < y.shape[-1])
    picked = y.gather(-1, owned.clamp(0, y.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    out[2] = picked.masked_fill(~here, -math.inf)
    if settings.smoothing:
        out[3] = y.sum(-1)
    out[0] = y.amax(-1)
    out[1] = p.amax(-1).reciprocal()  # the largest logit's probability is exp(0)/Σ
    return y, p


def _softmax(block: Tensor, cap: float | None, room: Tensor) -> tuple[Tensor, Tensor]:
    """A block's logits, capped, in fp32, and their softmax: one kernel, where exp and its companions would be four."""
    y, p = room[:, : block.shape[0]]
    if cap is not None:
        y.copy_(block).div_(cap).tanh_().mul_(cap)
    elif block.dtype is torch.float32:
        y = block
    else:
        y.copy_(block)
    return y, torch.softmax(y, dim=-1, out=p)


def _combine(
    mine: Tensor, group: dist.ProcessGroup | None, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logit M, Σexp(y - M), the target's logit and the mean logit of each token, [n], equal on every rank."""
    parts = mine.unsqueeze(0)
    if group is not None:
        world = dist.get_world_size(group)
        parts = torch.empty(world * mine.shape[0], mine.shape[1], dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(parts, mine, group=group)
        parts = parts.view(world, *mine.shape)
    largest = parts[:, 0].amax(0)
    total = (parts[:, 1] * (parts[:, 0] - largest).exp()).sum(0)  # a rank of padding only: 0·exp(-inf)
    mean = parts[:, 3].sum(0) / settings.vocab_size if settings.smoothing else largest
    return largest, total, parts[:, 2].amax(0), mean


def _to_gradient(
    p: Tensor, y: Tensor | None, owned: Tensor, weight: Tensor, factor: Tensor, settings: LossSettings
) -> None:
    """Turns a block's softmax, [rows, V/T], into d/d(logits): weight · ((1 + 2βZ)·p - smoothed onehot) · d(cap)/dx.

    `factor` is weight · (1 + 2βZ) · this rank's share of the probability, [rows]; `y` the logits, if they are capped.
    """
    p.mul_(factor.unsqueeze(-1))
    if settings.smoothing:
        p.sub_(weight.unsqueeze(-1) * (settings.smoothing / settings.vocab_size))
    here = (owned >= 0) & (owned < p.shape[-1])
    hit = torch.where(here, -(1.0 - settings.smoothing) * weight, 0.0)
    p.scatter_add_(-1, owned.clamp(0, p.shape[-1] - 1).unsqueeze(-1), hit.unsqueeze(-1))
    if settings.cap is not None:
        assert y is not None
        p.mul_(y.div_(settings.cap).square_().neg_().add_(1.0))


def vocab_parallel_loss(
    logits: Tensor,
    target: Tensor,
    settings: LossSettings,
    *,
    group: dist.ProcessGroup | None = None,
    stats: LogZ | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Per-token cross-entropy of the capped logits; its gradient carries the z-loss.

    Args:
        logits: [..., V/T] this rank's rows of the padded vocabulary, any float dtype.
        target: [...] int64, equal on all ranks of the group. A negative target is ignored (loss 0, gradient 0); one
            outside the real vocabulary has infinite loss.
        settings: vocabulary, cap, β, label smoothing.
        group: tensor-parallel group, None for one rank. Collective: one all-gather, in forward only.
        stats: takes in log-Z at backward, with the weights that the loss got; None for none.
        overwrite: write the gradient over the logits, and where they are fp32 already in forward their softmax or, with
            a cap, the capped ones. Only where nobody reads their values later; a second backward through them is then
            an error of torch's, not a wrong number.

    Returns:
        [...] fp32 nats, identical on all ranks of the group.
    """
    result: Tensor = _Loss.apply(logits, target, settings, group, stats, overwrite)
    return result
