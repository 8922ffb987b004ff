"""QK-clip's algebra: every head lands on τ or stays as it was, in every form of attention, and no cut changes a bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stability.numerics import qk_clip

TAU, D, HIDDEN, S = 10.0, 8, 24, 12


def _logits(query_hsd: torch.Tensor, key_hsd: torch.Tensor) -> torch.Tensor:
    return query_hsd @ key_hsd.transpose(1, 2) / math.sqrt(D)


def _project(weight: torch.Tensor, x: torch.Tensor, heads: int, groups: int, gate: bool, bias=None):
    """q [H, s, d] and k repeated to [H, s, d] from Megatron's interleaved linear_qkv."""
    per = heads // groups
    mixed = (x @ weight.T + (0 if bias is None else bias)).view(S, groups, (per * (2 if gate else 1) + 2) * D)
    q = mixed[..., : per * D].reshape(S, heads, D).transpose(0, 1)
    k = mixed[..., -2 * D : -D].transpose(0, 1).repeat_interleave(per, dim=0)
    return q, k


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("alpha", [0.5, 0.2, 1.0])
def test_hot_heads_land_on_tau_and_cool_ones_stay(heads, groups, gate, alpha):
    torch.manual_seed(heads * 10 + gate)
    rows = groups * (heads // groups * (2 if gate else 1) + 2) * D
    weight, bias, x = torch.randn(rows, HIDDEN), torch.randn(rows), torch.randn(S, HIDDEN)
    before = _logits(*_project(weight, x, heads, groups, gate, bias))
    s_h = before.amax(dim=(1, 2))
    tau = s_h.sort().values[heads // 2].item() * 0.99  # some hot, some cool
    factors = qk_clip.split(qk_clip.gamma(s_h, tau), groups, alpha)
    f = qk_clip.qkv_rows(factors, D, gate)
    after = _logits(*_project(weight * f[:, None], x, heads, groups, gate, bias * f))
    torch.testing.assert_close(after.amax(dim=(1, 2)), s_h.clamp(max=tau), rtol=1e-5, atol=1e-5)
    cool = s_h <= tau
    assert cool.any()
    assert not cool.all()
    torch.testing.assert_close(after[cool], before[cool], rtol=1e-5, atol=1e-4)
    if groups == heads:
        assert torch.equal(after[cool], before[cool])


@pytest.mark.parametrize("gate", [False, True], ids=["no gate", "gate"])
def test_case_5_value_and_gate_rows_and_biases_have_factor_one(gate):
    factors = qk_clip.Factors(torch.full((8,), 0.5), torch.full((2,), 0.25))
    rows = qk_clip.qkv_rows(factors, D, gate).view(2, -1, D)
    expected = [0.5] * 4 + [1.0] * 4 * gate + [0.25, 1.0]
    assert torch.equal(rows, torch.tensor(expected)[None, :, None].expand(2, -1, D))


def test_headroom_lowers_the_limit_and_what_a_hot_head_lands_on():
    s_h = torch.tensor([7.0, 7.5, 8.0, 20.0])
    gamma = qk_clip.gamma(s_h, TAU, headroom=0.25)
    assert gamma.tolist() == [1.0, 1.0, 7.5 / 8.0, 7.5 / 20.0]
    assert torch.equal(qk_clip.gamma(s_h, TAU, headroom=0.0), qk_clip.gamma(s_h, TAU))


def test_case_4_one_hot_head_in_a_group_of_four():
    torch.manual_seed(0)
    weight, x = torch.randn((4 + 2) * D, HIDDEN) / 4, torch.randn(S, HIDDEN)
    weight[D : 2 * D] *= 20
    before = _logits(*_project(weight, x, 4, 1, gate=False))
    s_h = before.amax(dim=(1, 2))
    assert (s_h > TAU).tolist() == [False, True, False, False]
    factors = qk_clip.split(qk_clip.gamma(s_h, TAU), 1, 0.5)
    after = _logits(*_project(weight * qk_clip.qkv_rows(factors, D)[:, None], x, 4, 1, gate=False))
    assert after[1].max().item() == pytest.approx(TAU, rel=1e-6)
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert factors.k_g.tolist() == [1.0]


def test_case_3_and_never_harmful_what_is_no_maximum_asks_for_nothing():
    bad = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -3.0, TAU, 1e-40, 3e38])
    gamma = qk_clip.gamma(bad, TAU)
    assert gamma[:-1].eq(1).all()
    assert 0 < gamma[-1] < 1e-36
    factors = qk_clip.split(gamma, 8, 0.5)
    assert all(f.isfinite().all() and f.gt(0).all() for f in factors)


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e6, width=32), min_size=8, max_size=8),
    st.sampled_from([1, 2, 4, 8]),
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
)
def test_the_product_is_gamma_and_no_factor_grows_a_head(values, groups, alpha, q_shared, k_shared):
    s_h = torch.tensor(values)
    gamma = qk_clip.gamma(s_h, 30.0)
    q_h, k_g = qk_clip.split(gamma, groups, alpha, q_shared=q_shared, k_shared=k_shared)
    product = (q_h.double() * k_g.double().repeat_interleave(8 // groups)).float()
    want = gamma.float()
    if q_shared:
        assert (product <= want * (1 + 1e-6)).all()
        assert q_h.unique().numel() == 1
    else:
        torch.testing.assert_close(product, want, rtol=1e-6, atol=0)
    if k_shared:
        assert k_g.unique().numel() == 1
    cool = gamma.eq(1)
    if cool.all():
        assert q_h.eq(1).all()
        assert k_g.eq(1).all()
    if not q_shared and not k_shared:
        assert q_h[cool].eq(1).all()


def test_mla_scales_both_parts_of_the_logit_by_gamma():
    torch.manual_seed(1)
    heads, nope, rope, value = 4, 6, 4, 5
    wq, wkv = torch.randn(heads * (nope + rope), HIDDEN), torch.randn(heads * (nope + value), HIDDEN)
    x, k_rope = torch.randn(S, HIDDEN), torch.randn(S, rope)

    def logits(wq, wkv):
        q = (x @ wq.T).view(S, heads, nope + rope)
        kv = (x @ wkv.T).view(S, heads, nope + value)
        nopes = torch.einsum("shd,thd->hst", q[..., :nope], kv[..., :nope])
        return nopes + torch.einsum("shd,td->hst", q[..., nope:], k_rope), kv[..., nope:]

    before, v = logits(wq, wkv)
    s_h = before.amax(dim=(1, 2))
    tau = s_h.median().item()
    gamma = qk_clip.gamma(s_h, tau)
    q_rows = qk_clip.mla_q_rows(gamma, 0.3, nope, rope)
    after, v_after = logits(wq * q_rows[:, None], wkv * qk_clip.mla_kv_rows(gamma, 0.3, nope, value)[:, None])
    torch.testing.assert_close(after, before * gamma.float()[:, None, None], rtol=1e-5, atol=1e-4)
    assert torch.equal(v, v_after)


def _norm(x, gain, beta=0.0):
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * gain + beta


@pytest.mark.parametrize("shared", [True, False], ids=["shared gain", "gain of each head"])
def test_case_10_qk_norm_gains_and_layernorm_offsets_are_clipped(shared):
    torch.manual_seed(2)
    heads, groups = 8, 2
    q, k = torch.randn(heads, S, D), torch.randn(groups, S, D)
    wq, bq = torch.randn(1 if shared else heads, 1, D), torch.randn(1 if shared else heads, 1, D)
    wk, bk = torch.randn(1 if shared else groups, 1, D), torch.randn(1 if shared else groups, 1, D)

    def logits(fq, fk):  # zero-centred gains: 1 + w
        nq = _norm(q, 1 + wq + (fq - 1) * (1 + wq), bq * fq)
        nk = _norm(k, 1 + wk + (fk - 1) * (1 + wk), bk * fk)
        return _logits(nq, nk.repeat_interleave(heads // groups, dim=0))

    one = torch.ones(1, 1, 1)
    s_h = logits(one, one).amax(dim=(1, 2))
    tau = s_h.max().item() / 2
    q_h, k_g = qk_clip.split(qk_clip.gamma(s_h, tau), groups, 0.5, q_shared=shared, k_shared=shared)
    fq, fk = (q_h[:1], k_g[:1]) if shared else (q_h, k_g)
    after = logits(fq[:, None, None], fk[:, None, None]).amax(dim=(1, 2))
    want = s_h * (tau / s_h.max()) if shared else s_h.clamp(max=tau)
    torch.testing.assert_close(after, want, rtol=1e-5, atol=1e-5)


def test_a_zero_centred_gain_with_factor_one_keeps_its_bits():
    w = torch.randn(64)
    kept = w.clone()
    qk_clip.Piece(w, torch.ones(64), zero_centred=True).apply()
    assert torch.equal(w, kept)
    qk_clip.Piece(w, torch.full((64,), 0.25), zero_centred=True).apply()
    torch.testing.assert_close(1 + w, 0.25 * (1 + kept))


@settings(deadline=None)
@given(
    st.integers(0, 60), st.integers(0, 60), st.sampled_from([1, 3, 5]), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_every_cut_gives_the_bits_of_the_whole(a, b, columns, dtype):
    torch.manual_seed(3)
    whole = torch.randn(60 // columns, columns).to(dtype)
    rows = torch.rand(60 // columns)
    want = (whole.float() * rows[:, None]).to(dtype).flatten()
    start, stop = sorted((min(a, whole.numel()), min(b, whole.numel())))
    cut = whole.flatten()[start:stop].clone()
    for piece in qk_clip.pieces(cut, start, rows, columns):
        piece.apply()
    assert torch.equal(cut, want[start:stop])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_1_shards_concatenated_are_the_whole(world):
    torch.manual_seed(4)
    weight, s_h = torch.randn(2 * 6 * D, HIDDEN), torch.rand(8) * 50
    rows = qk_clip.qkv_rows(qk_clip.split(qk_clip.gamma(s_h, TAU), 2, 0.5), D)
    shards = [shard * qk_clip.shard(rows, rank, world)[:, None] for rank, shard in enumerate(weight.chunk(world))]
    assert torch.equal(torch.cat(shards), weight * rows[:, None])
