"""What a fact of triage is, and the levels that a loss and a gradient norm leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_stability.explain.scene import Level, Scene
from megatron_stability.ledger.entries import StepEntry

JUMP_NATS, FAR_SIGMA = 0.5, 8.0  # a loss this far above its level, by both, has departed
NORM_FACTOR = 5.0  # a gradient norm this many times its level has departed
SOON = 20  # steps after a restart that are soon after it


@dataclass(frozen=True, slots=True)
class Fact:
    """Whether something holds, and the sentence that says it with its numbers."""

    holds: bool
    says: str


Reader = Callable[[Scene], Fact | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """How a fact is read, and what would have measured it where nothing did."""

    read: Reader
    flag: str


def departs(step: StepEntry, loss: Level | None) -> bool:
    if not step.computed:
        return False
    if not math.isfinite(step.loss):
        return True
    return loss is not None and step.loss - loss.middle > JUMP_NATS and loss.distance(step.loss) > FAR_SIGMA


def amplified(step: StepEntry, norm: Level | None) -> bool:
    return step.computed and (
        not math.isfinite(step.grad_norm) or (norm is not None and step.grad_norm > NORM_FACTOR * norm.middle)
    )


def listed(items: Sequence[object]) -> str:
    return ", ".join(str(item) for item in items[:8]) + ", …" * (len(items) > 8)
