"""Which checkpoint comes next: decided from what the manifests say and what was done with the folder. No I/O.

Whatever happens to a `--save` folder has a number, its `counter`: a save, and a branch, which is a start or a rewind
that went on from elsewhere than the newest save. A save knows the one that it continues, its parent. So the newest
event says where training stands, and its line of parents is the surviving trajectory; every other save was left behind.
No clock and no step number decides: after a rollback from step 6 to step 3, step 4 is newer than step 6.

Between two branches a save continues the one before it, so that a line goes on across saves which somebody deleted.
Checkpoints from before there were counters have counter 0, and continue each other by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator

SCHEMA = 1


class Place(NamedTuple):
    """One save: its number in the folder's history (0: from before there were any), and its step."""

    counter: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What the decision needs of a checkpoint whose manifest can be believed.

    `applied` is the last step whose update is in it, `withheld` how many steps in a row were withheld since. `here` is
    false where the folder was set aside under another name. `sound`: nothing speaks against its files, and it is no
    evidence of a run that had gone wrong.
    """

    place: Place
    parent: Place | None = None
    applied: int = 0
    withheld: int = 0
    here: bool = True
    sound: bool = True


class Branch(BaseModel):
    """Training went on from `to` (None: from the start, or from another folder), whatever had been saved before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    counter: int
    to: Place | None
    why: str

    @model_validator(mode="after")
    def _goes_back(self) -> Branch:
        if self.counter < 1 or (self.to is not None and not 0 <= self.to.counter < self.counter):
            raise ValueError(f"branch {self.counter} goes to {self.to}, which is not before it")
        return self


class History(BaseModel):
    """What manifests can't say. `failed`: starts from there could apply no update; `proven`: an update came after it.

    `tracker` is the step that we let Megatron's tracker file name last, None where we took it away: what else it says
    was written by somebody.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA
    counter: int = 0
    tracker: int | Literal["unknown"] | None = "unknown"
    branches: tuple[Branch, ...] = ()
    proven: tuple[Place, ...] = ()
    failed: tuple[Place, ...] = ()

    def branched(self, to: Place | None, why: str, counter: int) -> History:
        """With one more branch, after all that has `counter` or less."""
        branch = Branch(counter=counter + 1, to=to, why=why)
        return self.model_copy(update={"branches": (*self.branches, branch), "counter": counter + 1})

    def with_failed(self, places: Iterable[Place]) -> History:
        """With starts from these in vain."""
        return self.model_copy(update={"failed": tuple(sorted({*self.failed, *places}))})

    def with_proven(self, places: Iterable[Place]) -> History:
        """With an update applied after these."""
        return self.model_copy(update={"proven": tuple(sorted({*self.proven, *places}))})


@dataclass(frozen=True, slots=True)
class Choice:
    """Places to try, best first, and why it is not the newest of the trajectory; "" where it is."""

    places: tuple[Place, ...]
    why: str = ""


class Lineage:
    """The saves of one folder with its history."""

    def __init__(self, saves: Iterable[Save], history: History) -> None:
        """Takes them in any order."""
        self.history = history
        self._saves = {save.place: save for save in saves}
        self._at = {place.counter: place for place in self._saves if place.counter}
        self._to = {branch.counter: branch.to for branch in history.branches}

    @cached_property
    def counter(self) -> int:
        """The number of the last event."""
        return max((self.history.counter, *self._at, *self._to))

    @cached_property
    def head(self) -> Place | None:
        """Where training stands: what the next save continues."""
        return self._after(self.counter)

    @property
    def at_the_beginning(self) -> bool:
        """Whether nothing was saved since a start from the beginning, or ever."""
        if self.counter in self._to:
            return self._to[self.counter] is None
        return self.counter == 0 and not self._saves

    @cached_property
    def surviving(self) -> tuple[Place, ...]:
        """The trajectory, newest first."""
        return tuple(self.line(self.head))

    def line(self, place: Place | None) -> Iterator[Place]:
        """The saves that lie behind a place, itself first; those that were deleted are stepped over."""
        while place is not None:
            save = self._saves.get(place)
            if save is not None:
                yield place
            place = self._before(place) if save is None else self._parent(save)

    def _parent(self, save: Save) -> Place | None:
        if save.place.counter == 0:
            return self._before(save.place)
        before = save.parent is not None and save.parent.counter < save.place.counter
        return save.parent if before else None

    def _before(self, place: Place) -> Place | None:
        if place.counter:
            return self._after(place.counter - 1)
        steps = [each.step for each in self._saves if each.counter == 0 and each.step < place.step]
        return Place(0, max(steps)) if steps else None

    def _after(self, counter: int) -> Place | None:
        """Where training stood after an event."""
        for number in range(counter, 0, -1):
            if number in self._to:
                return self._to[number]
            if number in self._at:
                return self._at[number]
        return max((place for place in self._saves if place.counter == 0), default=None)

    # --- what is thought of a save ----------------------------------------------------------------------------------

    def proven(self, place: Place) -> bool:
        """Whether an update was applied after it, as far as it is known."""
        if any(place in self.line(each) for each in self.history.proven):
            return True
        later = [save for save in self._saves.values() if save.place > place and save.applied > place.step]
        return any(place in self.line(save.place) for save in later)

    def unproven(self, place: Place) -> bool:
        """Whether steps were being withheld when it was saved, or right after, and no update came since."""
        streaks = [save.place for save in self._saves.values() if save.withheld > 0 and save.place >= place]
        return any(place in self.line(each) for each in streaks) and not self.proven(place)

    def vain(self, place: Place) -> bool:
        """Whether starts from there could apply no update, and none has since."""
        return place in self.history.failed and not self.proven(place)

    def objection(self, place: Place) -> str | None:
        """Why a sound checkpoint is not resumed from unless it is asked for; None where nothing speaks against it."""
        if self.vain(place):
            return "a start from it could apply no update"
        if place in self.surviving:
            return None
        for branch in sorted(self.history.branches, key=lambda each: each.counter):
            if branch.counter > place.counter and place not in self.line(branch.to):
                return f"left behind by {branch.why}"
        return "not on the surviving trajectory"

    @cached_property
    def candidates(self) -> tuple[Place, ...]:
        """What may be resumed from unasked, best first."""
        return tuple(place for place in self.surviving if self._fine(place) and not self.vain(place))

    def _fine(self, place: Place) -> bool:
        return self._saves[place].sound and self._saves[place].here

    # --- decisions --------------------------------------------------------------------------------------------------

    def choose(self, *, ckpt_step: int | None = None, tracker: int | None = None) -> Choice:
        """Which checkpoint a start takes.

        Args:
            ckpt_step: `--ckpt-step`: this one or none, whatever was thought of it.
            tracker: what the tracker file says, None where it says no step.

        Returns:
            The places to try.
        """
        if ckpt_step:
            place = self._of_step(ckpt_step)
            return Choice((place,) if place is not None and self._fine(place) else (), f"--ckpt-step {ckpt_step}")
        if tracker is None or not self.edited(tracker):
            return Choice(self.candidates)
        why = f"a tracker that was set to step {tracker} by hand"
        named = self._of_step(tracker)
        if named is None:  # nothing can be said of it: what the trajectory has from before
            return Choice(tuple(place for place in self.candidates if place.step < tracker), why)
        line = tuple(p for p in self.line(named) if self._fine(p) and (p == named or not self.vain(p)))
        return Choice(line, why if line[:1] != self.candidates[:1] else "")

    def edited(self, tracker: int) -> bool:
        """Whether somebody else than us wrote the tracker file: a tracker that only lags behind is ours."""
        ours = self.history.tracker
        return ours != "unknown" and tracker not in (ours, self.head.step if self.head else None)

    def _of_step(self, step: int) -> Place | None:
        return max((place for place, save in self._saves.items() if save.here and place.step == step), default=None)

    def retired(self, keep: int) -> tuple[Place, ...]:
        """What retention may delete: older than the newest `keep` of the trajectory that are not unproven."""
        counted = 0
        for index, place in enumerate(self.candidates):
            if counted == keep:
                return self.candidates[index:]
            counted += not self.unproven(place)
        return ()

    def condemned(self, start: Place | None) -> tuple[Place, ...]:
        """What a start that could apply no update speaks against: where it began, and what it saved.

        Args:
            start: where it began; None where that lies in no folder of ours.
        """
        since = [place for place in self.surviving if start is None or place > start]
        saved = [place for place in since if self.unproven(place)]
        began = [start] if start is not None and not self.proven(start) else []
        return (*began, *saved)
