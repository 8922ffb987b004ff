"""Wrapper subclasses with the storage names of Transformer Engine's tensor classes, and nothing of their arithmetic.

As of TE, an operation on one is an error here where theirs would dequantize or refuse (`MXFP8Tensor` has no
`reshape(-1)`), so that a test sees whoever does not go to the storage.
"""

from __future__ import annotations

from typing import Any

import torch


class Quantized(torch.Tensor):
    """No memory of its own; subclasses name what holds the codes."""

    def __new__(cls, shape: tuple[int, ...], **held: Any) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        vars(made).update(held)
        return made

    def __init__(self, shape: tuple[int, ...], **held: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # of which a parameter is made
            return cls(tuple(args[0].shape), **vars(args[0]))
        raise AssertionError(f"{func} of {cls.__name__}")


class Float8Tensor(Quantized):
    pass


class Float8BlockwiseQTensor(Quantized):
    pass


class MXFP8Tensor(Quantized):
    pass


class NVFP4Tensor(Quantized):
    pass


class HybridQuantizedTensor(Quantized):
    pass


def codes(seed: int, *shape: int) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(0, 120, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def every_kind(seed: int = 0, rows: int = 8, columns: int = 64) -> dict[str, tuple[Quantized, torch.Tensor]]:
    """A tensor of each class and the codes that it holds, with other buffers that nobody is to compare."""
    shape, one = (rows, columns), torch.ones(1)
    whole, columnwise = codes(seed, *shape), codes(seed + 1, *shape)
    half, scales = codes(seed + 2, rows, columns // 2), codes(seed + 3, 128, 4)
    blocks = {"_rowwise_scale_inv": scales, "_columnwise_data": columnwise, "_columnwise_scale_inv": scales}
    mx = MXFP8Tensor(shape, _rowwise_data=whole, **blocks)
    return {
        "float8": (Float8Tensor(shape, _data=whole, _scale_inv=one, _transpose=None), whole),
        "blockwise": (Float8BlockwiseQTensor(shape, _rowwise_data=whole, **blocks), whole),
        "mxfp8": (mx, whole),
        "nvfp4": (NVFP4Tensor(shape, _rowwise_data=half, _amax_rowwise=one, **blocks), half),
        "columnwise only": (MXFP8Tensor(shape, _rowwise_data=None, **blocks), columnwise),
        "hybrid": (HybridQuantizedTensor(shape, _rowwise_storage=mx, _columnwise_storage=None), whole),
    }
