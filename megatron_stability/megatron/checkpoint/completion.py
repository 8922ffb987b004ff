"""The thread side of a save: what Megatron wrote is hashed, gathered and sealed while training goes on.

No collective here: ranks meet in files of the checkpoint's folder (`shares.py`), and the thread knows of the save only
what the training thread put into `Save`.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stability import files
from megatron_stability.checkpoints import generations, manifest, parts
from megatron_stability.checkpoints.manifest import FileEntry, Manifest
from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import rank_state
from megatron_stability.megatron.access.rank_state import Replicated
from megatron_stability.megatron.checkpoint import shares
from megatron_stability.megatron.checkpoint.failed_save import Failure, SaveError, attempt, tell
from megatron_stability.megatron.checkpoint.resume import training_args
from megatron_stability.megatron.checkpoint.run_files import RunFiles
from megatron_stability.megatron.checkpoint.trajectory import Trajectory
from megatron_stability.megatron.patching import install_digest
from megatron_stability.observe.fingerprint import Fingerprint

Prints = Callable[[], dict[str, Fingerprint]]  # waits for them


class Save(NamedTuple):
    """What the training thread knows of a save, for the thread that completes it: that one asks no process group."""

    folder: Path
    rank: int
    draft: Manifest
    prints: Prints
    replicated: list[Replicated]
    model: list[Any]


class Completion:
    """One a rank: a thread that completes saves in the order in which they were begun.

    Attributes:
        suspect: the step whose save is evidence only, and why.
    """

    def __init__(self, config: StabilityConfig, args: Namespace, files: RunFiles, trajectory: Trajectory) -> None:
        """Takes what is the same for every save.

        Args:
            config: the validated tree.
            args: Megatron's.
            files: what the run reads.
            trajectory: told of each save that counts, is evidence, or failed.
        """
        self.suspect: tuple[int, str] | None = None
        self._config, self._args, self._files, self._trajectory = config, args, files, trajectory
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def begin(self, save: Save) -> None:
        """Let training go on; what an earlier save's thread raised is raised here."""
        for work in [work for work in self._pending if work.done()]:
            self._pending.remove(work)
            work.result()
        self.in_order(partial(self._complete, save))

    def in_order(self, work: Callable[[], None]) -> None:
        """Run in the thread, after the saves that were begun."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint completion")
        self._pending.append(self._thread.submit(work))

    def close(self) -> None:
        """Wait for what still runs."""
        while self._pending:
            self._pending.pop(0).result()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _complete(self, save: Save) -> None:
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
                self._trajectory.failed(save.folder, failure)
        elif unwritten is not None:
            tell(save.folder, unwritten._replace(no_space=False))  # the folder is rank 0's to remove
        if broken is not None:
            raise broken

    def _share(self, save: Save) -> dict[str, Any]:
        """What rank 0 has to know of this rank's part."""
        prints = save.prints()
        bad = next((name for name, each in prints.items() if not each.finite), None)
        hashed, failure = attempt(lambda: self.hash_share(save, prints))
        return {
            "files": {name: entry.model_dump() for name, entry in (hashed or {}).items()},
            "failure": failure,
            "flaw": None if bad is None else f"{bad} holds NaN or Inf",
            "replicas": rank_state.replica_digests(save.replicated, prints),
        }

    def hash_share(self, save: Save, prints: dict[str, Fingerprint]) -> dict[str, FileEntry]:
        prints_file = save.folder / manifest.fingerprints_name(save.rank)
        files.write_atomically(prints_file, rank_state.packed(prints, save.model))
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
        self.finish(folder, draft.model_copy(update=known | self._files.known() | {"files": named}), flaw)

    def finish(self, folder: Path, whole: Manifest, flaw: str | None) -> None:
        """Manifest, marker, tracker, retention, in this order."""
        whole = self._trajectory.stamped(folder, whole)
        suspect = self.suspect[1] if self.suspect is not None and self.suspect[0] == whole.step else None
        evidence = f"when it was saved, {flaw}" if flaw is not None else suspect
        if evidence is not None:
            generations.mark_suspect(folder, evidence)
        manifest.write(folder, whole)
        if evidence is not None:
            self._trajectory.is_evidence(folder, whole)
            if flaw is not None:
                raise UsageError(f"{flaw}; the checkpoint is kept as suspect")
            print(f"> megatron-stability: {folder.name} is kept as suspect", flush=True)
            return
        self._trajectory.counts(folder, whole)
