"""What this rank brings to a step's record: losses, gradients, the schedule's place, and what hooks measured."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from megatron_stability.megatron.access import optimizer_state
from megatron_stability.megatron.observers import losses
from megatron_stability.observe.hook import Hook
from megatron_stability.observe.reduction import LocalSignals, Reduction, chained
from megatron_stability.records import Decision, StepRecord


class LocalStep:
    """One a rank, from `train_begins` on."""

    def __init__(
        self, args: Namespace, model: list[Any], optimizer: Any, hooks: Sequence[Hook], device: torch.device
    ) -> None:
        """Takes what it reads at every step.

        Args:
            args: Megatron's, read at every step (`consumed_train_samples` moves there).
            model: Megatron's model chunks.
            optimizer: Megatron's.
            hooks: of the run, once they know their signals.
            device: of the signals.
        """
        self._args, self._model, self._optimizer, self._hooks = args, model, optimizer, hooks
        extra = {name: how for hook in hooks for name, how in hook.signals.items()}
        self._reduce = Reduction(dist.group.WORLD, device, extra)
        self._forward_state = optimizer_state.ForwardState(model)
        self._losses_n2 = losses.NONE
        self._grad_amax: torch.Tensor | None = None
        self._history = 0  # of this process: ranks begin alike

    @property
    def signals(self) -> frozenset[str]:
        """The names that records of this run may have."""
        return self._reduce.signals

    def begins(self) -> None:
        """Keep what a forward and backward will change and a skip must put back."""
        self._forward_state.keep()
        self._losses_n2 = losses.NONE
        for hook in self._hooks:
            hook.step_begins(self._args.curr_iteration + 1)

    def losses_ready(self, losses_reduced: Sequence[dict[str, Any]]) -> None:
        """Keep this rank's micro-batch losses if it is the one that speaks for them, and look at its gradients."""
        self._grad_amax = optimizer_state.grad_amax(self._model)
        self._losses_n2 = losses.of_micro_batches(losses_reduced)

    def signals_at_the_gate(self, grad_norm: Any, overflow: bool = False) -> LocalSignals:
        """Collective: what hooks reduce among themselves.

        Args:
            grad_norm: Megatron's, equal on all ranks; None where the step came to none.
            overflow: fp16's loss scaler rejected the gradient.
        """
        args = self._args
        groups = self._optimizer.param_groups
        return LocalSignals(
            step=args.curr_iteration + 1,
            first_sample=args.consumed_train_samples,
            samples=get_current_global_batch_size(),
            loss_sums_n2=self._losses_n2,
            grad_norm=grad_norm,
            grad_amax=self._grad_amax,
            overflow=overflow,
            learning_rate=float(groups[0]["lr"]) if groups else 0.0,
            history=self._history,
            extra={name: value for hook in self._hooks for name, value in hook.observe().items()},
        )

    def reduce(self, local: LocalSignals) -> StepRecord:
        """Collective: the record, equal on every rank."""
        return self._reduce(local)

    def withheld(self) -> None:
        """Put back what the step's forward and backward changed."""
        self._forward_state.restore()

    def done(self, record: StepRecord, decision: Decision) -> None:
        """The step is part of what the ranks compare from now on."""
        self._history = chained(self._history, record, decision)
