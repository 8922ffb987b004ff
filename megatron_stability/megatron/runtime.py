"""The installed runtime: Megatron's step, handed to the pipeline and back.

Thin on purpose. What is judged stands in `detect/` and `decide/`; here is only where Megatron keeps what they need.
Every rank has one, and every method that says "collective" is called by every rank, once a step, in the same order.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import print_rank_last

from megatron_stability import detect
from megatron_stability.act.scale import Scale
from megatron_stability.config import StabilityConfig
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.echo import said
from megatron_stability.errors import EXIT_HALTED, EXIT_REWIND, UsageError
from megatron_stability.ledger.bundle import Bundles
from megatron_stability.ledger.ledger import Ledger
from megatron_stability.megatron import evidence
from megatron_stability.megatron.access import collectives, optimizer_state
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.access.skipped import SkippedDocuments
from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints
from megatron_stability.megatron.checkpoint.rewind import Rewinds
from megatron_stability.megatron.checkpoint.run_files import RunFiles
from megatron_stability.megatron.model import init
from megatron_stability.megatron.model.loss import HeadLoss, real_vocab_size
from megatron_stability.megatron.observers import hooks as weight_hooks
from megatron_stability.megatron.observers import losses
from megatron_stability.megatron.observers.batches import skip_ahead
from megatron_stability.megatron.observers.log_z import LogZHook
from megatron_stability.megatron.patching import install_digest
from megatron_stability.megatron.run_info import bundle_context, opening, run_info
from megatron_stability.megatron.writers import MegatronWriters
from megatron_stability.observe.reduction import LocalSignals, Reduction, chained
from megatron_stability.pipeline import Pipeline, Sink
from megatron_stability.records import Action, Decision, StepRecord
from megatron_stability.watch import heartbeat

STATE_KEY = "megatron_stability"
SCALED = {Action.SCALE_LR: "lr", Action.SCALE_WEIGHT_DECAY: "weight_decay"}


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
            sinks: told of every finished step, on every rank; more may be appended before training begins.
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
        self.sinks: list[Sink] = []
        self._ledger: Ledger | None = None
        self._writers: MegatronWriters | None = None
        self._reduction: Reduction | None = None
        self._forward_state: optimizer_state.ForwardState | None = None
        self._weight_hooks: list[weight_hooks.WeightHook] = []
        self._saved: dict[str, Any] = {}  # our state in the checkpoint, until training begins
        self._scales = {action: Scale() for action in SCALED}
        self._scaled_groups = optimizer_state.ScaledGroups()
        self._log_z: LogZHook | None = None
        self._losses_n2 = losses.NONE
        self._grad_amax: torch.Tensor | None = None
        self.model: list[Any] = []
        self.optimizer: Any = None
        self._step: tuple[StepRecord, Decision] | None = None
        self._incidents = 0
        self._applied = False  # whether this process has applied an update
        self._history = 0  # of this process: ranks begin alike
        self._ahead: StepRecord | None = None  # with the score of the batch after it
        self._evidence: dict[str, torch.Tensor] = {}  # of the step that is not applied, for its bundle
        detectors = detect.build(config.detect)
        self._pipeline: Pipeline[LocalSignals] = Pipeline(
            observe=self._observe,
            detectors=detectors,
            policy=TablePolicy(config.decide, config.mode),
            sinks=self.sinks,
            episodes=Episodes(detectors, config.decide.quiet_steps),
            afresh=config.detect.expect.reset,
        )

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
        self.rewinds.refuse_a_loop(self.ledger_folder())
        device = collectives.device()
        group, self.model, self.optimizer = dist.group.WORLD, model, optimizer
        complaint = install_digest.missing_names() or self._make_hooks(device) or self._open_ledger()
        install_digest.compare(group, self.config, complaint)
        parts, passed = (model, optimizer, opt_param_scheduler), self._saved.get("pass_over")
        self.rewinds.train_begins(parts, self.ledger_folder(), passed, self._pipeline.policy, self._scales)
        for hook in self._weight_hooks:
            hook.train_begins()
        extra = {name: how for hook in self._weight_hooks for name, how in hook.signals.items()}
        self._reduction = Reduction(group, device, extra)
        idle = weight_hooks.say_what_is_silent(self._args, self._pipeline.detectors, self._reduction.signals)
        self._pipeline = self._pipeline.without(idle)
        detect.expected.allow(self._pipeline.detectors, self.checkpoints.allowed)
        self._forward_state = optimizer_state.ForwardState(model)
        shown = self.config.record, self.config.model.z_loss
        self._writers = MegatronWriters(self.host, self._pipeline.episodes, *shown)
        self.sinks.append(self._writers)
        seconds = self.config.record.heartbeat_seconds
        self.sinks += heartbeat.of_node(self.ledger_folder(), self.rank, self._args.local_rank, seconds)
        for line in opening(self.config, self.ledger_folder()):
            print_rank_last(said(f"> megatron-stability: {line}"))

    def _make_hooks(self, device: torch.device) -> str | None:
        """The complaint, if this rank has a layer that can't be hooked, is for every rank to raise."""
        model = self.config.model
        try:
            what = self.config, self.model, self.optimizer, device, self.ledger_folder(), self._args, self.rewinds.data
            loaded = partial(getattr, self.checkpoints, "extra_states")
            self._weight_hooks = weight_hooks.build(*what, self.host, self.files, loaded)
            if self._args.iteration > 0:
                self._load_hook_states()
            if model.changes_loss:
                speaks = parallel_state.get_tensor_model_parallel_rank() == 0
                self._log_z = LogZHook(self.head_loss, model.z_loss, speaks)
                self._weight_hooks.append(self._log_z)
            init.report_a_new_run(self.model, model, self._args)
        except UsageError as error:
            return str(error)
        return None

    def _open_ledger(self) -> str | None:
        """On rank 0, at the resumed step; the complaint, if it can't be, is for every rank to raise."""
        if dist.get_rank() != 0:
            return None
        args = self._args
        try:
            self._ledger = Ledger.open(
                self.ledger_folder(),
                resume_step=args.iteration,
                resume_sample=args.consumed_train_samples,
                run_info=run_info(self.config, args),
            )
            bundles = Bundles(
                self.ledger_folder(),
                limits=self.config.record,
                context=bundle_context(self.config, args, self.host),
                generation=lambda: self._ledger.generation if self._ledger is not None else 0,
                tensors=lambda record: self._evidence,
            )
        except UsageError as error:
            return str(error)
        self.sinks += [self._ledger, bundles]
        return None

    def ledger_folder(self) -> Path:
        """`record.dir`, else SAVE/stability, else ./stability."""
        if self.config.record.dir is not None:
            return self.config.record.dir
        return Path(self._args.save or ".") / "stability"

    def close(self) -> None:
        """Wait for a checkpoint that is being completed, let go of the data, and close the ledger."""
        self.checkpoints.close()
        self.rewinds.data.close()
        if self._writers is not None:
            self._writers.close()
            self._writers = None
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        heartbeat.close(self.sinks)

    # --- one step ---------------------------------------------------------------------------------------------

    def evaluated(self, suffix: str, losses: dict[str, torch.Tensor]) -> None:
        """A validation set's losses, for the next step's record."""
        weight_hooks.evaluated(self._weight_hooks, suffix, losses)

    def passes_over(self, data_iterator: Any) -> bool:
        """Draw and drop a step's samples if they are not to be trained on; the same on every rank."""
        self._step = None
        self.rewinds.data.given(data_iterator)
        self.rewinds.step_begins(self._own_state)
        decision = skip_ahead(self._pipeline, self._ahead, self._args.consumed_train_samples, self.rewinds.pass_over)
        if decision is not None:
            self._incidents += 1
            print_rank_last(said(f" stability: step {decision.step} SKIP, not computed: {decision.reason}"))
        return self.rewinds.passes_over(data_iterator, self.sinks)

    def step_begins(self) -> None:
        """Keep what a forward and backward will change and a skip must put back."""
        assert self._forward_state is not None, "train_begins was not called: is patch 006-train-loop applied?"
        self._forward_state.keep()
        self._losses_n2 = losses.NONE
        self._step = None
        for hook in self._weight_hooks:
            hook.step_begins(self._args.curr_iteration + 1)

    def losses_ready(self, losses_reduced: Sequence[dict[str, Any]]) -> None:
        """Keep this rank's micro-batch losses if it is the one that speaks for them, and look at its gradients."""
        self._grad_amax = optimizer_state.grad_amax(self.model)
        self._losses_n2 = losses.of_micro_batches(losses_reduced)

    def update_allowed(self, optimizer: Any, grad_norm: Any) -> bool:
        """The gate. Collective: what the weight hooks reduce, then one all-gather."""
        if optimizer_state.has_no_norm_of_its_own(optimizer):
            grad_norm = optimizer.get_grad_norm()  # collective over the optimizer's own group, as if it clipped
        record, decision = self._step = self._pipeline.decide(self._local(grad_norm))
        weight_hooks.judge(self._weight_hooks, record)
        if decision.action in self._scales:
            factor, steps = decision.parameters["factor"], int(decision.parameters["steps"])
            self._scales[decision.action].begin(record.step, factor, steps)
        for action, key in SCALED.items():
            self._scaled_groups.scale(self.optimizer, key, self._scales[action].at(record.step))
        if decision.updates_weights:
            self.checkpoints.weights_will_change()
        return decision.updates_weights

    def update_done(self, update_successful: bool) -> None:
        """Undo what a withheld step changed or clip what an applied one made; then baselines learn and sinks write."""
        self._scaled_groups.restore()
        if self._step is None:  # fp16: the loss scaler rejected the gradient before the gate, on every rank alike
            self._step = self._pipeline.decide(self._local(grad_norm=None, overflow=True))
        record, decision = self._step
        self._applied = self._applied or bool(update_successful)
        if not decision.updates_weights:
            assert self._forward_state is not None
            self._forward_state.restore()
            if self.config.record.batch and self.config.record.max_bundles:
                self._evidence = evidence.evidence(self.rewinds.data, record)
        elif not update_successful:
            reason = "the loss scaler backed off" if record.overflow else "Megatron itself withheld the update"
            decision = dataclasses.replace(decision, action=Action.SKIP, reason=reason)
            self._step = record, decision
        self.rewinds.step_done(record.step, applied=decision.updates_weights)
        self._history = chained(self._history, record, decision)
        self._ahead = record
        tables = [hook.update_done(record, decision.updates_weights) for hook in self._weight_hooks]
        self._pipeline.finish(record, decision)
        self._evidence = {}
        for table in filter(None, tables):
            for sink in self.sinks:
                if isinstance(sink, weight_hooks.TableSink):
                    sink.write_attention(table)
        if decision.advised is not Action.APPLY or decision.action is not Action.APPLY:
            self._incidents += 1

    def exit_after_step(self, should_checkpoint: bool, should_exit: bool, exit_code: int) -> tuple[bool, bool, int]:
        """A halt leaves the loop before the step is counted; the last good checkpoint stays the newest. Collective."""
        if not self._applied:  # and the next save may come first
            optimizer_state.begin_state(self.optimizer)
        if self._step is None or self._step[1].action not in (Action.REWIND, Action.HALT):
            if should_exit:
                self.ending(exit_code, evidence.RERUN_VERDICTS.get(exit_code, "Megatron's train_step asked for it"))
            return should_checkpoint, should_exit, exit_code
        (record, decision), reason = self._step, self._step[1].reason
        if decision.action is Action.REWIND:
            outcome = self.rewinds.carry_out(record, decision, self._load_own_state)
            if outcome == "rewound":
                self._load_hook_states()
                if self._writers is not None:
                    self._writers.rewound(self._args.iteration)
                if self._ledger is not None:
                    self._ledger.rewind(self._args.iteration, self._args.consumed_train_samples, reason)
                return False, False, 0
            if outcome == "restart":
                self.ending(EXIT_REWIND, reason)
                return False, True, EXIT_REWIND
            reason = f"there is no complete checkpoint to rewind to; {reason}"
            print_rank_last(said(f" stability: step {record.step} HALT: {reason}"))
        self.ending(EXIT_HALTED, reason)
        self.rewinds.halted(record.step, reason)
        return self.checkpoints.halted(record.step, reason), True, EXIT_HALTED

    def ending(self, code: int, reason: str) -> None:
        """Why the run ends, into the ledger if it is open."""
        if self._ledger is not None:
            self._ledger.ending(self._args.curr_iteration, code, reason)

    def log_string(self, sums: dict[str, Any]) -> str:
        """Fields for Megatron's log line.

        Args:
            sums: of the losses since the last line, beside Megatron's counts of steps.
        """
        losses.leave_out_those_of_no_step(sums)
        episodes = len(self._pipeline.episodes.open)
        incidents = f" stability incidents: {self._incidents:3d} | open episodes: {episodes:2d} |"
        if self._log_z is None or self._step is None:
            return incidents
        return incidents + self._log_z.log_string(self._step[0].signals)

    # --- checkpoint -------------------------------------------------------------------------------------------

    def add_checkpoint_state(self, state_dict: dict[str, Any]) -> None:
        """One JSON string: equal on all ranks, and nothing that a weights_only load refuses."""
        state_dict[STATE_KEY] = json.dumps(self._own_state(), allow_nan=False)
        self.checkpoints.add_state(state_dict)
        if self._ledger is not None and "iteration" in state_dict:  # it is not where a load asks for the template
            self._ledger.saving(state_dict["iteration"])

    def load_checkpoint_state(self, state_dict: dict[str, Any]) -> None:
        """Baselines and budgets go on where they were; a checkpoint without them is said, not assumed."""
        self.checkpoints.load_state(state_dict)
        state = state_dict.get(STATE_KEY)
        if state is None:
            print_rank_last("> megatron-stability: the checkpoint has no detector state; baselines start afresh")
        else:
            self._load_own_state(json.loads(state))

    def _own_state(self) -> dict[str, Any]:
        scales = {action.value: scale.state_dict() for action, scale in self._scales.items()}
        hooks = {hook.checkpoint_key: hook.state_dict() for hook in self._stateful_hooks()}
        own = {"scales": scales, "hooks": hooks, "pass_over": self.rewinds.pass_over.state_dict()}
        return self._pipeline.state_dict() | own | {"trajectory": self.checkpoints.trajectory.state_dict()}

    def _load_own_state(self, saved: dict[str, Any]) -> None:
        self._saved = saved
        self._pipeline.load_state_dict(saved)
        self.checkpoints.trajectory.load_state_dict(saved.get("trajectory"))
        for action, scale in self._scales.items():
            scale.load_state_dict(saved["scales"][action.value])

    def _load_hook_states(self) -> None:
        for hook in self._stateful_hooks():
            hook.load_state_dict(self._saved.get("hooks", {}).get(hook.checkpoint_key))

    def _stateful_hooks(self) -> list[weight_hooks.StatefulHook]:
        return [hook for hook in self._weight_hooks if isinstance(hook, weight_hooks.StatefulHook)]

    # --- inside -----------------------------------------------------------------------------------------------

    def _observe(self, local: LocalSignals) -> StepRecord:
        assert self._reduction is not None, "train_begins was not called: is patch 006-train-loop applied?"
        return self._reduction(local)

    def _local(self, grad_norm: Any, overflow: bool = False) -> LocalSignals:
        args = self._args
        groups = self.optimizer.param_groups
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
            extra={name: value for hook in self._weight_hooks for name, value in hook.observe().items()},
        )
