"""Scalars through Megatron's own TensorBoard and W&B writers, also of steps that come again after a rewind."""

from __future__ import annotations

from typing import Any

from megatron_stability.megatron.access.host import Host
from megatron_stability.records import AttentionTable, Decision, StepRecord
from megatron_stability.report.attention_curves import curves


class MegatronWriters:
    """A `pipeline.Sink`; writes on the rank where Megatron has a writer, and nowhere else."""

    def __init__(self, host: Host, enabled: bool, head_curves: bool) -> None:
        """`host` has the writers; the rest as `record.tensorboard` and `observe.attention.head_curves` say."""
        self._host, self._enabled, self._head_curves = host, enabled, head_curves
        self._generation = 0  # rewinds of this process

    def write(self, record: StepRecord, decision: Decision) -> None:
        """Loss, norm and what was decided, at this step; NaN is written as NaN."""
        if not self._enabled:
            return
        scalars = {
            "stability/generation": float(self._generation),
            "stability/loss": record.loss,
            "stability/grad-norm": record.grad_norm,
            "stability/action": float(decision.action.precedence),
            "stability/advised": float(decision.advised.precedence),
            "stability/verdicts": float(len(decision.verdicts)),
        } | {f"stability/{name}": value for name, value in record.signals.items()}
        self._write(scalars, record.step)

    def rewound(self, step: int) -> None:
        """The steps after `step` come again.

        TensorBoard shows the last row of a step. W&B takes no row of a step that it has passed, from Megatron neither:
        its run is finished with a note of what was undone, and another one of the same group goes on.
        """
        self._generation += 1
        _, wandb = self._host.writers()
        if wandb is not None and wandb.run is not None:
            _next_run(wandb, step, self._generation)

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


def _next_run(wandb: Any, step: int, generation: int) -> None:
    """Finish W&B's run, and begin the one that goes on from `step`; offline where the server can't be reached."""
    run = wandb.run
    first_name = str(run.name).partition(" (generation ")[0]
    settings = {
        "project": run.project,
        "entity": run.entity or None,
        "group": run.group or first_name,
        "name": f"{first_name} (generation {generation}, from step {step})",
        "dir": run.settings.root_dir,
        "config": dict(run.config) | {"stability_rewound": {"run": run.id, "to_step": step}},
    }
    run.summary["stability/undone_after_step"] = step
    run.finish()
    try:
        wandb.init(**settings)
    except wandb.errors.Error as error:
        print(f"> megatron-stability: W&B goes on offline after the rewind: {error}", flush=True)
        wandb.init(mode="offline", **settings)
