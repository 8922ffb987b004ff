"""log-Z of the language-model head, for the step's record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_stability.megatron.model.loss import HeadLoss
from megatron_stability.observe.hook import Hook
from megatron_stability.signals import ways


class LogZHook(Hook):
    """Brings log-Z into the StepRecord.

    Every rank of the last stage has the same numbers within its tensor-parallel group; other ranks have none. A
    data-parallel rank without a valid token has none either, so that its 0 weights nothing.
    """

    def __init__(self, head: HeadLoss, beta: float, speaks: bool) -> None:
        """Args: head: whose log-Z; beta: of the z-loss; speaks: tensor rank 0, which reports for its group."""
        self._head, self._beta, self._speaks = head, beta, speaks

    @property
    def signals(self) -> Mapping[str, Any]:
        """Sums over ranks; the means are made of them in `log_string`."""
        return ways(("log_z/weight", "log_z/sum", "log_z/square_sum", "log_z/max"))

    def step_begins(self, step: int) -> None:
        """A new step's log-Z."""
        del step
        self._head.log_z.clear()

    def observe(self) -> Mapping[str, Tensor]:
        """This rank's sums; no collective, no copy to the host."""
        log_z = self._head.log_z
        none = torch.tensor(math.nan, dtype=torch.float64, device=log_z.sums.device)
        counted = (log_z.sums[0] != 0) & self._speaks
        values = [*log_z.sums, log_z.largest.double()]
        return {name: torch.where(counted, value, none) for name, value in zip(self.signals, values, strict=True)}

    def log_string(self, signals: Mapping[str, float]) -> str:
        """Mean and largest log-Z (nats) and the z-loss, from a record's signals."""
        weight = signals.get("log_z/weight", math.nan)
        if not weight:
            weight = math.nan
        mean, square = (signals.get(f"log_z/{name}", math.nan) / weight for name in ("sum", "square_sum"))
        largest = signals.get("log_z/max", math.nan)
        return f" log-Z mean: {mean:.4E} | log-Z max: {largest:.4E} | z loss: {self._beta * square:.4E} |"
