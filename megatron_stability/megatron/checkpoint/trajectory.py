"""Where a run stands among the checkpoints of its `--save` folder, and what rank 0 records of it there.

A start is recorded with its first step, once everything that may refuse it is behind; a run that never trains records
nothing. What was saved and is not on the way to where training stands is left behind (`checkpoints/lineage.py`).
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron_stability.checkpoints import asides, generations, history, manifest
from megatron_stability.checkpoints.generations import TRACKER, Survey
from megatron_stability.checkpoints.lineage import History, Place
from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.config import Checkpoint
from megatron_stability.echo import say
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.collectives import from_rank_0
from megatron_stability.megatron.checkpoint.failed_save import Failure, attempt, tell
from megatron_stability.megatron.checkpoint.resume.choose import Chosen


class Trajectory:
    """One a rank; the files are rank 0's, from its training thread or, between saves, from the one that completes them.

    Attributes:
        applied: the last step whose update is in the weights.
        withheld: steps in a row since, whose updates were withheld; what was passed over does not count.
        start: the checkpoint in `--save` where training began last; None where it began elsewhere.
    """

    def __init__(self, config: Checkpoint, args: Namespace) -> None:
        """Takes the settings and Megatron's arguments."""
        self._config, self._args = config, args
        self.applied = self.withheld = 0
        self.start: Place | None = None
        self._loaded: tuple[Chosen, Path] | None = None
        self._recorded = False
        self._fruitless: bool | None = None  # None: no step since the start
        self._at: Place | None = None  # what the next save continues
        self._counter, self._history = 0, History()
        self._unproven: set[Place] = set()

    @property
    def _root(self) -> Path | None:
        return Path(self._args.save) if self._args.save and self._config.manifest else None

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint, or a snapshot."""
        return {"applied": self.applied, "withheld": self.withheld}

    def load_state_dict(self, state: dict[str, int] | None) -> None:
        """The inverse; a checkpoint without it was saved after an applied update."""
        step = self._loaded[0].manifest.step if self._loaded is not None else 0
        state = state or {"applied": step, "withheld": 0}
        self.applied, self.withheld = state["applied"], state["withheld"]

    # --- a start ----------------------------------------------------------------------------------------------------

    def loaded(self, chosen: Chosen | None, root: Path) -> None:
        """What a start loads, and from where; nothing has refused it so far."""
        self._loaded = None if chosen is None else (chosen, root)

    @property
    def loads(self) -> Place | None:
        """The checkpoint that this process was started from."""
        if self._loaded is None:
            return None
        place = Place(self._loaded[0].manifest.counter, self._loaded[0].manifest.step)
        return place if self._args.iteration == place.step else None

    def refuse_a_used_folder(self) -> None:
        """Before the first step: a run from the beginning may not mix with another one's checkpoints. Collective.

        Raises:
            UsageError: on every rank alike; names the choices.
        """
        from_rank_0(self._refuse_a_used_folder)

    def _refuse_a_used_folder(self) -> None:
        root = self._root
        if root is None or self._args.iteration > 0 or self._config.new_lineage:
            return
        if (newest := _newest_in(root)) is not None:
            raise UsageError(
                f"--save {root}: holds a run's checkpoints ({newest}), and this start is from the beginning; give "
                f"--load {root} to go on with it (without --finetune), another --save, or "
                "--stability-checkpoint-new-lineage true to leave what is there behind as suspect"
            )

    def record_start(self) -> None:
        """With a process's first step or save: the folder's newest is from here on what it saves. Collective then."""
        if self._recorded:
            return
        self._recorded = True
        self.start = from_rank_0(self._record_start)

    def _record_start(self) -> Place | None:
        root = self._root
        if root is None or not root.is_dir():
            return None
        for folder in asides.put_back(root):
            say(f"{folder.name} is there again: its step was being saved anew, and that came to no end")
        place, why = None, "a start from the beginning"
        if self._loaded is not None:
            chosen, folder = self._loaded
            why = f"a start from {folder}"
            if self.loads is not None and folder.resolve() == root.resolve():
                place = self.loads
                why = f"a start from step {place.step} ({chosen.why or 'nothing newer could be loaded'})"
        self._go_on_from(root, place, why)
        return place

    def rewound(self, target: Manifest | None, to_step: int, why: str) -> Place | None:
        """Rank 0, before a rewind loads: what was saved after its target is left behind.

        Args:
            target: the checkpoint; None for a snapshot in memory.
            to_step: the step that training goes back to.
            why: "a rewind from step 9 to step 6".

        Returns:
            The save that training goes on from.
        """
        root = self._root
        assert root is not None, "a rewind needs --save"
        line = Survey(root).lineage.line(self._at)
        before = next((place for place in line if place.step <= to_step), None)
        place = before if target is None else Place(target.counter, target.step)
        self._go_on_from(root, place, why)
        return place

    def rewind_loaded(self, place: Place | None) -> None:
        """After a rewind's load, on every rank: it is a start like another."""
        self.start, self._fruitless = place, None

    def _go_on_from(self, root: Path, place: Place | None, why: str) -> None:
        """Tracker first: a death in between leaves one that was moved by hand, to where training was going."""
        survey = Survey(root)
        lineage, known = survey.lineage, survey.lineage.history
        self._at, self._counter = place, lineage.counter
        if place == lineage.head if place is not None else lineage.at_the_beginning:
            updated = known
        else:
            updated = known.branched(place, why, lineage.counter)
            self._counter = updated.counter
        if place is not None:
            _point_at(root, place.step)
        elif updated is not known:
            for name in generations.TRACKERS:
                (root / name).unlink(missing_ok=True)
        if place is not None or updated is not known:
            self._history = updated.model_copy(update={"tracker": place.step if place is not None else None})
            if self._history != known:
                history.write(root, self._history)
        else:
            self._history = known
        after = Survey(root)
        in_doubt = place is not None and (place in self._history.failed or after.lineage.unproven(place))
        self._unproven = {place} if place is not None and in_doubt else set()
        survivors = {each.folder for each in after.candidates}
        for each in survey.candidates:
            if each.folder not in survivors:
                say(
                    f"{each.folder.name} is suspect from now on: left behind by {why}; --ckpt-step {each.step} takes "
                    "it back"
                )

    # --- a step -----------------------------------------------------------------------------------------------------

    def step_done(self, step: int, applied: bool) -> bool:
        """Count a step that was computed.

        Returns:
            Whether this update may prove a checkpoint: `prove` is to be called in the order of the saves.
        """
        doubtful = self.withheld > 0 or bool(self._unproven)
        if applied:
            self.applied, self.withheld, self._fruitless = step, 0, False
            return doubtful
        self.withheld += 1
        if self._fruitless is None:
            self._fruitless = True
        return False

    def prove(self) -> None:
        """Rank 0: an update was applied after what was saved so far."""
        if self._unproven and self._root is not None:
            self._history = self._history.with_proven(self._unproven)
            self._unproven.clear()
            self._write(self._root)

    def condemn(self) -> None:
        """Rank 0: the start could apply no update, so another one takes what was not proven before."""
        root = self._root
        if root is None or not self._fruitless:
            return
        survey = Survey(root)
        places = survey.lineage.condemned(self.start)
        if not set(places) <= set(self._history.failed):
            self._history = self._history.with_failed(places)
            self._write(root)
        for place in places:
            say(f"iter_{place.step:07d} is suspect from now on: a start from it could apply no update")

    # --- a save -----------------------------------------------------------------------------------------------------

    def stamped(self, folder: Path, whole: Manifest) -> Manifest:
        """Rank 0: a manifest with its place; what replaces the save that it continues continues that one's parent."""
        replaced = self._replaced_by(folder)
        self._counter += 1
        parent = self._at if replaced is None else replaced.parent
        return whole.model_copy(update={"counter": self._counter, "parent": parent})

    def _replaced_by(self, folder: Path) -> Manifest | None:
        """The save that this run stands on, where it was set aside for `folder`."""
        aside = asides.aside_of(folder)
        found = None if aside is None else manifest.check(aside)[0]
        return found if found is not None and self._at == (found.counter, found.step) else None

    def counts(self, folder: Path, whole: Manifest) -> None:
        """Rank 0, once marker and manifest are written: the tracker moves, and what was set aside may go."""
        aside, replaced = asides.aside_of(folder), self._replaced_by(folder)
        generations.write_tracker(folder.parent, whole.step)
        self._stands_on(whole)
        self._history = self._history.model_copy(update={"counter": whole.counter, "tracker": whole.step})
        if aside is not None:
            asides.keep_as_suspect(aside) if replaced is None else asides.delete([aside])
        self._write(folder.parent)
        if self._config.keep:
            gone, failure = attempt(lambda: generations.retire(folder.parent, self._config.keep))
            for each in gone or ():
                say(f"{each.name} was deleted (--stability-checkpoint-keep)")
            if failure is not None:  # this checkpoint counts all the same
                say(f"--stability-checkpoint-keep: {failure.text}")

    def _write(self, root: Path) -> None:
        """Where it fails, manifests and tracker say nearly as much, and the next write makes good for it."""
        _, failure = attempt(lambda: history.write(root, self._history))
        if failure is not None:
            say(failure.text)

    def is_evidence(self, folder: Path, whole: Manifest) -> None:
        """Rank 0, once a suspect is written: what it would have replaced takes its place again."""
        if asides.aside_of(folder) is not None:
            asides.put_back(folder.parent)
        self._stands_on(whole)

    def _stands_on(self, whole: Manifest) -> None:
        self._at = Place(whole.counter, whole.step)
        if whole.withheld:
            self._unproven.add(self._at)

    def failed(self, folder: Path, failure: Failure) -> None:
        """Rank 0: say why a save does not count, and let what was there before stand again."""
        tell(folder, failure)
        if asides.aside_of(folder) is not None:
            for back in asides.put_back(folder.parent):
                say(f"{back.name} is the one from before again")

    def halted(self, step: int, reason: str) -> None:
        """Rank 0: mark what was saved in the last `suspect_steps` steps, and what could apply no update."""
        window, root = self._config.suspect_steps, self._root
        for each in generations.candidates(root) if window and root is not None else ():
            if each.step > step - window:
                generations.mark_suspect(each.folder, f"saved {step - each.step} steps before a halt: {reason}")
                say(f"{each.folder.name} is marked suspect")
        self.condemn()

    def saved_at(self, step: int) -> bool:
        """Rank 0: whether the last save is of this step."""
        return self._at is not None and self._at.step == step


def _newest_in(root: Path) -> str | None:
    """What a run has saved last in a folder, with or without manifests; None: nothing."""
    survey, tracker = Survey(root), generations.read_tracker(root)
    if survey.candidates:
        return survey.candidates[0].folder.name
    named = generations.folder_of(root, tracker) if isinstance(tracker, int) else root / "release"
    stock = tracker is not None and named.is_dir() and not any(each.manifest for each in survey.found)
    return f"{TRACKER} {tracker}" if stock else None


def _point_at(root: Path, step: int) -> None:
    tracker = generations.read_tracker(root)
    if tracker != step:
        generations.write_tracker(root, step)
        say(f"{TRACKER} names step {step} now (before: {tracker})")
