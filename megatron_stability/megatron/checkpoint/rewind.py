"""REWIND: back to an older checkpoint within the running job, or by a restart, and on without the window's samples.

In the order of what can go wrong: the checkpoint is chosen and its every byte verified; `state.json` says "rewind", so
that a job that dies from here on does the same at its next start; newer checkpoints become suspect; then the live
objects are loaded as Megatron loads them at a start, and judged as after a start; `state.json` says "running".
"""

from __future__ import annotations

import contextlib
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config
from megatron.training import print_rank_0, training
from megatron.training.checkpointing import load_checkpoint

from megatron_stability.act.pass_over import PassOver
from megatron_stability.act.scale import Scale
from megatron_stability.checkpoints import run_state
from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.checkpoints.run_state import Attempt, Rewound, RunState
from megatron_stability.config import StabilityConfig
from megatron_stability.errors import EXIT_HALTED, EXIT_REWIND, HaltedError, UsageError
from megatron_stability.megatron.access import collectives, rank_state
from megatron_stability.megatron.access.data_iterators import draw
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.megatron.checkpoint import snapshot
from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints
from megatron_stability.megatron.checkpoint.snapshot import Snapshot
from megatron_stability.pipeline import Policy, Sink
from megatron_stability.records import PASSED_OVER, Action, Decision, StepRecord, Tier

MAX_STARTS = 2  # from one checkpoint, without an applied update
Outcome = Literal["rewound", "restart", "no checkpoint"]


class Rewinds:
    """One a rank, beside the runtime; every method but the first and `ended` is collective."""

    def __init__(self, config: StabilityConfig, args: Namespace, checkpoints: Checkpoints) -> None:
        """Takes the validated tree, Megatron's arguments, and what proves checkpoints."""
        self._config, self._args, self._checkpoints = config, args, checkpoints
        self.data = checkpoints.data
        self.pass_over = PassOver(config.decide.skip_samples)
        self._go_on: tuple[int, int] | None = None  # iteration and its floating-point operations, for `train`
        self._snapshot: Snapshot | None = None
        self._budgets: tuple[Policy, Mapping[Action, Scale]]
        self._state = RunState()
        self._folder = Path()
        self._fresh = True  # until the first step that is computed
        self._last = 0  # that was
        self._live: tuple[list[Any], Any, Any] = ([], None, None)

    def refuse_a_loop(self, folder: Path) -> None:
        """Before the ledger opens: what has halted twice from this checkpoint, and applied nothing, would again.

        Args:
            folder: the ledger's.

        Raises:
            HaltedError: on every rank alike; `--ckpt-step` tries all the same.
        """
        found: RunState | None = collectives.from_rank_0(lambda: run_state.read(folder))
        if found is None or found.status != "halt" or found.attempt is None or argument(self._args, "ckpt_step"):
            return
        if found.attempt.place == self._checkpoints.trajectory.loads and found.attempt.starts >= MAX_STARTS:
            step = found.attempt.place.step
            raise HaltedError(
                f"{found.attempt.starts} starts from step {step} applied no update ({found.reason}); mend the cause, "
                f"and give --ckpt-step {step} to try again, or an older step"
            )

    def train_begins(
        self,
        live: tuple[list[Any], Any, Any],
        folder: Path,
        saved: Mapping[str, Any] | None,
        policy: Policy,
        scales: Mapping[Action, Scale],
    ) -> None:
        """Take over what an earlier process decided after the checkpoint that was loaded.

        Args:
            live: model chunks, optimizer and its parameter scheduler.
            folder: the ledger's.
            saved: `PassOver.state_dict` of the checkpoint.
            policy: its budgets are the later ones of checkpoint and `state.json`.
            scales: by action; likewise.

        Raises:
            UsageError: `state.json` is damaged or can't be written.
        """
        self._live, self._folder, self._budgets = live, folder, (policy, scales)
        args = self._args
        self.pass_over = PassOver(self._config.decide.skip_samples, args.iterations_to_skip)
        args.iterations_to_skip = []  # Megatron's own skip would come first, and would pass saves and signals over too
        if saved is not None:
            self.pass_over.merge(saved)
        found: RunState | None = collectives.from_rank_0(lambda: run_state.read(folder))
        if found is not None and args.iteration == 0:
            if found.rewound is not None or found.pass_over["windows"]:
                print_rank_0(f"> megatron-stability: a fresh start forgets the rewinds in {folder / run_state.FILE}")
            found = None
        if found is not None:
            self.pass_over.merge(found.pass_over)
            if found.rewound is not None and args.iteration <= found.rewound.to_step:
                policy.load_state_dict(found.rewound.policy)
                _load_scales(scales, found.rewound.scales)
                print_rank_0(f"> megatron-stability: rewind {found.rewound.attempt} goes on from step {args.iteration}")
        attempt = found.attempt if found is not None else None
        again = attempt is not None and attempt.place == self._checkpoints.trajectory.loads
        rewound = found.rewound if found is not None else None
        self._write(RunState(rewound=rewound, attempt=attempt if again else None))

    def step_begins(self, own_state: Callable[[], dict[str, Any]]) -> None:
        """Take the snapshot, where one is due; what is there after the load is in a checkpoint."""
        self._checkpoints.trajectory.record_start()
        args, every = self._args, self._config.decide.snapshot_steps
        if not every or args.curr_iteration % every or args.curr_iteration == args.iteration:
            return
        if training.should_disable_forward_pre_hook(args):
            training.force_param_sync(self._live[0])
        if self._snapshot is None:
            collectives.agree(snapshot.too_large(self._live, self._config.decide.snapshot_max_gb))
        older, self._snapshot = self._snapshot, None  # which is no more, from here on
        self._snapshot = Snapshot.take(self._live, args, own_state(), older)

    def step_done(self, step: int, applied: bool) -> None:
        """Every step that was computed; starts that begin by withholding are counted. Collective with the first one."""
        self._checkpoints.step_done(step, applied)
        attempt, place = self._state.attempt, self._checkpoints.trajectory.loads
        first, self._fresh, self._last = self._fresh, False, step
        if applied and attempt is not None:
            self._write(self._state.model_copy(update={"attempt": None}))
        elif first and not applied and place is not None:
            starts = 1 + (attempt.starts if attempt is not None else 0)
            self._write(self._state.model_copy(update={"attempt": Attempt(place=place, starts=starts)}))
            if starts >= MAX_STARTS:  # the one before was killed, or halted
                collectives.from_rank_0(self._checkpoints.trajectory.condemn)

    def go_on(self, operations: int) -> tuple[int, int] | None:
        """After a step, with the floating-point operations before it: where the loop goes on, if not with the next."""
        if self._snapshot is not None and self._snapshot.step == self._args.curr_iteration:  # it was taken before this
            self._snapshot = replace(self._snapshot, operations=operations)
            if self._go_on is not None and self._go_on[0] == self._snapshot.step:
                self._go_on = self._snapshot.step, operations
        rewound, self._go_on = self._go_on, None
        return rewound

    def passes_over(self, data_iterator: Any, sinks: Sequence[Sink]) -> bool:
        """Draw and drop a step's samples, and tell the sinks, if they are not to be trained on."""
        args, known = self._args, len(self.pass_over.windows)
        step, first, samples = args.curr_iteration + 1, args.consumed_train_samples, get_current_global_batch_size()
        reason = self.pass_over.reason(step, first, first + samples)
        if reason is None:
            return False
        if len(self.pass_over.windows) > known:  # a restart knows the step by its samples
            self._write(self._state)
        draw(data_iterator)
        args.skipped_train_samples += samples
        record = StepRecord(
            step=step, first_sample=first, samples=samples, tokens=0.0, loss=math.nan, grad_norm=math.nan
        )
        skip, parameters = Action.SKIP, {PASSED_OVER: 1.0}
        decision = Decision(step=step, action=skip, advised=skip, reason=reason, parameters=parameters)
        for sink in sinks:
            sink.write(record, decision)
        return True

    def ended(self) -> None:
        """As the process ends, by itself or by an error. Not collective: rank 0 alone writes, if it can."""
        error = sys.exception() or getattr(sys, "last_exc", None)  # in flight, or already printed at exit
        state = run_state.at_the_end(self._state, self._last, argument(self._args, "train_iters"), error)
        if state is not self._state and self._args.rank == 0:
            run_state.write(self._folder, state)

    def halted(self, step: int, reason: str) -> None:
        """Finish pending saves, which count too, and tell a supervisor."""
        self._checkpoints.settle()
        end = {"status": "halt", "step": step, "reason": reason, "exit_code": EXIT_HALTED}
        self._write(self._state.model_copy(update=end))

    def carry_out(
        self, record: StepRecord, decision: Decision, load_own_state: Callable[[dict[str, Any]], None]
    ) -> Outcome:
        """Go back.

        Args:
            record: the incident; its samples are the window's last.
            decision: REWIND, the same on every rank.
            load_own_state: the plugin's, of a snapshot.

        Returns:
            "rewound": training goes on where `go_on` says; the policy kept its budgets, and the decision's own factor
            begins with the first step from there. "restart": the process can't be trusted, or is not to be used.
            "no checkpoint": there is none so far back.

        Raises:
            UsageError: the load failed; the next start goes back instead.
        """
        policy, scales = self._budgets
        self._checkpoints.settle()
        window = int(decision.parameters["skip_steps"]) * record.samples
        first = max(0, record.last_sample - window)
        in_process = self._config.decide.rewind == "in_process" and _trusted(decision)
        target = self._choose(int(decision.parameters["generations"]), first, in_process)
        if target is None:
            return "no checkpoint"
        attempt = int(decision.parameters["attempt"])
        self.pass_over.add(first, record.last_sample, f"window of rewind {attempt}")
        rewound = Rewound(
            to_step=target.step,
            to_sample=target.samples,
            attempt=attempt,
            policy=policy.state_dict(),
            scales=_own_scales(decision, target.step),
        )
        state = RunState(status="rewind", step=record.step, reason=decision.reason, rewound=rewound)
        self._write(state if in_process else state.model_copy(update={"exit_code": EXIT_REWIND}))
        back = None if isinstance(target, Snapshot) else target
        why = f"a rewind from step {record.step} to step {target.step}"
        begins = collectives.from_rank_0(lambda: self._checkpoints.trajectory.rewound(back, target.step, why))
        if not in_process:
            return "restart"
        if isinstance(target, Snapshot):
            self._restore(target, load_own_state)
        else:
            self._load(target)
        self._checkpoints.trajectory.rewind_loaded(begins)
        policy.load_state_dict(rewound.policy)
        _load_scales(scales, rewound.scales)
        self._write(RunState(rewound=rewound))
        print_rank_0(
            f"> megatron-stability: rewound from step {record.step} to step {target.step} (attempt {attempt}); samples "
            f"{first} to {record.last_sample - 1} will be passed over"
        )
        return "rewound"

    def _choose(self, back: int, sample: int, in_process: bool) -> Manifest | Snapshot | None:
        """The snapshot for a first attempt, if it is old enough; else a checkpoint."""
        taken = self._snapshot
        if taken is not None and back == 1 and in_process and taken.samples <= sample and taken.fits(self._live):
            return taken
        self._snapshot = None  # of a time that is about to be undone
        return self._checkpoints.choose_older(back, sample)

    def _restore(self, taken: Snapshot, load_own_state: Callable[[dict[str, Any]], None]) -> None:
        """As `_load`, from memory."""
        model, args = self._live[0], self._args
        _without_forward_hooks(model, args)
        taken.restore(self._live, args)
        update_num_microbatches(args.consumed_train_samples)
        self._set_iteration(taken.step, taken.operations)
        load_own_state(taken.own)
        self.data.rebuild()
        collectives.agree(rank_state.check_replicas(model, rank_state.measure(model, None)))
        rank_state.restore_generators(taken.generators)

    def _set_iteration(self, iteration: int, operations: int) -> None:
        self._args.iteration, self._args.num_floating_point_operations_so_far = iteration, operations
        get_rerun_state_machine().current_iteration = iteration
        self._go_on = iteration, operations

    def _load(self, target: Manifest) -> None:
        """What a start does between building the model and the first step."""
        model, optimizer, scheduler = self._live
        args = self._args
        _without_forward_hooks(model, args)
        if scheduler is not None:
            scheduler.num_steps = 0  # `OptimizerParamScheduler.load_state_dict` adds the saved steps to these
        with _arguments_of_a_resume(args, target.step):
            iteration, operations = load_checkpoint(model, optimizer, scheduler, checkpointing_context={})
        if iteration != target.step:
            raise UsageError(f"--save {args.save}: step {target.step} was to be loaded, and step {iteration} was")
        self._set_iteration(iteration, operations)
        self.data.rebuild()
        self._checkpoints.train_begins(model, optimizer)  # last: new iterators draw from generators that it restores

    def _write(self, state: RunState) -> None:
        self._state = state.model_copy(update={"pass_over": self.pass_over.state_dict()})
        collectives.from_rank_0(lambda: run_state.write(self._folder, self._state))


def _trusted(decision: Decision) -> bool:
    """Ranks that disagree can't be mended by loading into the same process."""
    return all(verdict.tier is not Tier.SYSTEM for verdict in decision.verdicts)


def _own_scales(decision: Decision, step: int) -> dict[str, Any]:
    if "factor" not in decision.parameters:
        return {}
    scale = Scale(decision.parameters["factor"], step + 1, int(decision.parameters["steps"]))
    return {Action.SCALE_LR.value: scale.state_dict()}


def _load_scales(scales: Mapping[Action, Scale], saved: Mapping[str, Any]) -> None:
    for action, scale in scales.items():
        if action.value in saved:
            scale.load_state_dict(saved[action.value])


def _without_forward_hooks(model: list[Any], args: Namespace) -> None:
    """As before the first step: parameters are whole, none is being gathered, and no forward gathers any."""
    if not training.should_disable_forward_pre_hook(args):
        return
    if all(chunk.remove_forward_pre_hook_handles for chunk in model):  # else no step has been applied yet
        training.disable_forward_pre_hook(model)
    get_model_config(model[0]).param_sync_func = None  # `train` puts its own back after the next step


@contextlib.contextmanager
def _arguments_of_a_resume(args: Namespace, step: int) -> Iterator[None]:
    """`load_checkpoint` reads from `args` what to load, and a run may have started in another way."""
    wanted = {
        "load": args.save,
        "ckpt_step": step,
        "finetune": False,
        "no_load_optim": False,
        "no_load_rng": False,
        "pretrained_checkpoint": None,
        "override_ckpt_iteration": None,
    }
    before = {name: getattr(args, name) for name in wanted if hasattr(args, name)}
    vars(args).update({name: wanted[name] for name in before})
    try:
        yield
    finally:
        vars(args).update(before)
