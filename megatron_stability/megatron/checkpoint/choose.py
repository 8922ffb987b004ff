"""Which generation a run resumes from: the newest complete one whose every byte was verified, by all ranks together."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from megatron.training import print_rank_0

from megatron_stability.checkpoints import dcp_metadata, generations, manifest
from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.config import Checkpoint
from megatron_stability.data import fingerprint
from megatron_stability.echo import MASK, brief, said
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.collectives import from_rank_0
from megatron_stability.megatron.checkpoint import training_args
from megatron_stability.megatron.checkpoint.run_files import RunFiles

MOST_TOLD = 5  # data sets that differ
_FROM = MappingProxyType({"padded_vocab_size": " (of --vocab-size, --make-vocab-size-divisible-by and TP)"})


@dataclass(frozen=True)
class Listed:
    """A generation as rank 0 saw it; small, since it is sent to every rank."""

    step: int
    state: generations.State
    says: str


def choose(root: Path, args: Namespace, config: Checkpoint) -> Manifest | None:
    """The checkpoint to load. Collective: rank 0 lists, every rank reads its share of the bytes.

    Args:
        root: `--load`.
        args: Megatron's.
        config: what is allowed.

    Returns:
        Its manifest; None where Megatron may go on without one (a fresh start or an unverified load was allowed).

    Raises:
        UsageError: on every rank alike; names the file or folder that is bad and the flag that would allow it.
    """
    seen: list[Listed] = []
    for each in from_rank_0(lambda: _listed(root, getattr(args, "ckpt_step", None))):
        folder = generations.folder_of(root, each.step)
        if each.state == "complete":
            problem = _verify_together(folder, config.threads)
            if problem is None:
                from_rank_0(partial(_point_at, root, each.step, args))
                print_rank_0(f"> megatron-stability: {folder.name} is complete and verified")
                return manifest.read(folder)
            each = Listed(each.step, "corrupt", f"{folder.name} is corrupt: {problem}")
        if each.state == "corrupt" and config.strict:
            raise UsageError(
                f"{root}: {each.says}; mend it, or drop --stability-checkpoint-strict to use the next older"
            )
        print_rank_0(said(f"> megatron-stability: {each.says}; it is not loaded"))
        seen.append(each)
    _refuse_without_a_good_one(root, seen, args, config)
    from_rank_0(lambda: _refuse_unsafe(root, getattr(args, "ckpt_step", None)))
    return None


def choose_older(root: Path, back: int, sample: int, config: Checkpoint) -> Manifest | None:
    """The checkpoint to go back to. Collective, as `choose`.

    Args:
        root: `--save`.
        back: 1 for the newest that qualifies, 2 for the one before it, and so on; a corrupt one is passed over.
        sample: it may not have consumed this sample or a later one.
        config: `threads`.

    Returns:
        Its manifest; None where there is none so far back.
    """
    for step in from_rank_0(lambda: _complete_before(root, sample))[back - 1 :]:
        folder = generations.folder_of(root, step)
        problem = _verify_together(folder, config.threads)
        if problem is None:
            return manifest.read(folder)
        print_rank_0(said(f"> megatron-stability: {folder.name} is corrupt: {problem}; it is not gone back to"))
    return None


def _complete_before(root: Path, sample: int) -> list[int]:
    found = generations.candidates(root)
    return [each.step for each in found if each.manifest is not None and each.manifest.samples <= sample]


def _listed(root: Path, ckpt_step: int | None) -> list[Listed]:
    if ckpt_step:
        folder = generations.folder_of(root, ckpt_step)
        found = [generations.generation(folder)] if folder.is_dir() else []
    else:
        found = [
            each for each in generations.generations(root) if each.folder == generations.folder_of(root, each.step)
        ]
    return [Listed(each.step, each.state, str(each)) for each in found]


def _verify_together(folder: Path, threads: int) -> str | None:
    """Collective: the first problem that any rank finds in its share; None where the folder is whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found, problems = manifest.check(folder)
    if found is not None and not problems:
        names = manifest.share(found.files, rank, world)
        problems = manifest.verify(folder, threads=threads, names=names)
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, str(problems[0]) if problems else None)
    return next((answer for answer in answers if answer is not None), None)


def _point_at(root: Path, step: int, args: Namespace) -> None:
    """Rank 0: let the tracker agree with the choice; Megatron reads it even where --ckpt-step overrules it."""
    tracker = generations.read_tracker(root)
    own = args.save is not None and Path(args.save).resolve() == root.resolve() and not args.ckpt_step
    unreadable = tracker is None and (root / generations.TRACKER).exists()
    if tracker != step and (own or unreadable):
        if not os.access(root, os.W_OK):
            raise UsageError(f"{root / generations.TRACKER}: can't be read as a step, and {root} can't be written to")
        generations.write_tracker(root, step)
        print(f"> megatron-stability: {generations.TRACKER} names step {step} now (before: {tracker})", flush=True)


def _refuse_without_a_good_one(root: Path, listed: list[Listed], args: Namespace, config: Checkpoint) -> None:
    """Raise, unless what is there may be passed over."""
    tracker = from_rank_0(lambda: generations.read_tracker(root))
    incomplete = all(each.state == "incomplete" for each in listed)
    if not listed and tracker is None and not getattr(args, "ckpt_step", None):
        if not config.allow_fresh_start:
            raise UsageError(
                f"--load {root}: holds no checkpoint; name the folder of a run, or give "
                "--stability-checkpoint-allow-fresh-start true to train from the start"
            )
    elif incomplete and tracker is None and config.allow_fresh_start:
        pass  # killed in its first save: nothing was ever complete
    elif not (incomplete and config.allow_unverified):
        newest = f" ({listed[0].says})" if listed else ""
        hint = "; --stability-checkpoint-allow-unverified true loads one that was saved without a manifest"
        raise UsageError(f"--load {root}: no checkpoint there is complete and verified{newest}{hint * incomplete}")


def _refuse_unsafe(root: Path, ckpt_step: int | None) -> None:
    """Rank 0: what Megatron is about to load without a manifest may name no program all the same."""
    step = ckpt_step or generations.read_tracker(root)
    if step is not None:
        dcp_metadata.refuse_unsafe(root / "release" if step == "release" else generations.folder_of(root, step))


def refuse_changes(saved: Manifest, args: Namespace, files: RunFiles, config: Checkpoint) -> None:
    """On rank 0: list what differs from the checkpoint's run and changes training, and refuse what is not named.

    Args:
        saved: the checkpoint's manifest.
        args: Megatron's, now.
        files: what the run reads, now.
        config: `allow_changes` names what may differ.

    Raises:
        UsageError: lists each argument with both values, and each data set that changed.
    """
    now = training_args.training(args)
    both = set(now) & set(saved.training)
    both -= {name for name in both if saved.training[name] == MASK}  # a secret, which was not kept
    changes = manifest.differences(
        {name: value for name, value in saved.training.items() if name in both},
        {name: value for name, value in now.items() if name in both},
    )
    found = files.found()
    was, is_now = (each.get("tokenizer", "") for each in (saved.hashes, found.hashes))
    if was and was != is_now:
        changes["tokenizer"] = (f"files {was[:8]}", f"files {is_now[:8]}")
    told = {
        name: f"{name} {brief(was)} -> {brief(is_now)}{_FROM.get(name, '')}" for name, (was, is_now) in changes.items()
    }
    if saved.data is None:
        print_rank_0("> megatron-stability: the checkpoint has no fingerprints of data files; they are not compared")
    elif differing := fingerprint.changes(saved.data, found.data):
        told["dataset"] = f"dataset ({'; '.join(differing[:MOST_TOLD])}{' ...' * (len(differing) > MOST_TOLD)})"
    for text in told.values():
        print_rank_0(said(f"> megatron-stability: differs from the checkpoint: {text}"))
    refused = [text for name, text in told.items() if name not in config.allow_changes]
    if refused:
        names = ",".join(name for name in told)
        raise UsageError(
            f"--load: differs from the checkpoint in {'; '.join(refused)}; give the checkpoint's values, or "
            f"--stability-checkpoint-allow-changes {names}"
        )
    if saved.hashes.get("code") != found.hashes["code"]:
        print_rank_0(said(f"> megatron-stability: the checkpoint was saved by other code: {saved.versions}"))
