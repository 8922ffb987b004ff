"""Scalars through Megatron's own TensorBoard and W&B writers."""

from __future__ import annotations

from megatron.training import get_tensorboard_writer, get_wandb_writer

from megatron_stability.records import Decision, StepRecord


class MegatronWriters:
    """A `pipeline.Sink`; writes on the rank where Megatron has a writer, and nowhere else."""

    def __init__(self, enabled: bool) -> None:
        """`enabled` is `record.tensorboard` of the configuration."""
        self._enabled = enabled

    def write(self, record: StepRecord, decision: Decision) -> None:
        """Loss, norm and what was decided, at this step; NaN is written as NaN."""
        if not self._enabled:
            return
        scalars = {
            "stability/loss": record.loss,
            "stability/grad-norm": record.grad_norm,
            "stability/action": float(decision.action.precedence),
            "stability/advised": float(decision.advised.precedence),
            "stability/verdicts": float(len(decision.verdicts)),
        }
        if (writer := get_tensorboard_writer()) is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, record.step)
        if (wandb := get_wandb_writer()) is not None:
            wandb.log(scalars, record.step)
