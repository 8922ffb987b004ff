"""Everything that a run writes of itself: its ledger and bundles on rank 0, TensorBoard and W&B, the opening lines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.training import print_rank_last

from megatron_stability.config import StabilityConfig
from megatron_stability.echo import said
from megatron_stability.errors import UsageError
from megatron_stability.ledger.bundle import Bundles
from megatron_stability.ledger.ledger import Ledger
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.observers.hooks import TableSink
from megatron_stability.megatron.run_info import bundle_context, opening, run_info
from megatron_stability.megatron.writers import MegatronWriters
from megatron_stability.pipeline import Grouping, Sink
from megatron_stability.records import AttentionTable
from megatron_stability.watch import heartbeat


class Journal:
    """One a rank; the ledger is rank 0's."""

    def __init__(self, config: StabilityConfig, args: Namespace, host: Host) -> None:
        """Opens nothing yet.

        Args:
            config: the validated tree.
            args: Megatron's arguments.
            host: the loop around the core; has the writers.

        Attributes:
            sinks: told of every finished step, on every rank; more may be appended before training begins.
        """
        self._config, self._args, self._host = config, args, host
        self.sinks: list[Sink] = []
        self._ledger: Ledger | None = None
        self._writers: MegatronWriters | None = None

    @property
    def folder(self) -> Path:
        """`record.dir`, else SAVE/stability, else ./stability."""
        if self._config.record.dir is not None:
            return self._config.record.dir
        return Path(self._args.save or ".") / "stability"

    def open(self, evidence: Callable[[], dict[str, torch.Tensor]]) -> str | None:
        """On rank 0, at the resumed step.

        Args:
            evidence: what the step that is written of had read and drawn, for its bundle.

        Returns:
            The complaint, if it can't be opened: for every rank to raise.
        """
        if dist.get_rank() != 0:
            return None
        args = self._args
        try:
            ledger = self._ledger = Ledger.open(
                self.folder,
                resume_step=args.iteration,
                resume_sample=args.consumed_train_samples,
                run_info=run_info(self._config, args),
            )
            bundles = Bundles(
                self.folder,
                limits=self._config.record,
                context=bundle_context(self._config, args, self._host),
                generation=lambda: ledger.generation,
                tensors=lambda record: evidence(),
            )
        except UsageError as error:
            return str(error)
        self.sinks += [ledger, bundles]
        return None

    def train_begins(self, episodes: Grouping) -> None:
        """Once nothing refuses the start: writers and heartbeat, the last of the sinks, and what the log says first."""
        shown = self._config.record, self._config.model.z_loss
        self._writers = MegatronWriters(self._host, episodes, *shown)
        self.sinks.append(self._writers)
        seconds = self._config.record.heartbeat_seconds
        self.sinks += heartbeat.of_node(self.folder, int(self._args.rank), self._args.local_rank, seconds)
        for line in opening(self._config, self.folder):
            print_rank_last(said(f"> megatron-stability: {line}"))

    def write_tables(self, tables: Iterable[AttentionTable | None]) -> None:
        """What hooks made of all layers and heads; after the step's line."""
        for table in filter(None, tables):
            for sink in self.sinks:
                if isinstance(sink, TableSink):
                    sink.write_attention(table)

    def rewound(self, reason: str) -> None:
        """Megatron's arguments stand where the run went back to."""
        if self._writers is not None:
            self._writers.rewound(self._args.iteration)
        if self._ledger is not None:
            self._ledger.rewind(self._args.iteration, self._args.consumed_train_samples, reason)

    def saving(self, step: int) -> None:
        """A checkpoint of `step` is being made."""
        if self._ledger is not None:
            self._ledger.saving(step)

    def ending(self, code: int, reason: str) -> None:
        """Why the run ends, into the ledger if it is open."""
        if self._ledger is not None:
            self._ledger.ending(self._args.curr_iteration, code, reason)

    def close(self) -> None:
        """The last word on the log, and the ledger's end."""
        if self._writers is not None:
            self._writers.close()
            self._writers = None
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        heartbeat.close(self.sinks)
