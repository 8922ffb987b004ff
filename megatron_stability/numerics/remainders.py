"""An fp32 master kept as a bf16 weight and the 16 bits that it lacks, as Transformer Engine's FusedAdam keeps it.

The weight is the master rounded to nearest, a tie away from zero; the remainder is the master's lower half as int16. A
negative remainder says that the weight was rounded up in magnitude, so the master's upper half is the weight's code
less one. Source: `transformer_engine/common/multi_tensor/adam.cu`, `store_param_remainders`.
"""

from __future__ import annotations

import torch


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The master, to the bit.

    Args:
        weight: [n] bf16.
        remainder: [n] int16.

    Returns:
        [n] fp32, a new tensor.
    """
    upper = weight.view(torch.int16).int() - (remainder < 0).int()
    return (upper << 16 | remainder.int() & 0xFFFF).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `join`.

    Args:
        master: [n] fp32.

    Returns:
        [n] bf16 and [n] int16.
    """
    code = master.view(torch.int32)
    remainder = (code << 16 >> 16).to(torch.int16)
    return ((code >> 16) + (remainder < 0).int()).to(torch.int16).view(torch.bfloat16), remainder
