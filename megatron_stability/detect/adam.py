"""How long Adam's second moment remembers a spike: v_k = β2·v_{k-1} + (1-β2)·g², one step of r times the usual norm."""

from __future__ import annotations

import math


def excess(ratio: float, beta2: float, steps: int) -> float:
    """v_k/v̄, `steps` steps k after one spike in a steady run: 1 + (1-β2)(r²-1)·β2^k.

    Args:
        ratio: r, norm of the spike after clipping over the usual norm.
        beta2: β2 in (0, 1).
        steps: k >= 0; 0 is right after the spike.

    Returns:
        v over its steady value; the effective learning rate is lower by its square root.
    """
    return 1.0 + (1.0 - beta2) * (ratio * ratio - 1.0) * math.pow(beta2, steps)


def steps_to_forget(ratio: float, beta2: float, within: float = 0.1) -> int:
    """Steps until v_k/v̄ <= 1 + `within`; 0 if the spike never lifts it above.

    Args:
        ratio: r, norm of the spike after clipping over the usual norm.
        beta2: β2 in (0, 1).
        within: share above the steady value that counts as forgotten.

    Returns:
        The least such k.
    """
    if ratio <= 1.0:
        return 0
    # By logarithms: the square of a gradient norm may be past the largest float.
    log_lift = math.log1p(-beta2) + math.log(ratio - 1.0) + math.log(ratio + 1.0)
    return max(0, math.ceil((math.log(within) - log_lift) / math.log(beta2)))
