"""Which generation a run resumes from: the newest complete one whose every byte was verified, by all ranks together."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch.distributed as dist
from megatron.training import print_rank_0

from megatron_stability.checkpoints import asides, dcp_metadata, generations, manifest, parts
from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.config import Checkpoint
from megatron_stability.echo import said
from megatron_stability.errors import UsageError
from megatron_stability.ledger.entries import FILE as LEDGER
from megatron_stability.megatron.access.collectives import first, from_rank_0, share_out
from megatron_stability.megatron.access.flags.argument_table import argument, is_set


@dataclass(frozen=True)
class Listed:
    """A generation as rank 0 saw it; small, since it is sent to every rank."""

    folder: str
    step: int
    state: generations.State
    says: str


@dataclass(frozen=True)
class Plan:
    """What rank 0 makes of a folder: what to try, what stands before it and is not tried, and why this order."""

    tries: list[Listed]
    not_tried: list[Listed]
    why: str = ""
    notes: tuple[str, ...] = ()
    anew: bool = False  # a run from the beginning left all of them behind


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to load, its manifest with this rank's files alone; `why` it is not the newest, "" where it is."""

    manifest: Manifest
    folder: str
    why: str


def choose(root: Path, args: Namespace, config: Checkpoint, ledger: Path | None = None) -> Chosen | None:
    """The checkpoint to load. Collective: rank 0 lists, every rank reads its share of the bytes. Changes no file.

    Args:
        root: `--load`.
        args: Megatron's.
        config: what is allowed.
        ledger: its folder; None where it is in SAVE.

    Returns:
        The checkpoint; None where Megatron may go on without one (a fresh start or an unverified load was allowed).

    Raises:
        UsageError: on every rank alike; names the file or folder that is bad and the flag that would allow it.
    """
    plan: Plan = from_rank_0(lambda: _plan(root, args))
    seen: list[Listed] = []
    for note in plan.notes:
        print_rank_0(f"> megatron-stability: {note}")
    for each in (*plan.not_tried, *plan.tries):
        if each in plan.tries:
            folder = root / each.folder
            found, problem = _verify_together(folder, config.threads)
            if found is not None:
                because = f" ({plan.why})" if plan.why else ""
                print_rank_0(f"> megatron-stability: {folder.name} is complete and verified{because}")
                return Chosen(found, each.folder, plan.why)
            each = Listed(each.folder, each.step, "corrupt", f"{folder.name} is corrupt: {problem}")
        if each.state == "corrupt" and config.strict:
            raise UsageError(
                f"{root}: {each.says}; mend it, or drop --stability-checkpoint-strict to use the next older"
            )
        print_rank_0(said(f"> megatron-stability: {each.says}; it is not loaded"))
        seen.append(each)
    from_rank_0(lambda: _refuse_without_a_good_one(root, seen, plan, args, config, ledger))
    from_rank_0(lambda: _refuse_unsafe(root, argument(args, "ckpt_step")))
    return None


def accept(root: Path, chosen: Chosen) -> None:
    """Rank 0, once nothing refuses the start: Megatron will find what was chosen, which it looks for by its step.

    Raises:
        UsageError: the folder can't be written to, and what Megatron would read there misleads it.
    """
    tracker = root / generations.TRACKER
    if asides.is_aside(chosen.folder):
        asides.put_back(root)
    if tracker.exists() and generations.read_tracker(root) is None:
        if not os.access(root, os.W_OK):
            raise UsageError(f"{tracker}: can't be read as a step, and {root} can't be written to")
        generations.write_tracker(root, chosen.manifest.step)
        print(f"> megatron-stability: {tracker.name} names step {chosen.manifest.step} now", flush=True)


def choose_older(root: Path, back: int, sample: int, config: Checkpoint) -> Chosen | None:
    """The checkpoint to go back to. Collective, as `choose`.

    Args:
        root: `--save`.
        back: 1 for the newest that qualifies, 2 for the one before it, and so on; a corrupt one is passed over.
        sample: it may not have consumed this sample or a later one.
        config: `threads`.

    Returns:
        The checkpoint; None where there is none so far back.
    """
    for step in from_rank_0(lambda: _complete_before(root, sample))[back - 1 :]:
        folder = generations.folder_of(root, step)
        found, problem = _verify_together(folder, config.threads)
        if found is not None:
            return Chosen(found, folder.name, "a rewind")
        print_rank_0(said(f"> megatron-stability: {folder.name} is corrupt: {problem}; it is not gone back to"))
    return None


def _complete_before(root: Path, sample: int) -> list[int]:
    found = generations.candidates(root)
    return [each.step for each in found if each.manifest is not None and each.manifest.samples <= sample]


def _plan(root: Path, args: Namespace) -> Plan:
    survey, ckpt_step = generations.Survey(root), argument(args, "ckpt_step")
    tracker = generations.read_tracker(root)
    choice = survey.lineage.choose(ckpt_step=ckpt_step, tracker=tracker if isinstance(tracker, int) else None)
    ours = _is_saved_to(root, args)  # only then may what was set aside take its place again
    tries = [each for each in map(survey.at, choice.places) if ours or not asides.is_aside(each.folder.name)]
    named = [each for each in survey.found if not asides.is_kept(each.folder.name)]
    folders = [each.folder for each in named]
    newer = named[: folders.index(tries[0].folder)] if tries else named
    others = [each for each in newer if each.state != "complete" and each.folder not in {t.folder for t in tries}]
    if ckpt_step:
        others = [] if tries else [each for each in named if each.step == ckpt_step]
    return Plan(
        tries=[Listed(each.folder.name, each.step, "complete", str(each)) for each in tries],
        not_tried=[Listed(each.folder.name, each.step, each.state, str(each)) for each in others],
        why=choice.why,
        notes=_about_tracker(root, tracker),
        anew=survey.lineage.counter > 0 and survey.lineage.at_the_beginning,
    )


def _about_tracker(root: Path, tracker: int | str | None) -> tuple[str, ...]:
    if not isinstance(tracker, int) or generations.folder_of(root, tracker).is_dir():
        return ()
    missing = generations.folder_of(root, tracker).name
    return (f"{generations.TRACKER} names step {tracker}, and there is no {missing}",)


def _is_saved_to(root: Path, args: Namespace) -> bool:
    """Whether this start goes on in the folder that it loads from."""
    rehearses = is_set(args, "skip_train") or is_set(args, "finetune")
    return bool(args.save) and Path(args.save).resolve() == root.resolve() and not rehearses


def _verify_together(folder: Path, threads: int) -> tuple[Manifest | None, str | None]:
    """Collective: the manifest with this rank's files alone, or the first problem that a rank finds in its part."""
    read: list[Manifest] = []

    def head() -> tuple[Manifest | None, str | None]:
        found, problems = manifest.believed(folder)
        if found is None:
            return None, str(problems[0])
        read.append(found)
        return found.model_copy(update={"files": {}}), None

    known, problem = from_rank_0(head)
    if known is None:
        return None, problem
    mine = share_out(lambda: parts.parts(read[0].files, dist.get_world_size()))
    problems = manifest.verify_files(folder, mine, threads=threads)
    complaint = first(str(problems[0]) if problems else None)
    if complaint is not None:
        return None, complaint[1]
    return known.model_copy(update={"files": mine}), None


def _refuse_without_a_good_one(
    root: Path, listed: list[Listed], plan: Plan, args: Namespace, config: Checkpoint, ledger: Path | None
) -> None:
    """Rank 0: raise, unless what is there may be passed over."""
    tracker = generations.read_tracker(root)
    incomplete = all(each.state == "incomplete" for each in listed)
    afresh = "give --stability-checkpoint-allow-fresh-start true to train from the start"
    if not listed and tracker is None and not argument(args, "ckpt_step"):
        if _is_first_start(root, args, ledger):
            says = f"--load and --save {root}: nothing was ever saved there{_near(root)}, so this is a fresh start"
            print(said(f"> megatron-stability: {says}"), flush=True)
        elif not config.allow_fresh_start:
            raise UsageError(f"--load {root}: holds no checkpoint{_near(root)}; name the folder of a run, or {afresh}")
    elif plan.anew and tracker is None and not argument(args, "ckpt_step"):
        if not config.allow_fresh_start:
            raise UsageError(
                f"--load {root}: a run from the beginning left all checkpoints there behind, and has saved none yet; "
                f"{afresh}, or --ckpt-step to take one back"
            )
    elif incomplete and tracker is None and config.allow_fresh_start:
        pass  # killed in its first save: nothing was ever complete
    elif not (incomplete and config.allow_unverified):
        newest = (
            f" ({'; '.join([each.says for each in listed[:1]] + list(plan.notes))})" if listed or plan.notes else ""
        )
        hint = "; --stability-checkpoint-allow-unverified true loads one that was saved without a manifest"
        raise UsageError(f"--load {root}: no checkpoint there is complete and verified{newest}{hint * incomplete}")


def _is_first_start(root: Path, args: Namespace, ledger: Path | None) -> bool:
    """Whether a script whose flags load and save in one folder starts for the first time.

    Of a run that was there before, its ledger or its checkpoints are left. Tensorboard's files and caches in the folder
    are this start's own.
    """
    used = [folder / LEDGER for folder in (root / "stability", ledger) if folder is not None]
    return _is_saved_to(root, args) and not any(file.exists() for file in used)


def _near(root: Path) -> str:
    """Folders beside one that is missing, with nearly its name."""
    beside = [path.name for path in root.parent.iterdir() if path.is_dir()] if root.parent.is_dir() else []
    near = [] if root.is_dir() else get_close_matches(root.name, beside)
    return f" (there is no such folder; near it: {', '.join(str(root.parent / name) for name in near)})" if near else ""


def _refuse_unsafe(root: Path, ckpt_step: int | None) -> None:
    """Rank 0: what Megatron is about to load without a manifest may name no program all the same."""
    step = ckpt_step or generations.read_tracker(root)
    if step is not None:
        dcp_metadata.refuse_unsafe(root / "release" if step == "release" else generations.folder_of(root, step))
