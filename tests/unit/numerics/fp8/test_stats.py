"""One-pass statistics against the definitions, written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stability.numerics.fp8 import stats as fp8_stats
from megatron_stability.numerics.fp8.formats import E4M3, E5M2, Fp8Format, saturating_round
from megatron_stability.numerics.fp8.stats import combine, read, tensor_stats

FORMATS = [E4M3, E5M2]


def by_definition(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> list[float]:
    x = x.float()
    scale = scale if scale.numel() == 1 else scale.view(-1, 1)
    code = saturating_round(x * scale, fmt)
    finite = x.isfinite()
    error = (code * scale.reciprocal() - x).double()
    return [
        x.numel(),
        int((x != 0).sum()),
        int(((x * scale).abs() > fmt.max).sum()),
        int(((x != 0) & (code == 0)).sum()),
        int((~finite).sum()),
        max((abs(v) for v in x.flatten().tolist() if not math.isnan(v)), default=0.0),
        float((x.double()[finite] ** 2).sum()),
        float((error[finite] ** 2).sum()),
    ]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_definitions(fmt: Fp8Format, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(100, 333, generator=g) * torch.logspace(-9, 3, 333)).to(dtype)
    x[3, 5], x[50, 0], x[51, 0] = math.nan, math.inf, -math.inf
    x[:, 100], x[:, 101] = 0.0, -0.0
    row_scale = torch.logspace(-2, 2, 100)
    for scale in (torch.tensor([7.0]), torch.tensor(1e-4), row_scale):
        got = tensor_stats(x, scale, fmt, chunk=1000).tolist()
        want = by_definition(x, scale, fmt)
        assert got[:6] == want[:6]
        assert got[6:] == pytest.approx(want[6:], rel=1e-5)
        assert got[3] > 0
        assert got[2] > 0


def test_largest_code_is_no_saturation_and_negative_zero_no_underflow() -> None:
    got = read(tensor_stats(torch.tensor([448.0, -448.0, 449.0, -0.0, 2.0**-10, 2.0**-9]), torch.ones(1), E4M3))
    assert (got.saturated, got.underflowed, got.nonzero) == (1, 1, 5)


@pytest.mark.parametrize("magnitude", [1e-22, 1e-19, 1e-12])
def test_tiny_squares_are_not_lost(magnitude: float) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    snr = [read(tensor_stats(x * size, 100 / (x * size).abs().amax(), E4M3)).snr_db for size in (1.0, magnitude)]
    assert snr[1] == pytest.approx(snr[0], abs=0.05)


def test_huge_squares_do_not_overflow() -> None:
    got = read(tensor_stats(torch.full((10,), 3e30), torch.tensor(1e-28), E4M3))
    assert got.nonfinite == 0
    assert got.signal == pytest.approx(9e61, rel=1e-5)


def test_nothing_and_zeros() -> None:
    assert read(tensor_stats(torch.empty(0), torch.ones(1), E4M3)) == fp8_stats.TensorStats(
        0, 0, 0, 0, 0, 0.0, 0.0, 0.0
    )
    zeros = read(tensor_stats(torch.zeros(5), torch.ones(1), E4M3))
    assert (zeros.saturation, zeros.underflow) == (0.0, 0.0)
    assert math.isnan(zeros.snr_db)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.floats(width=32), max_size=40), min_size=1, max_size=6),
    st.floats(1e-30, 1e30),
    st.sampled_from(FORMATS),
)
def test_parts_combine_to_the_whole_and_shares_stay_shares(
    parts: list[list[float]], scale: float, fmt: Fp8Format
) -> None:
    factor = torch.tensor(scale, dtype=torch.float32)
    vectors = [tensor_stats(torch.tensor(part, dtype=torch.float32), factor, fmt, chunk=7) for part in parts]
    whole = tensor_stats(torch.tensor([v for part in parts for v in part], dtype=torch.float32), factor, fmt)
    combined = combine(torch.stack(vectors))
    assert combined[:6].tolist() == whole[:6].tolist()
    stats = read(combined)
    assert 0.0 <= stats.saturation <= 1.0
    assert 0.0 <= stats.underflow <= 1.0
