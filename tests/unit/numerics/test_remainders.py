"""An fp32 master as a bf16 weight and 16 bits: every code, and what a round trip through both must keep."""

from __future__ import annotations

import struct

import pytest
import torch

from megatron_stability.numerics.remainders import join, split


def test_every_weight_with_the_remainders_at_the_edges_comes_back() -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        code = (upper << 16) | lower
        weight, remainder = split(code.view(torch.float32))
        assert weight.dtype is torch.bfloat16
        assert remainder.dtype is torch.int16
        assert torch.equal(join(weight, remainder).view(torch.int32), code)


def test_the_weight_is_the_master_rounded_to_nearest() -> None:
    master = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    code = master.view(torch.int32)
    no_tie = (code & 0xFFFF) != 0x8000
    weight, _ = split(master)
    assert torch.equal(weight[no_tie], master.bfloat16()[no_tie])


@pytest.mark.parametrize(
    ("master", "weight", "remainder"),
    [
        (0x3F80_0001, 0x3F80, 1),  # just above 1
        (0x3F80_8000, 0x3F81, -32768),  # a tie goes away from zero
        (0xBF80_FFFF, 0xBF81, -1),  # negative, one ulp below the next bf16
        (0x0000_8000, 0x0001, -32768),  # subnormal
    ],
)
def test_codes_worked_by_hand(master: int, weight: int, remainder: int) -> None:
    value = torch.frombuffer(bytearray(struct.pack("<I", master)), dtype=torch.float32)
    high, low = split(value)
    assert int(high.view(torch.int16)) & 0xFFFF == weight
    assert int(low) == remainder
