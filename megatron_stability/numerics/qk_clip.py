"""QK-clip: per-head factors on the query and key projections that bring a head's largest logit back to τ.

Kimi K2's MuonClip (arXiv:2507.20534, algorithm 1). With S_h the largest pre-softmax logit of head h over the step,

    γ_h = τ/S_h where S_h > τ, else 1;    W_q,h ← γ_h^α W_q,h,    W_k,h ← γ_h^(1-α) W_k,h    (α = 1/2)

A logit is bilinear in q and k, so every logit of head h becomes γ_h times what it was, and the largest becomes τ.

Headroom h (not in the paper, whose rule is h = 0): the limit (1-h)·τ stands for τ in the rule. A step's order is: S is
measured, the update made, the clip applied; then comes the next batch. If update and batch together multiply a head's
largest logit by at most 1/(1-h), no forward shows more than τ. With h = 0 a head that grows shows more in each of them.

Grouped queries (GQA, MQA): a key head serves the query heads of its group, so its factor has to be common to them:

    Γ_g = max γ_h over the group;    W_k,g ← Γ_g^(1-α) W_k,g,    W_q,h ← γ_h / Γ_g^(1-α) W_q,h

The product is γ_h for every head: hot heads land on τ, and one cool head makes Γ_g = 1, so that cool heads never
change. With one head a group this is the rule above.

MLA: the rotary part of the key is common to all heads and stays; so the rotary rows of q take γ_h, the others γ_h^α,
and the non-rotary rows of k γ_h^(1-α). Both parts of the logit are γ_h times what they were.

QK-norm makes a logit independent of the projections' norm, so its gains are scaled in their place, LayerNorm's offset
with its gain. A gain that heads share takes the worst head's factor: w = min γ_h, q's gain w^α and k's w^(1-α). A
zero-centred gain is 1 + w and becomes f·(1 + w), so w ← w + (f - 1)(1 + w).

Rotary embedding, whole or partial, is a rotation within the head, and so commutes with the factor. Biases of q and k
scale with their rows; rows of v and of an output gate have the factor 1.

Shapes: H query heads, G key heads, d head size; all factors are fp32 and exactly 1 where nothing is to be done, so that
multiplying by them changes no bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def gamma(s_max: torch.Tensor, tau: float, headroom: float = 0.0) -> torch.Tensor:
    """γ of every head.

    Args:
        s_max: [..., H] largest logits; NaN, infinite, zero and negative ones ask for nothing.
        tau: τ > 0.
        headroom: h in [0, 1); the limit is (1-h)·τ.

    Returns:
        [..., H] fp64 in (0, 1]; 1 where S is not finite or not above the limit.
    """
    s_max, tau = s_max.double(), (1 - headroom) * tau
    hot = torch.isfinite(s_max) & (s_max > tau)
    return torch.where(hot, tau / torch.where(hot, s_max, tau), 1.0)


class Factors(NamedTuple):
    """Factors of the query heads [..., H] and key heads [..., G], fp32; leading dimensions are layers."""

    q_h: torch.Tensor
    k_g: torch.Tensor


def split(
    gamma_h: torch.Tensor, groups: int, alpha: float, *, q_shared: bool = False, k_shared: bool = False
) -> Factors:
    """Distribute γ over queries and keys.

    Args:
        gamma_h: [..., H] from `gamma`; head h belongs to group h // (H/G).
        groups: G.
        alpha: the query's share of the exponent, in [0, 1].
        q_shared: one gain serves all query heads.
        k_shared: one gain serves all key heads.

    Returns:
        Factors whose product is γ_h for every head, or less where a shared gain takes the worst head's.
    """
    gamma_h = gamma_h.double()
    if q_shared and k_shared:
        worst = gamma_h.amin(dim=-1, keepdim=True)
        q_h, k_g = worst**alpha, worst ** (1 - alpha)
    else:
        gamma_gh = gamma_h.unflatten(-1, (1 if k_shared else groups, -1))
        k_g1 = gamma_gh.amax(dim=-1, keepdim=True) ** (1 - alpha)
        q_h, k_g = (gamma_gh / k_g1).flatten(-2), k_g1[..., 0]
        q_h = q_h.amin(dim=-1, keepdim=True) if q_shared else q_h
    leading = gamma_h.shape[:-1]
    return Factors(q_h.float().expand(gamma_h.shape), k_g.float().expand(*leading, groups))


def qkv_rows(factors: Factors, head_dim: int, gate: bool = False) -> torch.Tensor:
    """Factors of the rows of Megatron's `linear_qkv`, all tensor-parallel ranks together.

    The layout is, a group after the other: [q heads of the group, (their gates), k, v], each head `head_dim` rows
    (`core/transformer/attention.py SelfAttention.get_query_key_value_tensors`).

    Args:
        factors: of layers that are alike.
        head_dim: d.
        gate: attention output gate: as many gate rows as query rows, right behind them.

    Returns:
        [..., G·(H/G·(1 or 2) + 2)·d] fp32.
    """
    q_gh, k_g1 = factors.q_h.unflatten(-1, (factors.k_g.shape[-1], -1)), factors.k_g[..., None]
    parts = [q_gh, torch.ones_like(q_gh), k_g1] if gate else [q_gh, k_g1]
    heads = torch.cat([*parts, torch.ones_like(k_g1)], dim=-1).flatten(-2)
    return heads.repeat_interleave(head_dim, dim=-1)


def mla_q_rows(gamma_h: torch.Tensor, alpha: float, nope: int, rope: int) -> torch.Tensor:
    """Factors of the rows of MLA's query (up-)projection: a head after the other, [nope, rope] rows each.

    Args:
        gamma_h: [..., H] from `gamma`.
        alpha: the query's share.
        nope: non-rotary rows a head (`qk_head_dim`).
        rope: rotary rows a head (`qk_pos_emb_head_dim`).

    Returns:
        [..., H·(nope + rope)] fp32.
    """
    shared = (gamma_h.double() ** alpha).float()
    return _rows_of_two(shared, nope, gamma_h.float(), rope)


def mla_kv_rows(gamma_h: torch.Tensor, alpha: float, nope: int, value: int) -> torch.Tensor:
    """Factors of the rows of MLA's key-value up-projection: a head after the other, [nope k, v] rows each.

    Args:
        gamma_h: [..., H] from `gamma`.
        alpha: the query's share.
        nope: non-rotary key rows a head (`qk_head_dim`).
        value: value rows a head (`v_head_dim`).

    Returns:
        [..., H·(nope + value)] fp32.
    """
    k_h = (gamma_h.double() ** (1 - alpha)).float()
    return _rows_of_two(k_h, nope, torch.ones_like(k_h), value)


def _rows_of_two(first_h: torch.Tensor, first: int, second_h: torch.Tensor, second: int) -> torch.Tensor:
    parts = [part[..., None].expand(*part.shape, size) for part, size in ((first_h, first), (second_h, second))]
    return torch.cat(parts, dim=-1).flatten(-2)


def shard(rows: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The rows of tensor-parallel rank `rank` of `world`: Megatron cuts a column-parallel weight in equal blocks."""
    size = rows.shape[-1] // world
    return rows[..., rank * size : (rank + 1) * size]


class Piece(NamedTuple):
    """A view into a tensor and the factors that it is to be multiplied by, broadcastable to it."""

    view: torch.Tensor
    factor: torch.Tensor
    zero_centred: bool = False

    def apply(self) -> None:
        """Multiply in place: one fp32 product an element, rounded once to the view's type; hardly allocates."""
        if self.zero_centred:
            self.view.copy_(self.view.float() + (self.factor - 1) * (1 + self.view.float()))
        else:
            self.view.mul_(self.factor)


def pieces(flat: torch.Tensor, start: int, rows: torch.Tensor, columns: int, zero_centred: bool = False) -> list[Piece]:
    """Views of a flat shard whose boundaries fall anywhere, with their factors.

    An element's factor follows from its index in the whole tensor alone, so shards of every cut get equal bits.

    Args:
        flat: [n] elements start … start + n - 1 of the row-major tensor [rows, columns].
        start: where the shard begins in that tensor.
        rows: [rows] fp32 factors.
        columns: elements a row; 1 for biases and gains.
        zero_centred: the tensor holds w of a gain 1 + w.

    Returns:
        At most three pieces: the rest of a cut first row, whole rows, the beginning of a cut last row.
    """
    stop = start + flat.numel()
    first, last = -(-start // columns), stop // columns  # whole rows [first, last)
    if first > last:  # the shard lies within one row
        first = last = stop // columns
        cuts = [(start, stop)]
    else:
        cuts = [(start, first * columns), (last * columns, stop)]
    found = [
        Piece(flat[a - start : b - start], rows[a // columns : a // columns + 1], zero_centred)
        for a, b in cuts
        if a < b
    ]
    if first < last:
        whole = flat[first * columns - start : last * columns - start].view(-1, columns)
        found.append(Piece(whole, rows[first:last, None], zero_centred))
    return found
