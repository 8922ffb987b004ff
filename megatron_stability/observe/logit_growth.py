"""Growth of the largest attention logits: the slope of their logarithm over the last few measurements."""

from __future__ import annotations

from collections import deque

import torch

STEPS = 1000  # the unit of a slope: ln 2 = 0.69 doubles a logit in so many steps


class LogitGrowth:
    """Least squares over the last `size` measurements, of every layer and head at once; the host waits for nothing."""

    def __init__(self, size: int = 8) -> None:
        """Nothing measured yet.

        Args:
            size: measurements that are kept, at least 2.
        """
        self._seen: deque[tuple[int, torch.Tensor]] = deque(maxlen=size)

    def add(self, step: int, max_lh: torch.Tensor) -> torch.Tensor:
        """Another measurement.

        Args:
            step: when it was made; later than the one before.
            max_lh: [L, H] largest logits; one that is not finite and positive has no logarithm and makes its head's
                slope NaN for as long as it is kept.

        Returns:
            [L, H] fp32 slope of ln S in 1 / (1000 steps); NaN until there are two measurements.
        """
        known = torch.isfinite(max_lh) & (max_lh > 0)
        self._seen.append((step, torch.where(known, max_lh, torch.nan).log()))
        steps = torch.tensor([at / STEPS for at, _ in self._seen], dtype=torch.float64)
        x = (steps - steps.mean()).float().to(max_lh.device)
        y_lh = torch.stack([logs_lh for _, logs_lh in self._seen], dim=-1)
        return ((y_lh - y_lh.mean(dim=-1, keepdim=True)) * x).sum(dim=-1) / x.square().sum()
