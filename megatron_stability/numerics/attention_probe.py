"""Largest attention logit and mean attention entropy of every head, exactly, without a matrix over all pairs.

Two entries: `of_scores` reads scores that a forward has made, block by block of queries; `of_queries_and_keys` makes
them itself in [block, block] tiles with an online softmax (Milakov and Gimelshein, arXiv:1805.02867), for kernels that
return nothing. Forbidden pairs count nowhere: the future, what lies outside a window, padding, other documents.

The maximum is of the scaled logit before cap and mask. The entropy, in nats, is of the softmax over the allowed keys
(after the cap, where there is one; without a sink), averaged over the queries that may attend to anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch


class HeadStatistics(NamedTuple):
    """What was seen of H heads; `merge` joins what was seen at different times.

    Attributes:
        max_h: [H] fp32 largest logits, NaN or inf as they came; -inf before anything was seen.
        entropy_h: [H] fp32 sum over queries of the entropy, nats.
        queries_h: [H] fp32 how many queries that is; 0 where entropy was not asked for.
    """

    max_h: torch.Tensor
    entropy_h: torch.Tensor
    queries_h: torch.Tensor

    @classmethod
    def none(cls, heads: int, device: torch.device | str = "cpu") -> HeadStatistics:
        """Nothing seen yet."""
        zero = torch.zeros(heads, device=device)
        return cls(torch.full_like(zero, -torch.inf), zero, zero)

    def merge(self, other: HeadStatistics) -> HeadStatistics:
        """Both together; NaN stays NaN."""
        entropy, queries = self.entropy_h + other.entropy_h, self.queries_h + other.queries_h
        return HeadStatistics(torch.maximum(self.max_h, other.max_h), entropy, queries)

    @property
    def mean_entropy_h(self) -> torch.Tensor:
        """[H] nats a query; NaN where nothing was measured."""
        return self.entropy_h / self.queries_h


@dataclass(frozen=True)
class Mask:
    """Which keys a query may attend to. Query i of sq stands at position i + sk - sq among the sk keys.

    Attributes:
        causal: no key after the query.
        window: (left, right) neighbours beside the query itself; negative: no limit on that side.
        forbidden: bool [b or 1, 1 or H, sq, sk], True where attention is forbidden.
    """

    causal: bool = True
    window: tuple[int, int] | None = None
    forbidden: torch.Tensor | None = None

    def columns(self, first: int, stop: int, shift: int, keys: int) -> tuple[int, int]:
        """The range of keys that queries first … stop - 1 can reach at all."""
        left, right = self._limits()
        low = 0 if left is None else max(0, first + shift - left)
        high = keys if right is None else min(keys, stop + shift + right)
        return low, max(low, high)

    def _limits(self) -> tuple[int | None, int | None]:
        left, right = self.window or (-1, -1)
        if self.causal:
            right = 0 if right < 0 else min(right, 0)
        return (None if left < 0 else left), (None if right < 0 else right)

    def blocked(self, rows: slice, columns: slice, shift: int, device: torch.device) -> torch.Tensor | None:
        """bool, broadcastable to [b, H, rows, columns]: True where forbidden; None where all is allowed."""
        left, right = self._limits()
        blocked = None if self.forbidden is None else self.forbidden[:, :, rows, columns]
        inside = (left is None or columns.start >= rows.stop - 1 + shift - left) and (
            right is None or columns.stop - 1 <= rows.start + shift + right
        )
        if inside:
            return blocked
        query = torch.arange(rows.start + shift, rows.stop + shift, device=device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=device)
        outside = torch.zeros(1, 1, dtype=torch.bool, device=device)
        if left is not None:
            outside = outside | (key < query - left)
        if right is not None:
            outside = outside | (key > query + right)
        return outside if blocked is None else blocked | outside


class _Block:
    """Online maximum, softmax and entropy of a block of queries [b, H, rows], fed with one block of keys at a time.

    With m the running maximum of the capped logits x: sum = Σ exp(x - m), dot = Σ exp(x - m)·(x - m), and the entropy
    is log(sum) - dot/sum. When m grows by d, sum becomes sum·exp(-d) and dot (dot - d·sum)·exp(-d).
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, cap: float | None, entropy: bool) -> None:
        self.cap, self.entropy = cap, entropy
        self.largest = torch.full(shape, -torch.inf, device=device)
        self.m, self.sum, self.dot = self.largest, torch.zeros_like(self.largest), torch.zeros_like(self.largest)

    def add(self, logits: torch.Tensor, blocked: torch.Tensor | None) -> None:
        """Logits [b, H, rows, columns], scaled, before cap and mask; may be overwritten."""
        if blocked is not None:
            logits = logits.masked_fill(blocked, -torch.inf)
        self.largest = torch.maximum(self.largest, logits.amax(dim=-1).float())
        if self.entropy:
            self._add_entropy(logits.float())

    def _add_entropy(self, x: torch.Tensor) -> None:
        blocked = x == -torch.inf
        if self.cap is not None:
            x = (self.cap * torch.tanh(x / self.cap)).masked_fill_(blocked, -torch.inf)
        m = torch.maximum(self.m, x.amax(dim=-1))
        empty = self.m == -torch.inf
        step = torch.where(empty, 0.0, self.m - m)
        x = x - torch.where(m == -torch.inf, 0.0, m)[..., None]
        weight = x.exp()
        self.sum, self.dot = (
            self.sum * step.exp() + weight.sum(dim=-1),
            (self.dot + self.sum * step) * step.exp() + weight.mul_(x.masked_fill_(blocked, 0.0)).sum(dim=-1),
        )
        self.m = m

    def statistics(self) -> HeadStatistics:
        """Over batch and queries."""
        max_h = self.largest.amax(dim=(0, 2))
        if not self.entropy:
            return HeadStatistics(max_h, torch.zeros_like(max_h), torch.zeros_like(max_h))
        seen = self.m != -torch.inf
        total = torch.where(seen, self.sum, 1.0)
        entropy = torch.where(seen, total.log() - self.dot / total, 0.0)
        return HeadStatistics(max_h, entropy.sum(dim=(0, 2)), seen.sum(dim=(0, 2)).float())


def _blocks(size: int, block: int, start: int = 0) -> Iterator[tuple[int, int]]:
    return ((first, min(first + block, size)) for first in range(start, size, block))


@torch.no_grad()
def of_scores(
    scores: torch.Tensor,
    mask: Mask,
    *,
    scale: float = 1.0,
    cap: float | None = None,
    entropy: bool = False,
    block: int = 256,
) -> HeadStatistics:
    """Statistics of logits that a forward has made, without a copy of them.

    Args:
        scores: [b, H, sq, sk], not written to.
        mask: who may attend to whom.
        scale: what the scores are still to be multiplied by.
        cap: softcap, for the entropy alone.
        entropy: whether to compute it.
        block: queries at a time.

    Returns:
        [H] statistics, fp32.
    """
    batch, heads, queries, keys = scores.shape
    shift = keys - queries
    found = HeadStatistics.none(heads, scores.device)
    for first, stop in _blocks(queries, block):
        rows = _Block((batch, heads, stop - first), scores.device, cap, entropy)
        low, high = mask.columns(first, stop, shift, keys)
        # Keys that every query of the block can reach need no mask; a causal block splits at its first query.
        edge = min(max(low, first + shift), high)
        for a, b in ((low, edge), (edge, high)):
            if a < b:
                logits = scores[:, :, first:stop, a:b]
                blocked = mask.blocked(slice(first, stop), slice(a, b), shift, scores.device)
                rows.add(logits if scale == 1.0 else logits * scale, blocked)
        found = found.merge(rows.statistics())
    return found


@torch.no_grad()
def of_queries_and_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Mask,
    *,
    scale: float,
    cap: float | None = None,
    entropy: bool = True,
    block: int = 512,
) -> HeadStatistics:
    """Statistics of the logits of queries and keys, in fp32 tiles of [b, H, block, block].

    Args:
        query: [sq, b, H, d].
        key: [sk, b, G, d]; key head g serves the query heads g·H/G … (g+1)·H/G - 1.
        mask: who may attend to whom.
        scale: of the logits, usually d^-½.
        cap: softcap, for the entropy alone.
        entropy: whether to compute it.
        block: queries and keys of a tile.

    Returns:
        [H] statistics, fp32.
    """
    queries, batch, heads, size = query.shape
    keys, _, groups, _ = key.shape
    shift = keys - queries
    key_bgdk = key.permute(1, 2, 3, 0)
    query_bghqd = query.reshape(queries, batch, groups, heads // groups, size).permute(1, 2, 3, 0, 4)
    found = HeadStatistics.none(heads, query.device)
    for first, stop in _blocks(queries, block):
        rows = _Block((batch, heads, stop - first), query.device, cap, entropy)
        tile = (query_bghqd[..., first:stop, :].float() * scale).flatten(2, 3)
        low, high = mask.columns(first, stop, shift, keys)
        for a, b in _blocks(high, block, low):
            logits = (tile @ key_bgdk[..., a:b].float()).view(batch, heads, stop - first, b - a)
            rows.add(logits, mask.blocked(slice(first, stop), slice(a, b), shift, query.device))
        found = found.merge(rows.statistics())
    return found


def of_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Mask,
    cu_seqlens: list[int],
    cu_seqlens_padded: list[int] | None = None,
    **options: float | bool | None,
) -> HeadStatistics:
    """Statistics of packed sequences (`thd`): each attends within itself, and padding between them counts nowhere.

    Args:
        query: [t, H, d].
        key: [t, G, d].
        mask: within a sequence.
        cu_seqlens: [n + 1] tokens before each sequence, without padding.
        cu_seqlens_padded: [n + 1] where each sequence begins in t, where sequences are padded.
        options: of `of_queries_and_keys`.

    Returns:
        [H] statistics, fp32.
    """
    found = HeadStatistics.none(query.shape[1], query.device)
    lengths = [after - before for before, after in itertools.pairwise(cu_seqlens)]
    for begin, length in zip(cu_seqlens_padded or cu_seqlens, lengths, strict=False):
        if length:
            part = slice(begin, begin + length)
            one = of_queries_and_keys(query[part, None], key[part, None], mask, **options)  # type: ignore[arg-type]
            found = found.merge(one)
    return found
