"""FP8 formats and scale rules against naive, loop-written implementations of what TE publishes."""

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stability.numerics.fp8 import recipes
from megatron_stability.numerics.fp8.formats import E4M3, E5M2, Fp8Format, amax, saturating_round
from megatron_stability.numerics.fp8.stats import read

FORMATS = [E4M3, E5M2]
F32_MAX = float(torch.finfo(torch.float32).max)


def f32(value: float) -> float:
    """Rounded to float32, as C's float arithmetic is after each operation on doubles that fit."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))


def all_values(fmt: Fp8Format) -> list[float]:
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    return sorted({float(v) for v in codes if math.isfinite(v)})


def naive_cast(value: float, fmt: Fp8Format, values: list[float]) -> float:
    """Nearest value of the format, ties to the even code; beyond the largest: the largest; NaN: NaN."""
    if math.isnan(value):
        return math.nan
    value = max(-fmt.max, min(fmt.max, value))
    near = min(abs(v - value) for v in values)
    candidates = [v for v in values if abs(v - value) == near]
    if len(candidates) == 1:
        return candidates[0]
    even = [v for v in candidates if int(torch.tensor(v).to(fmt.dtype).view(torch.uint8)) % 2 == 0]
    return even[0]


def naive_scale(tile: list[float], fmt: Fp8Format, power_of_two: bool, value_for_inf: float) -> float:
    largest = 0.0
    for value in tile:
        if not math.isnan(value) and abs(value) > largest:
            largest = abs(value)
    if largest == 0 or math.isinf(largest):
        return 1.0
    quotient = fmt.max / largest
    scale = f32(quotient) if quotient < F32_MAX * (1 + 2.0**-25) else math.inf
    if math.isinf(scale):
        scale = value_for_inf
    if power_of_two:
        (bits,) = struct.unpack("<I", struct.pack("<f", scale))
        (scale,) = struct.unpack("<f", struct.pack("<I", bits & 0xFF800000))
    return scale


def tensors(rows: int, columns: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(rows, columns, generator=g)
    special = x.clone()
    special[0, 0], special[1, 1], special[2, 2] = math.inf, math.nan, -math.inf
    steep = x * torch.logspace(-40, 38, columns, dtype=torch.float64).float()
    return [x, x * 1e-38, x * 1e37, torch.zeros_like(x), -torch.zeros_like(x), special, steep]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_cast_rounds_to_nearest_even_and_saturates(fmt: Fp8Format) -> None:
    values = all_values(fmt)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    inputs = [*values, *middles, 1e30, -1e30, math.inf, -math.inf, math.nan, fmt.tiny / 2, fmt.tiny * 0.51]
    got = saturating_round(torch.tensor(inputs), fmt).tolist()
    for value, code in zip(inputs, got, strict=True):
        want = naive_cast(value, fmt, values)
        assert code == want or (math.isnan(code) and math.isnan(want)), value


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_rounding_in_float32_equals_the_clamped_cast_for_every_upper_half_of_a_float(fmt: Fp8Format) -> None:
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    for low in (0, 1, 0x8000, 0xFFFF):  # below, at and above what a tie looks like
        x = (high | low).view(torch.float32)
        x = x[~x.isnan()]
        want = x.clamp(-fmt.max, fmt.max).to(fmt.dtype)
        assert torch.equal(saturating_round(x, fmt).to(fmt.dtype).view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(saturating_round(x, fmt), want.float())


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("tile", [(1, 128), (128, 128)])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_equal_a_naive_loop(
    fmt: Fp8Format, tile: tuple[int, int], power_of_two: bool, dtype: torch.dtype
) -> None:
    limit = float(torch.finfo(dtype).max)
    for x32 in tensors(130, 257):
        x = x32.to(dtype)
        got = recipes.quantize_tiles(x, fmt, tile=tile, power_of_two=power_of_two)
        scale_inv = torch.empty(x.shape)
        codes = torch.empty(x.shape, dtype=fmt.dtype)
        for r in range(0, 130, tile[0]):
            for c in range(0, 257, tile[1]):
                block = x[r : r + tile[0], c : c + tile[1]]
                scale = naive_scale(block.flatten().tolist(), fmt, power_of_two, limit)
                where = (slice(r, r + tile[0]), slice(c, c + tile[1]))
                scale_inv[where] = f32(1.0 / scale)
                codes[where] = (block.float() * torch.tensor(scale)).clamp(-fmt.max, fmt.max).to(fmt.dtype)
        assert torch.equal(got.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(torch.nan_to_num(got.dequantize()), torch.nan_to_num(codes.float() * scale_inv))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_mxfp8_equals_a_naive_loop(fmt: Fp8Format) -> None:
    for x in tensors(5, 100):
        got = recipes.quantize_mxfp8(x, fmt)
        for r in range(5):
            for c in range(0, 100, 32):
                block = x[r, c : c + 32]
                finite = [abs(v) for v in block.tolist() if not math.isnan(v)]
                target = f32(max(finite, default=0.0) * f32(1 / fmt.max))
                exponent = 127 if math.isinf(target) else -127
                while exponent < 127 and 2.0**exponent < target:
                    exponent += 1
                scaled = (block.double() * 2.0**-exponent).clamp(-fmt.max, fmt.max).float()
                want = scaled.to(fmt.dtype).view(torch.uint8)
                assert torch.equal(got.codes[r, c : c + 32].view(torch.uint8), want), (r, c)
                back = (scaled.to(fmt.dtype).double() * 2.0**exponent).float()
                assert torch.equal(got.dequantize()[r, c : c + 32].nan_to_num(), back.nan_to_num())


def test_e8m0_for_every_mantissa_equals_the_division() -> None:
    """The kernel multiplies by a rounded 1/max; the exponent is the same as by division, whatever the mantissa."""
    mantissas = torch.arange(0, 1 << 23, 7, dtype=torch.int32)
    values = (mantissas | (127 << 23)).view(torch.float32)
    for fmt in FORMATS:
        assert torch.equal(recipes.e8m0(values * torch.tensor(1.0 / fmt.max)), recipes.e8m0(values / fmt.max))


def test_current_scale_of_special_amax_is_the_kernels() -> None:
    x = torch.tensor([0.0, math.inf, math.nan, 1e-45, 1.0, 3.0])
    assert recipes.current_scale(x, E4M3).tolist() == [1.0, 1.0, 1.0, F32_MAX, 448.0, f32(448 / 3)]
    assert recipes.current_scale(x, E4M3, power_of_two=True).tolist() == [1.0, 1.0, 1.0, 2.0**127, 256.0, 128.0]


def test_infinity_saturates_and_nan_stays_in_current_scaling() -> None:
    got = recipes.quantize_current(torch.tensor([math.inf, -math.inf, 2.0, math.nan]), E4M3)
    assert got.codes[:3].float().tolist() == [448.0, -448.0, 2.0]
    assert got.codes[3].isnan()
    without = recipes.quantize_current(torch.tensor([math.nan, 2.0]), E4M3)
    assert without.codes[1].float() == 448.0, "NaN stays out of the amax"


def test_amax_of_nothing_and_of_nan_is_zero() -> None:
    assert amax(torch.empty(0)) == 0
    assert amax(torch.tensor([math.nan, math.nan])) == 0
    assert amax(torch.tensor([math.nan, -3.0])) == 3
    assert amax(torch.tensor([-math.inf, math.nan])) == math.inf


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_current_quantization_error_is_bounded(values: list[float]) -> None:
    x = torch.tensor(values)
    back = recipes.quantize_current(x, E4M3).dequantize()
    largest = amax(x)
    finite = x.isfinite()
    if largest.isinf() or largest < 1e-30:
        return
    error = (back - x)[finite].abs()
    bound = torch.maximum(x[finite].abs() * 2.0**-4, largest / 448 * 2.0**-10) * (1 + 1e-5)
    assert bool((error <= bound).all())


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 4])
def test_delayed_scaling_by_hand(algorithm: str, length: int) -> None:
    history, scale, seen = torch.zeros(length, 1), torch.ones(1), []
    for step, value in enumerate([2.0, 8.0, 4.0, 1.0, 1.0, 1.0, 1.0, math.inf, 1e-44]):
        history[0] = value
        before = scale.clone()
        recipes.delayed_update(history, scale, 448.0, algorithm=algorithm, margin=1)
        seen.append(value)
        window = seen[-length:] if algorithm == "max" else seen[-1:]
        chosen = max(window)
        want = before.item() if math.isinf(chosen) else min(448.0 / 2 / f32(chosen), F32_MAX)
        assert scale.item() == pytest.approx(want, rel=1e-6), step
        assert history[0] == 0


def test_a_silent_round_leaves_delayed_state_alone_in_the_kernel_and_rolls_it_in_python() -> None:
    def fresh() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([[0.0], [8.0], [2.0]]), torch.tensor([56.0])

    history, scale = fresh()
    recipes.delayed_update(history, scale, 448.0, algorithm="max", rule="kernel")
    assert history.flatten().tolist() == [0.0, 8.0, 2.0]
    recipes.delayed_update(history, scale, 448.0, algorithm="max", rule="python")
    assert history.flatten().tolist() == [0.0, 2.0, 0.0]
    history[0] = math.nan
    python = history.clone(), scale.clone()
    recipes.delayed_update(history, scale, 448.0, algorithm="max", rule="kernel")
    assert scale == 224.0, "fmaxf drops the NaN"
    recipes.delayed_update(*python, 448.0, algorithm="max", rule="python")
    assert python[1] == 56.0, "torch.max keeps it, and an amax of NaN keeps the scale"


def test_the_kernel_rounds_the_quotient_once_and_python_rounds_it_twice() -> None:
    """Both differ in the last bit of some scales, which a tolerance would hide."""
    amaxes = torch.rand(500, generator=torch.Generator().manual_seed(0)) * 10 + 0.1
    once = (448.0 / amaxes.double()).float()  # float64 has twice the digits: to round it is to round the quotient
    twice = torch.tensor(448.0) * (1 / amaxes.double()).float()
    assert (once != twice).sum() > 10
    for rule, want in (("kernel", once), ("python", twice)):
        scale = torch.ones(500)
        recipes.delayed_update(amaxes.clone()[None], scale, 448.0, algorithm="most_recent", rule=rule)
        assert torch.equal(scale, want), rule


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_a_recipes_statistics_are_those_of_what_it_quantizes(name, weight: bool) -> None:
    """Edges that fill no tile included."""
    x = torch.randn(140, 200, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 200)
    x[3] = 0.0
    recipe, scale = recipes.Recipe(name=name), torch.tensor(40.0)
    found = read(recipe.stats(x, E4M3, scale, weight=weight))
    made = recipe.quantize(x, E4M3, scale, weight=weight, transposed=False)
    assert (found.elements, found.nonzero) == (x.numel(), int(x.count_nonzero()))
    assert found.underflowed == int(((made == 0) & (x != 0)).sum()) > 0
    assert found.amax == float(x.abs().max())
    assert found.noise == pytest.approx(float((x - made).double().square().sum()), rel=1e-4)
    assert found.signal == pytest.approx(float(x.double().square().sum()), rel=1e-5)
    assert (found.saturated > 0) == (name == "delayed")


def test_weights_have_square_tiles_and_what_is_summed_over_rows_has_blocks_along_them() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 256)[:, None]
    one = torch.ones(())

    def quantized(recipe: recipes.Recipe, weight: bool, transposed: bool) -> torch.Tensor:
        return recipe.quantize(x, E4M3, one, weight=weight, transposed=transposed)

    block, mxfp8 = recipes.Recipe(name="block"), recipes.Recipe(name="mxfp8")
    assert torch.equal(quantized(block, True, False), recipes.quantize_tiles(x, E4M3, tile=(128, 128)).dequantize())
    assert torch.equal(quantized(block, True, True), quantized(block, True, False))
    assert torch.equal(quantized(block, False, True), recipes.quantize_tiles(x.t(), E4M3).dequantize().t())
    for weight in (False, True):
        assert torch.equal(quantized(mxfp8, weight, True), recipes.quantize_mxfp8(x.t(), E4M3).dequantize().t())
        assert torch.equal(quantized(mxfp8, weight, False), recipes.quantize_mxfp8(x, E4M3).dequantize())
