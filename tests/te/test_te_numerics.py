"""Our quantizers and scale rules against Transformer Engine's and torchao's own Python."""

import importlib
import math
from typing import Any

import pytest
import torch
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import _amax_and_scale_update

from megatron_stability.numerics.fp8 import recipes
from megatron_stability.numerics.fp8.formats import E4M3, E5M2, Fp8Format

FORMATS = [E4M3, E5M2]


def reference(fmt: Fp8Format, power_of_two: bool) -> Any:
    for name in ("reference_current_scaling", "quantization_current_scaling"):
        path = f"transformer_engine.pytorch.custom_recipes.{name}"
        if importlib.util.find_spec(path) is not None:
            kind = importlib.import_module(path).CurrentScalingQuantizerRef
            return kind(dtype=fmt.dtype, rowwise=True, columnwise=False, pow_2_scales=power_of_two)
    raise AssertionError("this TE has no reference quantizer under a name we know")


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(96, 160, generator=g)
    return {
        "random": x.to(dtype),
        "tiny": (x * 1e-35).to(dtype),
        "subnormal": (x * 1e-39).to(dtype),
        "huge": (x * 1e37).to(dtype),
        "zero": torch.zeros_like(x).to(dtype),
        "steep": (x * torch.logspace(-30, 30, 160)).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("kind", sorted(tensors(torch.float32)))
def test_current_scaling_equals_the_reference_quantizer(
    kind: str, fmt: Fp8Format, power_of_two: bool, dtype: torch.dtype
) -> None:
    x = tensors(dtype)[kind]
    want = reference(fmt, power_of_two).quantize(x)
    got = recipes.quantize_current(x, fmt, power_of_two=power_of_two)
    assert torch.equal(got.scale_inv.reshape(1), want.scale)
    assert torch.equal(got.codes.view(torch.uint8), want.data.view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_kernel_and_reference_differ_on_a_tensor_that_is_not_finite(bad: float, fmt: Fp8Format) -> None:
    """The kernel's rule (ours): scale 1 for amax inf, NaN left out. The reference: scale 0 or NaN, nothing survives."""
    x = torch.tensor([[2.0, -1.0, bad, 0.5]])
    want = reference(fmt, False).quantize(x)
    got = recipes.quantize_current(x, fmt)
    others = [0, 1, 3]
    if math.isinf(bad):
        assert got.codes.float()[0].tolist() == [2.0, -1.0, fmt.max, 0.5]
        assert want.data.float()[0, others].abs().tolist() == [0.0, 0.0, 0.0]
    else:
        assert got.codes.float()[0, others].tolist() == [fmt.max, -fmt.max / 2, fmt.max / 4]
        assert bool(want.data.float()[0, others].isnan().all())


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (7, 2), (32, 0)])
def test_delayed_updates_equal_the_python_update(algorithm: str, length: int, margin: int) -> None:
    g = torch.Generator().manual_seed(length)
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)
    theirs = torch.zeros(length, 3), torch.ones(3)
    ours = torch.zeros(length, 3), torch.ones(3)
    for step in range(200):
        amax = torch.randn(3, generator=g).abs() * 10.0 ** float(torch.randint(-30, 30, (1,), generator=g))
        draw = float(torch.rand((), generator=g))
        amax[step % 3] = 0.0 if draw < 0.1 else math.inf if draw < 0.15 else math.nan if draw < 0.2 else amax[step % 3]
        if draw > 0.95:
            amax[step % 3] = 1e-42  # the scale overflows
        theirs[0][0], ours[0][0] = amax, amax
        _amax_and_scale_update(*theirs, E4M3.max, recipe)
        recipes.delayed_update(*ours, E4M3.max, algorithm=algorithm, margin=margin, rule="python")
        assert torch.equal(ours[1].view(torch.int32), theirs[1].view(torch.int32)), step
        assert torch.equal(ours[0].view(torch.int32), theirs[0].view(torch.int32)), step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_mxfp8_equals_torchao_with_rceil(fmt: Fp8Format, dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    for kind, x in tensors(dtype).items():
        if kind == "subnormal":
            continue
        if kind == "steep":
            x = x.clamp(-1e30, 1e30)
        scale, codes = to_mx(x.contiguous(), fmt.dtype, 32, ScaleCalculationMode.RCEIL)
        got = recipes.quantize_mxfp8(x, fmt)
        # At scale 2^-127 torchao leaves the data as they are; TE's kernel multiplies by 2^127, and so do we.
        same = scale.view(torch.uint8) != 0
        assert bool(same.all()) or kind not in ("random", "huge")
        assert torch.equal(got.scale_inv.reshape(scale.shape)[same], scale.float()[same]), kind
        blocks = same.repeat_interleave(32, -1)
        assert torch.equal(got.codes.view(torch.uint8)[blocks], codes.view(torch.uint8)[blocks]), kind
    special = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    special[0, 3], special[1, 40] = math.inf, -math.inf
    scale, codes = to_mx(special, fmt.dtype, 32, ScaleCalculationMode.RCEIL)
    got = recipes.quantize_mxfp8(special, fmt)
    assert torch.equal(got.codes.view(torch.uint8), codes.view(torch.uint8))
    special[0, 3] = math.nan  # torchao lets a NaN spoil its block, TE's kernel leaves it out of the amax
    _, codes = to_mx(special, fmt.dtype, 32, ScaleCalculationMode.RCEIL)
    assert bool(codes[0, :32].float().isnan().all())
    assert int(recipes.quantize_mxfp8(special, fmt).codes[0, :32].float().isnan().sum()) == 1
