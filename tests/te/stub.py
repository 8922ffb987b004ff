"""A stand-in for TE's compiled module, for tests of its Python on a CPU.

`DType` and the slot numbers are what the C++ side exports (TE `common/include/transformer_engine/transformer_engine.h`,
`pytorch/csrc/common.h`); any other name is a class whose instances accept everything, so that modules import. A test
that came to rest on such a class would compare nothing: all of ours call TE functions that are pure Python.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
import warnings
import zlib
from typing import Any

_TYPES = {"Byte": 0, "Int32": 2, "Float32": 4, "Float16": 5, "BFloat16": 6, "Float8E4M3": 7, "Float8E5M2": 8}
DType = enum.IntEnum("DType", {f"k{name}": number for name, number in {**_TYPES, "Float4E2M1": 10}.items()})


class FP8FwdTensors(enum.IntEnum):
    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class _AnyMember(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Anything()
        member.number = zlib.crc32(name.encode()) & 0xFFFF
        return member


class _Anything(metaclass=_AnyMember):
    number = 0

    def __int__(self) -> int:
        return self.number

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Anything()


class NVTE_Fused_Attn_Backend(_Anything):  # noqa: N801
    __members__ = ("NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8")  # 2.20 compares them with its own


def _any_class(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Anything,), {})


def install() -> None:
    """Make `import transformer_engine.pytorch` work in this process. Needs NVTE_PROJECT_BUILDING=1 before it starts."""
    module = types.ModuleType("transformer_engine_torch")
    vars(module).update(
        DType=DType,
        FP8FwdTensors=FP8FwdTensors,
        FP8BwdTensors=FP8BwdTensors,
        NVTE_Fused_Attn_Backend=NVTE_Fused_Attn_Backend,
        __getattr__=_any_class,
    )
    sys.modules["transformer_engine_torch"] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TE says that it found no compiled module, and goes on
        common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
