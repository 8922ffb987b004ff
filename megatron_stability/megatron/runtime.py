"""The installed runtime: Megatron's step, handed to the pipeline and back.

Thin on purpose. What is judged stands in `detect/` and `decide/`; here is only where Megatron keeps what they need.
Every rank has one, and every method that says "collective" is called by every rank, once a step, in the same order.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import print_rank_last

from megatron_stability import detect
from megatron_stability.config import StabilityConfig
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.echo import said
from megatron_stability.errors import EXIT_HALTED, EXIT_REWIND, UsageError
from megatron_stability.megatron import evidence
from megatron_stability.megatron.access import collectives, optimizer_state
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.access.skipped import SkippedDocuments
from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints
from megatron_stability.megatron.checkpoint.rewind import Rewinds
from megatron_stability.megatron.checkpoint.run_files import RunFiles
from megatron_stability.megatron.journal import Journal
from megatron_stability.megatron.local import LocalStep
from megatron_stability.megatron.model import init
from megatron_stability.megatron.model.loss import HeadLoss, real_vocab_size
from megatron_stability.megatron.observers import hooks, losses
from megatron_stability.megatron.observers.batches import skip_ahead
from megatron_stability.megatron.own_state import OwnState
from megatron_stability.megatron.patching import install_digest
from megatron_stability.megatron.scaling import Scaling
from megatron_stability.observe.hook import Hook
from megatron_stability.observe.reduction import LocalSignals
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Decision, StepRecord


@dataclass(frozen=True, slots=True)
class Step:
    """What the ranks have decided on the step that runs, or ran last."""

    record: StepRecord
    decision: Decision


class Runtime:
    """What the seams ask (see `seams.py` for where each method is called from)."""

    def __init__(self, config: StabilityConfig, args: Namespace, host: Host | None = None) -> None:
        """Builds the pure rooms; whatever needs ranks or the model waits for `train_begins`.

        Args:
            config: the validated tree, mode `observe` or `act`.
            args: Megatron's arguments, read at every step (`consumed_train_samples` moves there).
            host: the loop around the core; by default Megatron's own.

        Attributes:
            files: the run's data and tokenizer files.
            host: as given.
            journal: what the run writes of itself.
            model: Megatron's list of model chunks, from `train_begins` on.
            optimizer: Megatron's optimizer, from `train_begins` on.
        """
        assert config.mode != "off", "mode off installs no runtime"
        self.config = config
        self._args, self.host = args, host or Host()
        self.files = RunFiles(config, args)
        self.checkpoints = Checkpoints(config, args, self.files, self.host)
        self.rewinds = Rewinds(config, args, self.checkpoints)
        if config.data.skip_list is not None:
            self.rewinds.data.skipped = SkippedDocuments(config.data.skip_list, args)
        self.journal = Journal(config, args, self.host)
        self._local: LocalStep | None = None
        self._hooks: list[Hook] = []
        self._scaling = Scaling()
        self.model: list[Any] = []
        self.optimizer: Any = None
        self._step: Step | None = None
        self._incidents = 0
        self._applied = False  # whether this process has applied an update
        self._ahead: StepRecord | None = None  # with the score of the batch after it
        self._evidence: dict[str, torch.Tensor] = {}  # of the step that is not applied, for its bundle
        detectors = detect.build(config.detect)
        self._pipeline: Pipeline[LocalSignals] = Pipeline(
            observe=lambda local: self._running.reduce(local),
            detectors=detectors,
            policy=TablePolicy(config.decide, config.mode),
            sinks=self.journal.sinks,
            episodes=Episodes(detectors, config.decide.quiet_steps),
            afresh=config.detect.expect.reset,
        )
        self._own = OwnState(self._pipeline, self._scaling, self.rewinds, self.checkpoints.trajectory)

    @property
    def _running(self) -> LocalStep:
        assert self._local is not None, "train_begins was not called: is patch 006-train-loop applied?"
        return self._local

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return int(self._args.rank)

    @cached_property
    def head_loss(self) -> HeadLoss:
        """The loss of the language-model head, where a setting changes it."""
        return HeadLoss(self.config.model, real_vocab_size(self.host.vocab_size(), self._args.padded_vocab_size))

    def language_model_loss(self, module: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor | None:
        """Per-token loss [b, s] with the final softcap and the z-loss; None where Megatron's own is wanted."""
        if not self.config.model.changes_loss:
            return None
        return self.head_loss(labels, logits, module.pg_collection.tp)

    def final_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits that go to no loss, capped."""
        return logits if self.config.model.final_softcap is None else self.head_loss.capped(logits)

    # --- life -------------------------------------------------------------------------------------------------

    def train_begins(self, model: list[Any], optimizer: Any, opt_param_scheduler: Any) -> None:
        """Collective: ranks compare what is installed, then the ledger opens at the resumed step."""
        self.checkpoints.train_begins(model, optimizer, opt_param_scheduler)
        self.rewinds.refuse_a_loop(self.journal.folder)
        device = collectives.device()
        self.model, self.optimizer = model, optimizer
        complaint = install_digest.missing_names() or self._make_hooks(device)
        complaint = complaint or self.journal.open(lambda: self._evidence)
        install_digest.compare(dist.group.WORLD, self.config, complaint)
        self.rewinds.train_begins(
            (model, optimizer, opt_param_scheduler),
            self.journal.folder,
            self._own.saved.get("pass_over"),
            self._pipeline.policy,
            self._scaling.running,
        )
        for hook in self._hooks:
            hook.train_begins()
        self._local = LocalStep(self._args, model, optimizer, self._hooks, device)
        idle = hooks.say_what_is_silent(self._args, self._pipeline.detectors, self._local.signals)
        self._pipeline = self._pipeline.without(idle)
        detect.expected.allow(self._pipeline.detectors, self.checkpoints.allowed)
        self.journal.train_begins(self._pipeline.episodes)

    def _make_hooks(self, device: torch.device) -> str | None:
        """The complaint, if this rank has a layer that can't be hooked, is for every rank to raise."""
        try:
            context = hooks.Context(
                config=self.config,
                args=self._args,
                host=self.host,
                model=self.model,
                optimizer=self.optimizer,
                device=device,
                folder=self.journal.folder,
                data=self.rewinds.data,
                files=self.files,
                checkpoints=self.checkpoints,
                head=self.head_loss if self.config.model.changes_loss else None,
            )
            self._hooks = self._own.hooks = hooks.build(context)
            if self._args.iteration > 0:
                self._own.load_hooks()
            init.report_a_new_run(self.model, self.config.model, self._args)
        except UsageError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Wait for a checkpoint that is being completed, let go of the data, and close the ledger."""
        self.checkpoints.close()
        self.rewinds.ended()
        self.rewinds.data.close()
        self.journal.close()

    def ending(self, code: int, reason: str) -> None:
        """Why the run ends, into the ledger if it is open."""
        self.journal.ending(code, reason)

    # --- one step ---------------------------------------------------------------------------------------------

    def evaluated(self, suffix: str, losses: dict[str, torch.Tensor]) -> None:
        """A validation set's losses, for the next step's record."""
        for hook in self._hooks:
            hook.evaluated(suffix, losses)

    def passes_over(self, data_iterator: Any) -> bool:
        """Draw and drop a step's samples if they are not to be trained on; the same on every rank."""
        self._step = None
        self.rewinds.data.given(data_iterator)
        self.rewinds.step_begins(self._own.state_dict)
        decision = skip_ahead(self._pipeline, self._ahead, self._args.consumed_train_samples, self.rewinds.pass_over)
        if decision is not None:
            self._incidents += 1
            print_rank_last(said(f" stability: step {decision.step} SKIP, not computed: {decision.reason}"))
        return self.rewinds.passes_over(data_iterator, self.journal.sinks)

    def step_begins(self) -> None:
        """Keep what a forward and backward will change and a skip must put back."""
        self._running.begins()
        self._step = None

    def losses_ready(self, losses_reduced: Sequence[dict[str, Any]]) -> None:
        """Keep this rank's micro-batch losses if it is the one that speaks for them, and look at its gradients."""
        self._running.losses_ready(losses_reduced)

    def update_allowed(self, optimizer: Any, grad_norm: Any) -> bool:
        """The gate. Collective: what the hooks reduce, then one all-gather."""
        if optimizer_state.has_no_norm_of_its_own(optimizer):
            grad_norm = optimizer.get_grad_norm()  # collective over the optimizer's own group, as if it clipped
        record, decision = self._pipeline.decide(self._running.signals_at_the_gate(grad_norm))
        self._step = Step(record, decision)
        for hook in self._hooks:
            hook.judge(record)
        self._scaling.apply(decision, self.optimizer)
        if decision.updates_weights:
            self.checkpoints.weights_will_change()
        return decision.updates_weights

    def update_done(self, update_successful: bool) -> None:
        """Undo what a withheld step changed or clip what an applied one made; then baselines learn and sinks write."""
        self._scaling.restore()
        if self._step is None:  # fp16: the loss scaler rejected the gradient before the gate, on every rank alike
            self._step = Step(*self._pipeline.decide(self._running.signals_at_the_gate(None, overflow=True)))
        record, decision = self._step.record, self._step.decision
        self._applied = self._applied or bool(update_successful)
        if not decision.updates_weights:
            self._running.withheld()
            if self.config.record.batch and self.config.record.max_bundles:
                self._evidence = evidence.evidence(self.rewinds.data, record)
        elif not update_successful:
            reason = "the loss scaler backed off" if record.overflow else "Megatron itself withheld the update"
            decision = dataclasses.replace(decision, action=Action.SKIP, reason=reason)
            self._step = Step(record, decision)
        self.rewinds.step_done(record.step, applied=decision.updates_weights)
        self._running.done(record, decision)
        self._ahead = record
        tables = [hook.update_done(record, decision.updates_weights) for hook in self._hooks]
        self._pipeline.finish(record, decision)
        self._evidence = {}
        self.journal.write_tables(tables)
        if decision.advised is not Action.APPLY or decision.action is not Action.APPLY:
            self._incidents += 1

    def exit_after_step(self, should_checkpoint: bool, should_exit: bool, exit_code: int) -> tuple[bool, bool, int]:
        """A halt leaves the loop before the step is counted; the last good checkpoint stays the newest. Collective."""
        if not self._applied:  # and the next save may come first
            optimizer_state.begin_state(self.optimizer)
        if self._step is None or self._step.decision.action not in (Action.REWIND, Action.HALT):
            if should_exit:
                self.ending(exit_code, evidence.RERUN_VERDICTS.get(exit_code, "Megatron's train_step asked for it"))
            return should_checkpoint, should_exit, exit_code
        record, decision, reason = self._step.record, self._step.decision, self._step.decision.reason
        if decision.action is Action.REWIND:
            outcome = self.rewinds.carry_out(record, decision, self._own.load_state_dict)
            if outcome == "rewound":
                self._own.load_hooks()
                self.journal.rewound(reason)
                return False, False, 0
            if outcome == "restart":
                self.ending(EXIT_REWIND, reason)
                return False, True, EXIT_REWIND
            reason = f"there is no complete checkpoint to rewind to; {reason}"
            print_rank_last(said(f" stability: step {record.step} HALT: {reason}"))
        self.ending(EXIT_HALTED, reason)
        self.rewinds.halted(record.step, reason)
        return self.checkpoints.halted(record.step, reason), True, EXIT_HALTED

    def log_string(self, sums: dict[str, Any]) -> str:
        """Fields for Megatron's log line.

        Args:
            sums: of the losses since the last line, beside Megatron's counts of steps.
        """
        losses.leave_out_those_of_no_step(sums)
        episodes = len(self._pipeline.episodes.open)
        incidents = f" stability incidents: {self._incidents:3d} | open episodes: {episodes:2d} |"
        if self._step is None:
            return incidents
        signals = self._step.record.signals
        return incidents + "".join(hook.log_string(signals) for hook in self._hooks)

    # --- checkpoint -------------------------------------------------------------------------------------------

    def add_checkpoint_state(self, state_dict: dict[str, Any]) -> None:
        """Ours, and what the save as a whole needs."""
        self._own.add_to(state_dict)
        self.checkpoints.add_state(state_dict)
        if "iteration" in state_dict:  # it is not where a load asks for the template
            self.journal.saving(state_dict["iteration"])

    def load_checkpoint_state(self, state_dict: dict[str, Any]) -> None:
        """The inverse."""
        self.checkpoints.load_state(state_dict)
        self._own.take_from(state_dict)
