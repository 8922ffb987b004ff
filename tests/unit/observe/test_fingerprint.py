"""Fingerprints: equal for equal bits, different for any changed, moved or missing element."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stability.observe import fingerprint
from megatron_stability.observe.fingerprint import Fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hashed", [fingerprint.bits, fingerprint.mixed])
def test_every_single_bit_counts(hashed: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0)).mul(8).abs().to(dtype)
    before = int(hashed(tensor))
    raw = tensor.view(torch.uint8)
    seen = {before}
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            seen.add(int(hashed(tensor)))
            raw[place] ^= 1 << bit
    assert len(seen) == 1 + raw.numel() * 8
    assert int(hashed(tensor)) == before


@settings(deadline=None)
@given(st.lists(st.integers(-100, 100), min_size=2, max_size=40), st.data())
def test_order_and_length_count(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    shuffled = torch.tensor(data.draw(st.permutations(values)), dtype=torch.float32)
    same = torch.equal(tensor, shuffled)
    for hashed in (fingerprint.bits, fingerprint.mixed):
        assert (int(hashed(tensor)) == int(hashed(shuffled))) is same
        assert int(hashed(tensor)) != int(hashed(torch.cat([tensor, torch.zeros(1)])))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = int(fingerprint.mixed(tensor))
    monkeypatch.setattr(fingerprint, "CHUNK", 7)
    assert int(fingerprint.mixed(tensor)) == whole
    assert int(fingerprint.mixed(tensor.view(10, 100).t().contiguous().t())) == whole  # strides do not matter


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_not_finite(bad: float) -> None:
    tensor = torch.zeros(100)
    tensor[57] = bad
    found = fingerprint.fingerprints([("good", torch.full((3,), -2.0)), ("bad", tensor), ("none", torch.zeros(0))])
    assert found["good"].amax == 2.0
    assert found["good"].finite
    assert not found["bad"].finite
    assert found["none"] == Fingerprint(0, 0.0)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu],
)
@pytest.mark.parametrize("others", [[], [-2.0, 2.0]], ids=["alone", "among others"])
def test_each_fp8_code_counts_with_its_magnitude(dtype: torch.dtype, others: list[float]) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1)
    rows = torch.cat([codes, torch.tensor(others).to(dtype).view(torch.uint8).expand(256, -1)], dim=1).view(dtype)
    found = fingerprint.fingerprints((str(place), rows[place]) for place in range(256))
    seen = torch.tensor([each.amax for each in found.values()])
    assert torch.equal(seen.nan_to_num(-1.0), rows.float().abs().amax(dim=1).nan_to_num(-1.0))


def test_combined_depends_on_order() -> None:
    one, two = Fingerprint(1, 0.0), Fingerprint(2, 0.0)
    assert fingerprint.combined([one, two]) != fingerprint.combined([two, one])
    assert -(2**63) <= fingerprint.combined([one, two] * 50) < 2**63
