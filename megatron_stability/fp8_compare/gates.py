"""What passes: the gates' names and limits. `criteria` has the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron_stability.detect.config import Detect

EARLY: Final = 2  # the step whose gradients are judged
LONG_HISTORY: Final = (1024, "max")  # amax history of Transformer Engine's own delayed recipe
WARMUP: Final = 100  # steps, of a run that has at least twice as many
# In the order of the table: every gate, and what it looks at.
GATES: Final = {
    "halt": "the FP8 run went to its end",
    "steps": "both runs withheld the same steps",
    "loss": "relative error of the smoothed loss, worst window after warmup",
    "cosine": f"gradients of step {EARLY}, worst layer, FP8 against BF16",
    "binades": "that delayed scaling leaves to normal values, fewest over tensors",
    "underflow": "share of a tensor's non-zero elements that became zero",
    "saturation": "share of a tensor's elements that were cut off",
    "held-out": "relative error of the last held-out loss",
    "time": "seconds a step over the control's",
}
OPTIONAL: Final = ("cosine", "binades", "underflow", "saturation", "held-out")  # what `--without` may leave out
_DETECT = Detect()


@dataclass(frozen=True, kw_only=True)
class Gates:
    """What passes; None: left out.

    Attributes:
        loss_error: largest |mean relative loss error| of a window after warmup.
        window: steps of a window.
        held_out_error: largest relative error of the last held-out loss, upwards.
        slowdown: most FP8 seconds a step over the control's; 1 asks FP8 to be as fast.
        cosine: least cosine of a layer's gradients in step 2.
        binades: fewest binades for normal values.
        underflow: largest share of a tensor's non-zero elements that became zero.
        saturation: largest share of a tensor's elements that were cut off.
    """

    loss_error: float = 0.0025
    window: int = 50
    held_out_error: float | None = 0.0025
    slowdown: float | None = None
    cosine: float | None = 0.9
    binades: float | None = _DETECT.fp8_binades.watch
    underflow: float | None = _DETECT.fp8_underflow.watch
    saturation: float | None = _DETECT.fp8_saturation.small


def warmup_of(steps: int) -> int:
    """Steps left out where nobody said how many: 100, or a quarter of a run of fewer than 200."""
    return WARMUP if steps >= 2 * WARMUP else steps // 4


def layer_name(row: int) -> str:
    """Of a row of sketches."""
    return f"layer {row}" if row else "embedding and output layer"


def least(cosines: Sequence[float | str]) -> tuple[int, float]:
    """The row with the least cosine; NaN counts as less than any."""
    values = [float(value) for value in cosines]
    row = min(range(len(values)), key=lambda i: -math.inf if math.isnan(values[i]) else values[i])
    return row, values[row]
