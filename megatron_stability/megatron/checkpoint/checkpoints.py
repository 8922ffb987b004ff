"""Megatron's checkpoints, proven: what a save is completed with, and what a load is checked for.

A save: Megatron writes, then a thread of every rank hashes what it wrote, rank 0's writes manifest and marker, and only
then moves the tracker file, while training goes on. An asynchronous save begins this once Megatron says that all bytes
are written. The ranks meet in files of the checkpoint's folder, since a thread can't join a collective.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_stability import files
from megatron_stability.checkpoints import generations, manifest
from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import collectives, optimizer_state, rank_state
from megatron_stability.megatron.access.data_iterators import DataIterators
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.checkpoint import shares
from megatron_stability.megatron.checkpoint.completion import Completion, Prints, Save
from megatron_stability.megatron.checkpoint.failed_save import Writing
from megatron_stability.megatron.checkpoint.resume import acceptance, choose, starts_anew
from megatron_stability.megatron.checkpoint.run_files import RunFiles
from megatron_stability.megatron.checkpoint.trajectory import Trajectory
from megatron_stability.megatron.fp8.flags import active_transformer_engine
from megatron_stability.transformer_engine import extra_state


class Checkpoints:
    """One a rank; `seams.py` says where each method is called from."""

    def __init__(self, config: StabilityConfig, args: Namespace, files: RunFiles, host: Host | None = None) -> None:
        """Takes the validated tree and Megatron's arguments, which it reads at every save and load.

        Args:
            config: the validated tree.
            args: Megatron's.
            files: what the run reads.
            host: the loop around the core; by default Megatron's own.

        Attributes:
            data: the data iterators, once Megatron has built them.
            extra_states: what Transformer Engine's modules had in the checkpoint that was loaded last.
            trajectory: where the run stands among its checkpoints.
            completion: the thread that completes saves.
            allowed: what differs from the checkpoint that was loaded last, changes training and is allowed to.
        """
        self.data = DataIterators()
        self.trajectory = Trajectory(config.checkpoint, args)
        self.extra_states: dict[str, extra_state.Kind] = {}
        self.allowed: tuple[str, ...] = ()
        self._config, self._args, self._files, self._host = config, args, files, host or Host()
        self.completion = Completion(config, args, files, self.trajectory)
        self._model: list[Any] = []
        self._optimizer: Any = None
        self._states: tuple[str, ...] = ()
        self._prints: Prints = dict  # of the tensors that were saved last
        self._writing = Writing()
        self._resumed: Manifest | None = None  # of the checkpoint that is being loaded
        self._ckpt_step: Any = None
        self._loaded_rank_state: dict[str, Any] | None = None
        self._saved_schedule: dict[str, Any] | None = None
        self._saved_prints: bytes | None = None  # `rank_state.packed`, of the checkpoint that is being loaded
        self._loaded = False
        self._chosen: choose.Chosen | None = None  # by a rewind: the next load takes it
        self._last_saved: Path | None = None

    @property
    def _on(self) -> bool:
        return self._config.checkpoint.manifest

    # --- save -------------------------------------------------------------------------------------------------------

    def save_begins(self, save_dir: str, iteration: int) -> None:
        """`save_checkpoint`, before anything is written: what is there and counts is set aside. Collective."""
        if self._on:
            folder = generations.folder_of(Path(save_dir), iteration)
            if folder == self._last_saved:
                self.settle()  # its files are being hashed
            self.trajectory.record_start()  # where no step came before
            collectives.from_rank_0(partial(shares.make_way, folder))
            self._last_saved = folder

    def add_state(self, state_dict: dict[str, Any]) -> None:
        """`generate_state_dict`: this rank's state, or where a load asks for the template, a place for it."""
        if not self._on:
            return
        if "iteration" not in state_dict:  # Megatron builds the template of a load
            if self._rank_state_fits():
                state_dict[manifest.RANK_STATE] = rank_state.sharded({})
            return
        if self._args.ckpt_format == "torch_dist":
            own = {"generators": rank_state.generators(), "data": self.data.state_dict(self._args)}
            state_dict[manifest.RANK_STATE] = rank_state.sharded(own)
        self._states = tuple(sorted(set(state_dict) - {"args", "iteration", "checkpoint_version"}))

    def saved(self, save_dir: str, iteration: int, request: Any) -> None:
        """`save_checkpoint`, after the last rank has written, or with the request of an async save. Collective."""
        if not self._on:
            return
        if self._model:
            self._prints()  # of a save without an applied step in between: the next one waits for the last save's only
            self._prints = rank_state.begin_measure(self._model, self._optimizer)
        save = Save(
            folder=generations.folder_of(Path(save_dir), iteration),
            rank=dist.get_rank(),
            draft=self._draft(iteration),
            prints=self._prints,
            replicated=rank_state.replicated(self._model) if self._model else [],
            model=self._model,
        )
        complete = partial(self._complete, save)
        if request is None:
            complete()
        else:
            self._prints()  # its writer is another process, and host tensors handed to one move into shared memory
            request.finalize_fns[:] = [self.survives_a_full_disk(each) for each in request.finalize_fns]
            request.add_finalize_fn(complete)

    def weights_will_change(self) -> None:
        """Before an optimizer's step: what is looked at since the last save has been looked at when this returns."""
        self._prints()
        self._prints = dict

    def survives_a_full_disk[**P, T](self, write: Callable[P, T]) -> Callable[P, T | None]:
        """See `Writing.guarded`; Megatron's own where checkpoints have no manifest."""
        return self._writing.guarded(write) if self._on else write

    def moves_tracker(self) -> bool:
        """Whether the tracker file is ours to move: it names a step only after that step's marker."""
        return self._on

    def settle(self) -> None:
        """Collective: every save that was begun is complete, or known not to be, when this returns."""
        self._host.finish_saves()
        self.close()
        dist.barrier()

    def close(self) -> None:
        """Wait for a completion that still runs."""
        self.completion.close()

    def halted(self, step: int, reason: str) -> bool:
        """Mark what was saved in the last `suspect_steps` steps before a halt. Collective.

        Returns:
            Whether a last checkpoint is to be saved: there is none of the last step that stands. It will be suspect.
        """
        if not (self._on and self._args.save):
            return False
        self.settle()  # what is being written counts too
        last = int(self._args.curr_iteration)
        collectives.from_rank_0(lambda: self.trajectory.halted(step, reason))
        saved = collectives.from_rank_0(lambda: last == 0 or self.trajectory.saved_at(last))
        self.completion.suspect = (last, f"the last step before a halt in step {step}: {reason}")
        return not saved

    def _draft(self, step: int) -> Manifest:
        """What changes from save to save; the thread adds the rest."""
        args = self._args
        return Manifest(
            step=step,
            samples=args.consumed_train_samples,
            tokens=args.consumed_train_samples * args.seq_length,
            layout=rank_state.layout_of(args),
            states=self._states,
            applied=self.trajectory.applied,
            withheld=self.trajectory.withheld,
        )

    def step_done(self, step: int, applied: bool) -> None:
        """Every step that was computed: what an update proves is recorded after the saves that were before it."""
        if self.trajectory.step_done(step, applied) and self._on and dist.get_rank() == 0:
            self.completion.in_order(self.trajectory.prove)

    def _complete(self, save: Save) -> None:
        """Begin the completion of what is written, and let training go on."""
        unwritten = self._writing.take()
        if unwritten is None:
            self.completion.begin(save)
        elif save.rank == 0:  # on every rank unwritten, so none waits for another's share
            self.trajectory.failed(save.folder, unwritten)

    # --- load -------------------------------------------------------------------------------------------------------

    def load_begins(self, load_dir: str | None, optimizer: Any) -> None:
        """`load_checkpoint`, before anything is read: choose and verify. Collective.

        Raises:
            UsageError: on every rank alike; names the folder, file or argument and the way out.
        """
        self._optimizer = optimizer
        if not self._on or load_dir is None:
            return
        self.close()  # a checkpoint that is being completed may be the newest
        self._ckpt_step = argument(self._args, "ckpt_step")
        root = Path(load_dir)
        chosen = self._chosen or choose.choose(root, self._args, self._config.checkpoint, self._config.record.dir)
        self._chosen = None
        self._resumed = None if chosen is None else chosen.manifest
        self.trajectory.loaded(chosen, root)
        if chosen is None or self._resumed is None:
            return
        folder = generations.folder_of(root, self._resumed.step)
        optimizer_state.give_empty_state(optimizer)
        self.allowed = acceptance.accept(folder, chosen, optimizer, self._args, self._files, self._config)
        self._args.ckpt_step = self._resumed.step
        mine = manifest.fingerprints_name(dist.get_rank())
        if mine in self._resumed.files and self._rank_state_fits():
            self._saved_prints = files.read_bytes(folder / mine)

    def choose_older(self, back: int, sample: int) -> Manifest | None:
        """As `choose.choose_older` in `--save`; the next load takes what was chosen. Collective."""
        self._chosen = choose.choose_older(Path(self._args.save), back, sample, self._config.checkpoint)
        return None if self._chosen is None else self._chosen.manifest

    def load_state(self, state_dict: dict[str, Any]) -> None:
        """`load_checkpoint`, once the state dict is read."""
        if active_transformer_engine(self._args):
            self.extra_states = extra_state.survey(state_dict)
        if not self._on:
            return
        self._args.ckpt_step = self._ckpt_step
        optimizer_state.give_first_step(self._optimizer, state_dict.get("optimizer"))
        self._loaded = True
        self._loaded_rank_state = state_dict.pop(manifest.RANK_STATE, None)
        self._saved_schedule = state_dict.get("opt_param_scheduler")  # there whether or not Megatron takes it

    def strict_load_failed(self, error: Exception) -> None:
        """A strict load of a module failed, and Megatron is about to go on with what fitted.

        Raises:
            UsageError: names the way out; not where partial loads are allowed.
        """
        if not self._config.checkpoint.allow_partial_load:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"--load: the checkpoint does not fit the model ({reason[:400]}); mend the model's arguments, or give "
                "--stability-checkpoint-allow-partial-load true to leave what is missing at its initial values"
            )

    def train_begins(self, model: list[Any], optimizer: Any, schedule: Any = None) -> None:
        """After the load and before the first step: what was loaded is judged, generators go on. Collective.

        Raises:
            UsageError: on every rank alike; names the rank and tensor.
        """
        self._model, self._optimizer = model, optimizer
        state = self._loaded_rank_state or {}
        self.data.train_begins(self._args, state.get("data"), self._config.checkpoint.data_positions_itself)
        if not self._on:
            return
        self.trajectory.refuse_a_used_folder()
        if self._loaded:
            optimizer_state.restore_step(optimizer)
            starts_anew.tell_rates(self._args, schedule, self._saved_schedule)
        prints = rank_state.measure(model, optimizer if self._loaded else None)
        here = rank_state.complaint_of(prints, self._saved_prints, model) if self._loaded else None
        replicas = rank_state.check_replicas(model, prints)
        collectives.agree(here or replicas)
        if "generators" in state:
            rank_state.restore_generators(state["generators"])
        elif self._loaded and self._resumed is not None and not self._args.finetune:
            starts_anew.tell_generators()
        self._loaded_rank_state = self._saved_prints = None

    def _rank_state_fits(self) -> bool:
        """Whether the checkpoint that is being loaded has a state of this rank that a load should take."""
        if self._resumed is None or self._args.finetune or self._args.no_load_rng or self._args.no_load_optim:
            return False
        same = self._resumed.layout == rank_state.layout_of(self._args)
        return same and manifest.RANK_STATE in self._resumed.states
