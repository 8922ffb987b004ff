"""FlexAttention's block mask of a causal or sliding-window attention, from the blocks' edges alone.

`create_block_mask` asks the mask of every pair of positions: 4 GB at 65,536 of them. In a mask that depends on the
distance of query and key, a block is known by its least and largest distance.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


def within(queries: int, keys: int, left: int, right: int, offset: int, device: torch.device | str) -> BlockMask:
    """Pairs with -left ≤ k - q - offset ≤ right.

    Args:
        queries: s_q.
        keys: s_k.
        left: keys that a query sees before its own place; at least s_q + s_k for all of them.
        right: keys that it sees after it.
        offset: of a query's own place among the keys.
        device: of the attention.

    Returns:
        The mask, equal to `create_block_mask`'s, with tensors of [s_q/128, s_k/128] only.
    """
    q, k = (torch.arange(0, size, BLOCK, device=device) for size in (queries, keys))
    q_end, k_end = (q + BLOCK).clamp(max=queries) - 1, (k + BLOCK).clamp(max=keys) - 1
    least, largest = k[None, :] - q_end[:, None] - offset, k_end[None, :] - q[:, None] - offset
    some = (largest >= -left) & (least <= right)
    whole = (q_end - q + 1 == BLOCK)[:, None] & (k_end - k + 1 == BLOCK)[None, :]
    full = whole & (least >= -left) & (largest <= right)

    def kept(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        distance = k_index - q_index - offset
        return (distance >= -left) & (distance <= right)

    return BlockMask.from_kv_blocks(
        *_listed(some & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=kept, seq_lengths=(queries, keys)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, [1, 1, n_q], and which: the first of [1, 1, n_q, n_k]."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(1).int()[None, None], order[None, None].contiguous()
