"""The plain tensor in which a tensor's values lie: the codes of a quantized one, the local shard of a distributed one.

A wrapper subclass has no memory of its own: its `data_ptr()` is 0, and a view of it dequantizes or is refused. So
whatever reads bytes reads these. Only what a forward multiplies with is taken: transposes and column-wise copies come
and go with use, and rows of `_scale_inv` may be padding that nobody wrote.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_stability.errors import UsageError

#: Names under which Transformer Engine's classes keep what they hold (`tensor/storage/` in 2.9 to 2.20), the one that a
#: forward uses before its column-wise copy, in the order in which they are looked for.
_HELD = (
    *("_data",),  # Float8Tensor
    *("_rowwise_data", "_columnwise_data"),  # Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor
    *("_rowwise_storage", "_columnwise_storage"),  # HybridQuantizedTensor: two of the others
    *("_hp_data",),  # IdentityTensor
    *("rowwise_data", "columnwise_data"),  # GroupedTensor: the experts' weights one after the other
)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the one behind a wrapper; always the same object, by whose identity it may be known.

    Args:
        tensor: a parameter, its data, or an optimizer's state.

    Returns:
        A tensor with memory of its own; of a quantized one the codes (uint8).

    Raises:
        UsageError: a wrapper subclass whose storage is not known; names its class.
    """
    inner: object = tensor
    while not _is_plain(inner):
        if isinstance(inner, DTensor):
            inner = inner._local_tensor
            continue
        found = next((part for name in _HELD if (part := getattr(inner, name, None)) is not None), None)
        if found is None:
            raise UsageError(
                f"a tensor of class {type(inner).__module__}.{type(inner).__qualname__}: where it keeps its values is "
                "not known here, so that it can't be compared or checked; turn the option off that makes weights or "
                "optimizer state of this class, or use --stability-mode off"
            )
        inner = found
    assert isinstance(inner, torch.Tensor)
    return inner


def _is_plain(tensor: object) -> bool:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return True
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        return False
    if any(hasattr(tensor, name) for name in _HELD) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.data_ptr() != 0 or not tensor.numel()
