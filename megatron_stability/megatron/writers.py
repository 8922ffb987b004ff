"""Scalars through Megatron's own TensorBoard and W&B writers."""

from __future__ import annotations

from megatron_stability.megatron.access.host import Host
from megatron_stability.records import AttentionTable, Decision, StepRecord
from megatron_stability.report.attention_curves import curves


class MegatronWriters:
    """A `pipeline.Sink`; writes on the rank where Megatron has a writer, and nowhere else."""

    def __init__(self, host: Host, enabled: bool, head_curves: bool) -> None:
        """`host` has the writers; the rest as `record.tensorboard` and `observe.attention.head_curves` say."""
        self._host, self._enabled, self._head_curves = host, enabled, head_curves

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
        } | {f"stability/{name}": value for name, value in record.signals.items()}
        self._write(scalars, record.step)

    def write_attention(self, table: AttentionTable) -> None:
        """Curves of each layer, and of each head where they are asked for."""
        if self._enabled:
            scalars = {f"stability/{name}": value for name, value in curves(table, self._head_curves).items()}
            self._write(scalars, table.step)

    def _write(self, scalars: dict[str, float], step: int) -> None:
        writer, wandb = self._host.writers()
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
        if wandb is not None:
            wandb.log(scalars, step)
