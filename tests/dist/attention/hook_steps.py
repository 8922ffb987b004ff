"""A step of the AttentionHook without the runtime: forwards, the record that the runtime would make, the clip."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron_stability.records import AttentionTable, StepRecord
from tests.dist.pool import Context


def record(context: Context, hook: Any, number: int = 1) -> StepRecord:
    """What the runtime makes of the hook's signals: every rank's, combined."""
    from megatron_stability.observe.reduction import LocalSignals, Reduction

    local = LocalSignals(
        step=number,
        first_sample=0,
        samples=4,
        loss_sums_n2=torch.ones(1, 2),
        grad_norm=1.0,
        extra=hook.observe(),
    )
    made = Reduction(context.group, torch.device("cpu"), hook.signals)(local)
    return dataclasses.replace(made, signals=dict(made.signals))  # a read-only mapping can't be pickled


def step(
    context: Context, hook: Any, forwards: Callable[[], Any], updated: bool = True, number: int = 1
) -> tuple[StepRecord, AttentionTable | None]:
    """One step with an optimizer that changes nothing."""
    hook.step_begins(number)
    forwards()
    made = record(context, hook, number)
    return made, hook.update_done(made, updated)
