"""Scalars through Megatron's own TensorBoard and W&B writers."""

from __future__ import annotations

import math

from megatron.training import get_tensorboard_writer, get_wandb_writer

from megatron_stability.records import AttentionTable, Decision, StepRecord


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
        } | {f"stability/{name}": value for name, value in record.signals.items()}
        self._write(scalars, record.step)

    def write_attention(self, table: AttentionTable) -> None:
        """A curve a layer: its hottest head, its least entropy, its clips so far, its largest QK-norm gain."""
        if not self._enabled:
            return
        scalars: dict[str, float] = {}
        for at, layer in enumerate(table.layers):
            largest = [value for value in table.max_logit_lh[at] if not math.isnan(value)]
            entropies = [value for value in table.entropy_lh[at] if not math.isnan(value)]
            clips = [value for value in table.clips_lh[at] if not math.isnan(value)]
            scalars |= {f"stability/attention/max-logit/{layer}": max(largest)} if largest else {}
            scalars |= {f"stability/attention/min-entropy/{layer}": min(entropies)} if entropies else {}
            scalars |= {f"stability/qk-clip/clips/{layer}": sum(clips)} if clips else {}
            if not math.isnan(table.max_gain_l[at]):
                scalars[f"stability/qk-norm/max-gain/{layer}"] = table.max_gain_l[at]
        self._write(scalars, table.step)

    @staticmethod
    def _write(scalars: dict[str, float], step: int) -> None:
        if (writer := get_tensorboard_writer()) is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
        if (wandb := get_wandb_writer()) is not None:
            wandb.log(scalars, step)
