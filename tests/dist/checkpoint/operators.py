"""What operators do with a `--save` folder, at random, on real folders of tiny files; and what must come next.

`Expected` is the model: it keeps the true ancestry of every save as objects, and imports nothing of the product. `Job`
drives the product's own choosing, recording and completing, and can die between any two renames.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.dist.checkpoint.files_read import Read

TRACKER, MARKER, HISTORY = "latest_checkpointed_iteration.txt", "stability_complete", "stability_lineage.json"


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Made:
    """One save, and the one before it on its own trajectory."""

    name: str
    step: int
    parent: Made | None
    applied: int
    withheld: int
    vain: bool = False
    proven: bool = False
    damaged: bool = False
    on_disk: bool = True

    def line(self) -> Iterator[Made]:
        made: Made | None = self
        while made is not None:
            yield made
            made = made.parent


@dataclass
class Expected:
    """A folder as somebody who saw everything would tell it."""

    made: list[Made] = field(default_factory=list)
    plain: dict[int, Made] = field(default_factory=dict)  # what Megatron would find
    stands: Made | None = None
    tracker: int | None = None
    noted: int | None = None  # what the tracker said when the job last wrote down what it had done
    edited: bool = False

    def survivors(self) -> list[Made]:
        """What may be resumed from, newest first."""
        return [made for made in self._line(self.stands) if not made.vain]

    def _line(self, made: Made | None) -> list[Made]:
        line = made.line() if made is not None else ()
        return [each for each in line if self.plain.get(each.step) is each and not each.damaged]

    def next(self, ckpt_step: int | None) -> Made | None:
        """What a start has to load."""
        if ckpt_step is not None:
            asked = self.plain.get(ckpt_step)
            return asked if asked is not None and not asked.damaged else None
        if not self.edited:
            return next(iter(self.survivors()), None)
        assert self.tracker is not None
        named = self.plain.get(self.tracker)
        if named is None:
            return next((made for made in self.survivors() if made.step < (self.tracker or 0)), None)
        return next((made for made in self._line(named) if made is named or not made.vain), None)

    def goes_on(self, made: Made | None) -> None:
        """A start's or a rewind's first step."""
        self.stands, self.tracker, self.edited = made, None if made is None else made.step, False
        self.noted = self.tracker

    def saved(self, name: str, step: int, applied: int, withheld: int, keep: int) -> None:
        """A save came to its end."""
        again = self.stands is not None and self.stands.step == step and self.plain.get(step) is self.stands
        parent = self.stands.parent if again and self.stands is not None else self.stands
        if again and self.stands is not None:
            self.stands.on_disk = False
        new = Made(name, step, parent, applied, withheld)
        self.made.append(new)
        self.plain[step] = new
        self.goes_on(new)
        counted = 0
        for each in self.survivors() if keep else ():
            if counted >= keep:
                self.removed(each)
            counted += not self.doubtful(each)

    def removed(self, made: Made) -> None:
        del self.plain[made.step]
        made.on_disk = False

    def proves(self, made: Made) -> bool:
        """Whether an update is known to have come after it."""
        later = (m for m in self.made if m.proven or (m.on_disk and m.applied > made.step and m is not made))
        return any(made in m.line() for m in later)

    def doubtful(self, made: Made) -> bool:
        """Whether a streak of withheld steps began at it or before it, and no update came after it."""
        streaks = (m for m in self.made if m.on_disk and m.withheld)
        return any(made in m.line() for m in streaks) and not self.proves(made)

    def updated(self) -> None:
        """An update was applied where training stands."""
        for made in self.stands.line() if self.stands is not None else ():
            if made.vain or self.doubtful(made):
                made.proven, made.vain = True, False

    def in_vain(self, start: Made | None) -> None:
        """A start withheld all its steps, and halted."""
        for made in self.stands.line() if self.stands is not None else ():
            if made is start:
                break
            if self.doubtful(made):
                made.vain = True
        if start is not None and not self.proves(start):
            start.vain = True


# --- the product ------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """A death between two renames."""


class RefusedError(Exception):
    """The product refused a start."""


@contextlib.contextmanager
def dies_after(renames: int | None) -> Iterator[None]:
    """Die before the rename after so many."""
    if renames is None:
        yield
        return
    left, real = renames, (os.rename, os.replace)

    def counted(which: Any) -> Any:
        def rename(*args: Any, **kwargs: Any) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            which(*args, **kwargs)

        return rename

    os.rename, os.replace = counted(real[0]), counted(real[1])
    try:
        yield
    finally:
        os.rename, os.replace = real


class Job:
    """A process that trains: everything but the training is the product's."""

    def __init__(
        self, save: Path, load: Path | None, *, ckpt_step: int | None = None, anew: bool = False, keep: int = 0
    ) -> None:
        from megatron_stability.config import Checkpoint, StabilityConfig
        from megatron_stability.errors import UsageError
        from megatron_stability.megatron.access.host import Host
        from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints
        from megatron_stability.megatron.checkpoint.resume import choose

        self.save, self.chosen = save, ""
        self.args = Namespace(save=str(save), ckpt_step=ckpt_step, iteration=0, finetune=False, skip_train=False)
        config = StabilityConfig(checkpoint=Checkpoint(new_lineage=anew, keep=keep))
        host = Host()
        host.finish_saves = lambda: None  # type: ignore[method-assign]
        self.checkpoints = Checkpoints(config, self.args, Read(), host)
        self.trajectory = self.checkpoints.trajectory
        try:
            if load is not None:
                found = choose.choose(load, self.args, config.checkpoint)
                assert found is not None, "nothing was allowed that would give none"
                choose.accept(load, found)
                self.trajectory.loaded(found, load)
                self.args.iteration = found.manifest.step
                folder = load / f"iter_{found.manifest.step:07d}"
                self.chosen = (folder / "name").read_text()
                state = {"applied": found.manifest.applied, "withheld": found.manifest.withheld}
                self.trajectory.load_state_dict(state)
            self.trajectory.refuse_a_used_folder()
        except UsageError as error:
            raise RefusedError(str(error)) from None
        self.step = self.args.iteration

    def first_step(self) -> None:
        self.trajectory.record_start()

    def train(self, applied: bool) -> None:
        self.trajectory.record_start()
        self.step += 1
        self.checkpoints.step_done(self.step, applied)
        self.checkpoints.close()

    def saves(self, name: str) -> None:
        from megatron_stability.checkpoints import manifest

        self.checkpoints.save_begins(str(self.save), self.step)
        folder = self.save / f"iter_{self.step:07d}"
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(name)
        files = manifest.hash_files(folder, manifest.file_names(folder))
        streak = self.trajectory.state_dict()
        whole = manifest.Manifest(step=self.step, samples=self.step, tokens=self.step, files=files, **streak)
        self.checkpoints.completion.finish(folder, whole, None)

    def rewinds(self, name: str) -> None:
        """Back to a survivor, in the running job."""
        from megatron_stability.checkpoints import generations

        each = next(each for each in generations.candidates(self.save) if (each.folder / "name").read_text() == name)
        assert each.manifest is not None
        place = self.trajectory.rewound(each.manifest, each.step, "a rewind")
        state = {"applied": each.manifest.applied or each.step, "withheld": each.manifest.withheld}
        self.trajectory.load_state_dict(state)
        self.trajectory.rewind_loaded(place)
        self.step = each.step

    def halts(self) -> None:
        self.trajectory.halted(self.step, "all withheld")


# --- one sequence -----------------------------------------------------------------------------------------------------


class Sequence:
    """Random actions on two folders; every start and every list of survivors is compared."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance, self.names = random.Random(seed), 0
        self.roots = [root / "a", root / "b"]
        self.told = [Expected(), Expected()]
        self.keep = self.chance.choice([0, 0, 1, 2])
        self.starts = self.refusals = self.deaths = 0
        self.after_death = [False, False]  # a save or a start of the folder's last job was cut short
        for folder in self.roots:
            folder.mkdir(parents=True)

    def run(self, actions: int) -> None:
        for number in range(actions):
            which = 0 if self.chance.random() < 0.8 else 1
            kinds = [self.requeue] * 5 + [self.ckpt_step] * 3 + [self.edit] * 2 + [self.fresh, self.elsewhere]
            kinds += [self.prune, self.damage, self.in_vain]
            if number == 0 or not self.told[which].made:
                kinds = [self.fresh]
            self.chance.choice(kinds)(which)
            self.compare(f"action {number}")

    def compare(self, when: str) -> None:
        from megatron_stability.checkpoints import generations

        for root, told in zip(self.roots, self.told, strict=True):
            found = [(each.folder / "name").read_text() for each in generations.candidates(root)]
            assert found == [made.name for made in told.survivors()], (when, root.name)

    # actions: each has an optional death in it

    def requeue(self, which: int) -> None:
        self._start(which, load=which)

    def ckpt_step(self, which: int) -> None:
        steps = [made.step for made in self.told[which].made] + [99]
        self._start(which, load=which, ckpt_step=self.chance.choice(steps))

    def fresh(self, which: int) -> None:
        self._start(which, load=None, anew=self.chance.random() < 0.5)

    def elsewhere(self, which: int) -> None:
        if self.told[1 - which].made:
            self._start(which, load=1 - which)

    def in_vain(self, which: int) -> None:
        self._start(which, load=which, vain=True)

    def edit(self, which: int) -> None:
        told = self.told[which]
        if self.after_death[
            which
        ]:  # between a save's two last writes nobody can tell an edit back from a tracker that lags
            return
        step = self.chance.choice([made.step for made in told.made] + [98])
        (self.roots[which] / TRACKER).write_text(f"{step}\n")
        told.tracker, told.edited = step, step != told.noted

    def prune(self, which: int) -> None:
        told = self.told[which]
        gone = self.chance.choice(sorted(told.plain.values(), key=lambda made: made.name) or [None])
        if gone is not None and not self.after_death[which]:
            shutil.rmtree(self.roots[which] / f"iter_{gone.step:07d}")
            told.removed(gone)

    def damage(self, which: int) -> None:
        told = self.told[which]
        if told.survivors() and not self.after_death[which]:
            hurt = told.survivors()[0]
            (self.roots[which] / f"iter_{hurt.step:07d}" / "name").write_text(hurt.name + " and more")
            hurt.damaged = True

    def _start(
        self, which: int, load: int | None, *, ckpt_step: int | None = None, anew: bool = False, vain: bool = False
    ) -> None:
        told, root = self.told[which], self.roots[which]
        source = None if load is None else self.told[load]
        expected = None if source is None else source.next(ckpt_step)
        refused = expected is None if load is not None else bool(told.survivors()) and not anew
        before = self._bytes()
        folder = None if load is None else self.roots[load]
        try:
            job = Job(root, folder, ckpt_step=ckpt_step, anew=anew, keep=self.keep)
        except RefusedError:
            assert refused, f"refused, and {expected} was expected"
            assert self._bytes() == before, "a start that was refused changed something"
            self.refusals += 1
            return
        assert not refused, f"{job.chosen} was not refused"
        assert job.chosen == ("" if expected is None else expected.name)
        self.starts += 1
        if self.chance.random() < 0.1:
            return  # ended before its first step: nothing was recorded
        began = expected if load == which else None
        if not self._first_step(job, which, began):
            return
        self._trains(job, which, began, vain)

    def _first_step(self, job: Job, which: int, began: Made | None) -> bool:
        told, root = self.told[which], self.roots[which]
        branches = self._branches(root)
        try:
            with dies_after(self.chance.randrange(4) if self.chance.random() < 0.15 else None):
                job.first_step()
        except Killed:
            self.deaths += 1
            self.after_death[which] = True
            if self._branches(root) != branches or began is told.stands:
                told.goes_on(began)
            tracker = self._tracker(root)
            told.noted = self._noted(root)
            told.edited = tracker is not None and tracker != told.noted  # where it moved first, it says where to
            told.tracker = tracker
            return False
        self.after_death[which] = False
        if began is not None or told.stands is not None:
            told.goes_on(began)
        return True

    def _trains(self, job: Job, which: int, began: Made | None, vain: bool) -> None:
        told = self.told[which]
        withhold = self.chance.random() if not vain else 2.0
        for _ in range(self.chance.randrange(1, 7)):
            applied = self.chance.random() >= withhold * 0.5
            job.train(applied)
            if applied:
                told.updated()
            if self.chance.random() < 0.45 and not self._saves(job, which):
                return
            survivors = told.survivors()
            if self.chance.random() < 0.08 and survivors and not vain:
                back = self.chance.choice(survivors)
                job.rewinds(back.name)
                told.goes_on(back)
        if vain:
            job.halts()
            told.in_vain(began)

    def _saves(self, job: Job, which: int) -> bool:
        told, root = self.told[which], self.roots[which]
        name, self.names = f"n{self.names:03d}", self.names + 1
        streak = job.trajectory.state_dict()
        folder = root / f"iter_{job.step:07d}"
        try:
            with dies_after(self.chance.randrange(9) if self.chance.random() < 0.2 else None):
                job.saves(name)
        except Killed:
            self.deaths += 1
            self.after_death[which] = True
            is_new = (folder / "name").is_file() and (folder / "name").read_text() == name
            if is_new and (folder / MARKER).exists():
                told.saved(name, job.step, **streak, keep=0)
                told.tracker = self._tracker(root)
                told.noted = self._noted(root)
                for made in list(told.plain.values()):
                    if not (root / f"iter_{made.step:07d}").exists():
                        told.removed(made)
            return False
        told.saved(name, job.step, **streak, keep=self.keep)
        return True

    def _tracker(self, root: Path) -> int | None:
        path = root / TRACKER
        return int(path.read_text()) if path.exists() else None

    def _noted(self, root: Path) -> int | None:
        """What a tracker that lags would say: one that says the same is not known from it."""
        path = root / HISTORY
        noted: int | None = json.loads(path.read_text())["tracker"] if path.exists() else None
        return noted

    def _branches(self, root: Path) -> int:
        path = root / HISTORY
        return len(json.loads(path.read_text())["branches"]) if path.exists() else 0

    def _bytes(self) -> dict[str, bytes]:
        files = (path for root in self.roots for path in root.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}
