"""Megatron's checkpoints, proven: what a save is completed with, and what a load is checked for.

A save: Megatron writes, then a thread of every rank hashes what it wrote, rank 0's writes manifest and marker, and only
then moves the tracker file, while training goes on. An asynchronous save begins this once Megatron says that all bytes
are written. The ranks meet in files of the checkpoint's folder, since a thread can't join a collective.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_stability import files
from megatron_stability.checkpoints import generations, manifest, parts
from megatron_stability.checkpoints.manifest import FileEntry, Manifest
from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import collectives, optimizer_state, rank_state
from megatron_stability.megatron.access.data_iterators import DataIterators
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.access.rank_state import Replicated
from megatron_stability.megatron.checkpoint import shares
from megatron_stability.megatron.checkpoint.failed_save import Failure, SaveError, attempt, tell
from megatron_stability.megatron.checkpoint.resume import acceptance, choose, starts_anew, training_args
from megatron_stability.megatron.checkpoint.run_files import RunFiles
from megatron_stability.megatron.checkpoint.trajectory import Trajectory
from megatron_stability.megatron.fp8.flags import active_transformer_engine
from megatron_stability.megatron.patching import install_digest
from megatron_stability.observe.fingerprint import Fingerprint
from megatron_stability.transformer_engine import extra_state

Prints = Callable[[], dict[str, Fingerprint]]  # waits for them


class Save(NamedTuple):
    """What the training thread knows of a save, for the thread that completes it: that one asks no process group."""

    folder: Path
    rank: int
    draft: Manifest
    prints: Prints
    replicated: list[Replicated]


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
            allowed: what differs from the checkpoint that was loaded last, changes training and is allowed to.
        """
        self.data = DataIterators()
        self.trajectory = Trajectory(config.checkpoint, args)
        self.extra_states: dict[str, extra_state.Kind] = {}
        self.allowed: tuple[str, ...] = ()
        self._config, self._args, self._files, self._host = config, args, files, host or Host()
        self._model: list[Any] = []
        self._optimizer: Any = None
        self._states: tuple[str, ...] = ()
        self._prints: Prints = dict  # of the tensors that were saved last
        self._unwritten: Failure | None = None  # of the save that goes on
        self._completing: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._resumed: Manifest | None = None  # of the checkpoint that is being loaded
        self._ckpt_step: Any = None
        self._loaded_rank_state: dict[str, Any] | None = None
        self._saved_schedule: dict[str, Any] | None = None
        self._saved_prints: bytes | None = None  # `rank_state.packed`, of the checkpoint that is being loaded
        self._loaded = False
        self._chosen: choose.Chosen | None = None  # by a rewind: the next load takes it
        self._last_saved: Path | None = None
        self._suspect: tuple[int, str] | None = None  # the step whose save is evidence only, and why

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
        """Let training go on where Megatron's writer failed, which it tells every rank by an exception on each.

        Args:
            write: Megatron's own writing, or the end of it.

        Returns:
            The same, but that a failed write is remembered, and returns None.
        """

        @wraps(write)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            if self._unwritten is not None:  # an asynchronous save's next part, which rank 0 would write to a full disk
                return None
            try:
                return write(*args, **kwargs)
            except CheckpointException as error:
                whose = {rank: f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items()}
                self._unwritten = Failure(next(iter(whose.values()), "another rank could not write"), no_space=True)
                return None

        return guarded if self._on else write

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
        while self._pending:
            self._pending.pop(0).result()
        if self._completing is not None:
            self._completing.shutdown()
            self._completing = None

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
        self._suspect = (last, f"the last step before a halt in step {step}: {reason}")
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
            self._in_order(self.trajectory.prove)

    def _in_order(self, work: Callable[[], None]) -> None:
        """Run in the thread that completes saves, after those that were begun."""
        if self._completing is None:
            self._completing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint completion")
        self._pending.append(self._completing.submit(work))

    def _complete(self, save: Save) -> None:
        """Begin the completion of what is written, and let training go on."""
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:  # on every rank, so none waits for another's share
            if save.rank == 0:
                self.trajectory.failed(save.folder, unwritten)
            return
        for work in [work for work in self._pending if work.done()]:
            self._pending.remove(work)
            work.result()  # raises what its thread raised
        self._in_order(partial(self._complete_in_thread, save))

    def _complete_in_thread(self, save: Save) -> None:
        broken = None
        try:
            share = self._share(save)
        except Exception as error:  # rank 0 must not wait for a share that never comes
            broken, share = error, {"failure": Failure(f"rank {save.rank}: {error!r}")}
        path, text = shares.path(save.folder, save.rank), json.dumps(share).encode()
        _, unwritten = attempt(lambda: files.write_atomically(path, text))
        if save.rank == 0:
            _, failure = (
                attempt(lambda: self._gather(save.folder, save.draft)) if unwritten is None else (None, unwritten)
            )
            if failure is not None:
                self.trajectory.failed(save.folder, failure)
        elif unwritten is not None:
            tell(save.folder, unwritten._replace(no_space=False))  # the folder is rank 0's to remove
        if broken is not None:
            raise broken

    def _share(self, save: Save) -> dict[str, Any]:
        """What rank 0 has to know of this rank's part."""
        prints = save.prints()
        bad = next((name for name, each in prints.items() if not each.finite), None)
        hashed, failure = attempt(lambda: self._hash_share(save, prints))
        return {
            "files": {name: entry.model_dump() for name, entry in (hashed or {}).items()},
            "failure": failure,
            "flaw": None if bad is None else f"{bad} holds NaN or Inf",
            "replicas": rank_state.replica_digests(save.replicated, prints),
        }

    def _hash_share(self, save: Save, prints: dict[str, Fingerprint]) -> dict[str, FileEntry]:
        prints_file = save.folder / manifest.fingerprints_name(save.rank)
        files.write_atomically(prints_file, rank_state.packed(prints, self._model))
        if self._args.ckpt_format == "torch":  # files in folders, named for model-parallel ranks: shared out by name
            names = parts.share(manifest.file_names(save.folder), save.rank, save.draft.layout["world_size"])
        else:
            names = parts.own_names(save.folder, save.rank)
        return self._hashed(save.folder, names)

    def _hashed(self, folder: Path, names: list[str]) -> dict[str, FileEntry]:
        return manifest.hash_files(folder, names, threads=self._config.checkpoint.threads, sync=True)

    def _gather(self, folder: Path, draft: Manifest) -> None:
        """Rank 0's thread: every rank's share, then the manifest."""
        told = shares.gather(folder, draft.layout["world_size"])
        failure = next((share["failure"] for share in told if share["failure"]), None)
        if failure is not None:
            raise SaveError(Failure(*failure))
        named = {name: FileEntry(**entry) for share in told for name, entry in share["files"].items()}
        named |= self._hashed(folder, parts.left_over(folder, named))
        flaw = next((share["flaw"] for share in told if share["flaw"]), None)
        replicas = {rank: [rank_state.Digest(*each) for each in share["replicas"]] for rank, share in enumerate(told)}
        flaw = flaw or rank_state.replica_complaint(replicas)
        known = {"versions": install_digest.versions(), "training": training_args.training(self._args, self._config)}
        self._finish(folder, draft.model_copy(update=known | self._files.known() | {"files": named}), flaw)

    def _finish(self, folder: Path, whole: Manifest, flaw: str | None) -> None:
        """Manifest, marker, tracker, retention, in this order."""
        whole = self.trajectory.stamped(folder, whole)
        suspect = self._suspect[1] if self._suspect is not None and self._suspect[0] == whole.step else None
        evidence = f"when it was saved, {flaw}" if flaw is not None else suspect
        if evidence is not None:
            generations.mark_suspect(folder, evidence)
        manifest.write(folder, whole)
        if evidence is not None:
            self.trajectory.is_evidence(folder, whole)
            if flaw is not None:
                raise UsageError(f"{flaw}; the checkpoint is kept as suspect")
            print(f"> megatron-stability: {folder.name} is kept as suspect", flush=True)
            return
        self.trajectory.counts(folder, whole)

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
        self._ckpt_step = getattr(self._args, "ckpt_step", None)
        root = Path(load_dir)
        chosen = self._chosen or choose.choose(root, self._args, self._config.checkpoint)
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
