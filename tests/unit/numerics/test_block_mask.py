"""A block mask from the blocks' edges is the one that FlexAttention makes from every pair of positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_stability.numerics import block_mask

CASES = [
    (256, 256, 1000, 0, 0),  # causal
    (1000, 1000, 5000, 0, 0),  # causal, a cut last block
    (384, 384, 200, 0, 0),  # a window
    (384, 384, 100, 50, 0),
    (130, 515, 64, 0, 385),  # fewer queries than keys, at their end
    (384, 384, 129, 0, 0),  # one pair of a block
    (384, 384, 255, 1, 0),  # all pairs of a block, just
    (640, 640, 0, 0, 0),  # its own place only
]


@pytest.mark.parametrize(("queries", "keys", "left", "right", "offset"), CASES)
def test_it_is_that_of_create_block_mask(queries: int, keys: int, left: int, right: int, offset: int) -> None:
    def kept(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k - q - offset >= -left) & (k - q - offset <= right)

    made = block_mask.within(queries, keys, left, right, offset, "cpu")
    want = create_block_mask(kept, None, None, queries, keys, device="cpu")
    assert made.shape == want.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(made, name), getattr(want, name)), name
    for which in ("", "full_"):
        counts = getattr(want, f"{which}kv_num_blocks")[0, 0].tolist()
        ours, theirs = (getattr(mask, f"{which}kv_indices")[0, 0] for mask in (made, want))
        assert [row[:n].tolist() for row, n in zip(ours, counts, strict=True)] == [
            row[:n].tolist() for row, n in zip(theirs, counts, strict=True)
        ]
    q, k, v = (torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(n)) for n in (queries, keys, keys))
    ours, theirs = (flex_attention(q, k, v, block_mask=mask) for mask in (made, want))
    assert torch.equal(ours, theirs)


def test_no_tensor_has_a_place_for_every_pair() -> None:
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            largest = max(largest, found.numel()) if isinstance(found, Tensor) else largest
            return found

    with Sizes():
        block_mask.within(16_384, 16_384, 10**6, 0, 0, "cpu")
    assert 0 < largest < 2 * (16_384 // block_mask.BLOCK) ** 2
