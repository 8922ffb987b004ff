"""TE's own tensor classes, made of given codes: where their values lie, as parameters too; its attention's softcap."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor

from megatron_stability.observe.storage import plain
from megatron_stability.transformer_engine import adapter
from tests.te import stub

SHAPE = (32, 64)


def _codes(columns: int = SHAPE[1]) -> torch.Tensor:
    return torch.randint(0, 120, (SHAPE[0], columns), dtype=torch.uint8)


def _made(kind: str, codes: torch.Tensor) -> Any:
    e4m3, scales = stub.DType.kFloat8E4M3, torch.ones(128, 4)
    common: dict[str, Any] = {"shape": SHAPE, "dtype": torch.bfloat16, "quantizer": None}
    both = {"rowwise_data": codes, "rowwise_scale_inv": scales, "columnwise_data": _codes()}
    both |= {"columnwise_scale_inv": scales}
    if kind == "float8":
        return Float8Tensor(**common, data=codes, fp8_scale_inv=torch.ones(1), fp8_dtype=e4m3)
    if kind == "blockwise":
        return Float8BlockwiseQTensor(**common, **both, fp8_dtype=e4m3, is_2D_scaled=True)
    swizzled = {"with_gemm_swizzled_scales": False}
    if kind == "mxfp8":
        return MXFP8Tensor(**common, **both, **swizzled, fp8_dtype=e4m3)
    amaxes = {"amax_rowwise": torch.ones(1), "amax_columnwise": torch.ones(1)}
    return NVFP4Tensor(**common, **both, **amaxes, **swizzled, fp4_dtype=stub.DType.kFloat4E2M1)


@pytest.mark.parametrize("kind", ["float8", "blockwise", "mxfp8", "nvfp4"])
def test_the_codes_are_found_in_tes_own_classes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # TE asks for its tensors' device
    codes = _codes(SHAPE[1] // 2 if kind == "nvfp4" else SHAPE[1])
    tensor = _made(kind, codes)
    assert plain(tensor) is codes
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    assert torch.equal(plain(parameter), codes)
    assert plain(parameter) is plain(parameter)


def test_case_13_attention_has_a_softcap_from_2_20_on() -> None:
    found = "softcap" in inspect.signature(DotProductAttention.__init__).parameters
    assert found is (adapter.version() >= Version("2.20"))
