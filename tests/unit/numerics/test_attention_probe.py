"""The probe and the fused reading give what the full matrix of logits gives."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_stability.numerics.attention_probe import HeadStatistics, Mask, of_packed, of_queries_and_keys, of_scores


def _full(q, k, forbidden, scale, cap=None):
    """The S×S way, in fp64: [b, H, sq, sk]."""
    per = q.shape[2] // k.shape[2]
    x = torch.einsum("qbhd,kbhd->bhqk", q.double(), k.double().repeat_interleave(per, dim=2)) * scale
    allowed = ~forbidden.expand_as(x)
    top = torch.where(allowed, x, -math.inf).amax(dim=(0, 2, 3))
    x = cap * torch.tanh(x / cap) if cap else x
    p = torch.where(allowed, x, -math.inf).softmax(dim=-1)
    alive = allowed.any(dim=-1)
    entropy = torch.special.entr(p.nan_to_num()).sum(dim=-1)
    return top.float(), ((entropy * alive).sum(dim=(0, 2)) / alive.sum(dim=(0, 2))).float()


def _band(sq, sk, left, right):
    i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
    return (j > i + right) | (j < i - left)


@pytest.mark.parametrize(("sq", "sk"), [(37, 37), (16, 16), (5, 40)])
@pytest.mark.parametrize("window", [None, (7, 0), (3, 2), (-1, 4)])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_both_ways_equal_the_full_matrix(sq, sk, window, cap, groups):
    torch.manual_seed(sq)
    q, k = torch.randn(sq, 2, 4, 8) * 3, torch.randn(sk, 2, groups, 8)
    mask = Mask(causal=window is None, window=window)
    left, right = window or (-1, 0)
    forbidden = _band(sq, sk, left if left >= 0 else 10**6, right)
    top, entropy = _full(q, k, forbidden, 0.35, cap)
    probed = of_queries_and_keys(q, k, mask, scale=0.35, cap=cap, block=16)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(4 // groups, dim=2))
    read = of_scores(scores, mask, scale=0.35, cap=cap, entropy=True, block=16)
    for found in (probed, read):
        torch.testing.assert_close(found.max_h, top, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.mean_entropy_h, entropy, rtol=1e-4, atol=1e-5)


def test_a_given_mask_is_obeyed_and_rows_without_a_key_count_nowhere():
    torch.manual_seed(0)
    q, k = torch.randn(12, 2, 2, 4), torch.randn(12, 2, 2, 4)
    forbidden = _band(12, 12, 99, 0)[None, None].repeat(2, 1, 1, 1)
    forbidden[1, :, :, 8:] = True  # padding of the second sequence
    forbidden[1, :, 8:, :] = True
    k[8:, 1], q[8:, 1] = 1e4, 1e4
    top, entropy = _full(q, k, forbidden, 0.5)
    found = of_queries_and_keys(q, k, Mask(causal=False, forbidden=forbidden), scale=0.5, block=5)
    torch.testing.assert_close(found.max_h, top)
    torch.testing.assert_close(found.mean_entropy_h, entropy)
    assert found.max_h.max() < 100


def test_case_11_padding_and_other_documents_of_a_pack_do_not_count():
    torch.manual_seed(0)
    lengths, padded = [5, 1, 7], [0, 8, 12, 24]
    q, k = torch.full((24, 4, 8), 1e4), torch.full((24, 2, 8), 1e4)
    alone = HeadStatistics.none(4)
    for begin, length in zip(padded, lengths, strict=False):
        q[begin : begin + length], k[begin : begin + length] = torch.randn(length, 4, 8), torch.randn(length, 2, 8)
        part = slice(begin, begin + length)
        alone = alone.merge(of_queries_and_keys(q[part, None], k[part, None], Mask(), scale=0.35))
    found = of_packed(q, k, Mask(), [0, 5, 6, 13], padded, scale=0.35)
    assert torch.equal(found.max_h, alone.max_h)
    assert found.max_h.max() < 100
    torch.testing.assert_close(found.mean_entropy_h, alone.mean_entropy_h)
    assert found.queries_h.tolist() == [13.0] * 4


def test_not_finite_and_negative_logits_come_as_they_are():
    q, k = torch.ones(6, 1, 3, 2), torch.ones(6, 1, 3, 2)
    q[3, 0, 0] = math.nan
    q[3, 0, 1] = math.inf
    k[:, 0, 2] = -1
    found = of_queries_and_keys(q, k, Mask(), scale=1.0, block=2).max_h
    assert found[0].isnan()
    assert found[1] == math.inf
    assert found[2] == -2.0


def test_memory_is_of_a_tile_not_of_all_pairs():
    size, block = 1024, 64
    q, k = torch.randn(size, 1, 2, 8), torch.randn(size, 1, 1, 8)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        of_queries_and_keys(q, k, Mask(), scale=1.0, block=block)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 2 * block * block * 4 * 4
    assert size * size * 2 * 4 > 16 * largest
