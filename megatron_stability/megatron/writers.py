"""Scalars and texts through Megatron's own TensorBoard and W&B writers, and episodes on Megatron's log.

Steps that come again after a rewind are told apart there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron.training import print_rank_last

from megatron_stability.config import Record
from megatron_stability.decide.episodes import sentence
from megatron_stability.echo import said
from megatron_stability.megatron.access.host import Host
from megatron_stability.pipeline import Grouping
from megatron_stability.records import Action, AttentionTable, Change, Decision, Episode, StepRecord
from megatron_stability.report import tags


class MegatronWriters:
    """A `pipeline.Sink`; writes on the rank where Megatron has a writer, and nowhere else."""

    def __init__(self, host: Host, episodes: Grouping, record: Record, z_loss: float = 0.0) -> None:
        """Takes what it writes with, and what it writes of.

        Args:
            host: has the writers.
            episodes: the run's, which knows what is open.
            record: whether it writes, and in what detail.
            z_loss: β of the z-loss.
        """
        self._host, self._episodes = host, episodes
        self._enabled, self._detail, self._z_loss = record.tensorboard, record.writer_tags, z_loss
        self._has_layout = False
        self._generation = 0  # rewinds of this process
        self._step = 0
        self._count: Counter[str] = Counter()  # of the episodes that opened, by detector
        self._worst: dict[str, Episode] = {}

    def write(self, record: StepRecord, decision: Decision) -> None:
        """A line on what was done, if something was; loss, norm and action at this step, NaN as NaN."""
        self._step = record.step
        acted = decision.advised is not Action.APPLY or decision.action is not Action.APPLY
        told = said(f"step {record.step} {decision.told}: {decision.reason}")
        if acted:
            print_rank_last(f" stability: {told}")
        if not self._enabled:
            return
        open_ = len(self._episodes.open)
        scalars = tags.scalars(record, decision, z_loss=self._z_loss, generation=self._generation, open_=open_)
        self._write(scalars, record.step)
        if acted:
            self._text(tags.DECISIONS, told)

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
        """Curves of each layer and head, where they are asked for."""
        scalars = tags.table_scalars(table, self._detail)
        if self._enabled and scalars:
            self._write(scalars, table.step)

    def write_episode(self, change: Change, episode: Episode) -> None:
        """A line on the log, and a text at the step."""
        self._count[episode.detector] += change is Change.OPENED
        worst = self._worst.get(episode.detector)
        if worst is None or episode.tier.severity >= worst.tier.severity:
            self._worst[episode.detector] = episode
        text = said(sentence(change, episode))
        print_rank_last(f" stability: step {self._step} episode: {text}")
        if self._enabled:
            self._text(tags.EPISODES, text)

    def close(self) -> None:
        """The last word: each detector that spoke, how often, and at its worst."""
        still_open = {episode.detector for episode in self._episodes.open}
        for detector, worst in sorted(self._worst.items(), key=lambda item: -item[1].tier.severity):
            still = ", still open" if detector in still_open else ""
            times = f"{self._count[detector]} episode{'s' * (self._count[detector] != 1)}{still}"
            print_rank_last(said(f" stability: {detector}: {times}; worst ({worst.tier}): {worst.reason}"))

    def _write(self, scalars: dict[str, float], step: int) -> None:
        writer, wandb = self._host.writers()
        if writer is not None:
            if not self._has_layout:
                writer.add_custom_scalars(tags.layout())
                self._has_layout = True
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
        if wandb is not None:
            wandb.log(scalars, step)

    def _text(self, tag: str, text: str) -> None:
        writer, wandb = self._host.writers()
        if writer is not None:
            writer.add_text(tag, text, self._step)
        if wandb is not None:
            wandb.log({tag: text}, self._step)


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
        print(said(f"> megatron-stability: W&B goes on offline after the rewind: {error}"), flush=True)
        wandb.init(mode="offline", **settings)
