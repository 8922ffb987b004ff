"""One random sequence of operators' actions with real starts: see `operator_sequences.py`.

A start's plan is drawn first: which steps are withheld (NaN gradients), when it saves, how it ends. A probe in the rank
writes down what happened, line by line, so that it is known after a SIGKILL too; then the model is told of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_stability.checkpoints import generations
from megatron_stability.errors import EXIT_HALTED, EXIT_UNUSABLE
from megatron_stability.records import Decision, StepRecord
from tests.dist.checkpoint.operators import HISTORY, MARKER, TRACKER, Expected, Made
from tests.dist.pool import Pool
from tests.e2e.incidents.test_exits import Event, Run, launched

KILLED = 128 + signal.SIGKILL
MANIFEST = "stability_manifest.json"
RULE = '[{"detector": "non_finite", "tier": "non_finite", "action": "skip"}]'
FLAGS = (
    *("--train-iters", "1000", "--lr-decay-iters", "60", "--stability-mode", "act", "--stability-decide-rules", RULE),
    *("--num-layers", "1", "--hidden-size", "32"),
)
ENDS = ("exit", "exit", "signal", "signal", "kill in a step", "kill in a save", "kill in the record", "kill before it")


@dataclass(frozen=True)
class Plan:
    """A start: `steps` after the one it loads, the `withheld` of them, and how it ends in the last of them.

    `renames` are those after which a kill comes, of the first record or of the last save.
    """

    end: str
    first: int
    steps: int
    withheld: tuple[int, ...]
    every: int
    renames: int
    settles: bool  # a kill in a step comes when the thread that completes saves is done

    @property
    def last(self) -> int:
        return self.first + self.steps - 1

    def flags(self) -> tuple[str, ...]:
        found = ("--save-interval", str(self.every))
        found += tuple(word for step in self.withheld for word in ("--drill-fault", f"nan:step={step},rank=0"))
        if self.end == "signal":
            found += ("--num-workers", "2", "--exit-signal-handler")
        if self.end == "exit":
            found += ("--exit-interval", str(self.last))
        budget = 2 if self.end == "halt" else 50
        return (*found, "--stability-decide-max-consecutive-skips", str(budget))


@dataclass
class Watch(Event):
    """Writes down what happens in a rank, and ends it as planned."""

    plan: Plan = field(kw_only=True)
    runtime: Any = None

    def begin(self, runtime: Any) -> None:
        self.runtime = runtime
        checkpoints, plan = runtime.checkpoints, self.plan
        record, begins = checkpoints.trajectory.record_start, checkpoints.save_begins
        met: list[None] = []

        def recorded() -> None:
            if met:
                return record()
            met.append(None)
            self._say("recording", digest(runtime.model))
            if plan.end == "kill before it":
                os.kill(os.getpid(), signal.SIGKILL)
            undo = dies_after(plan.renames) if plan.end == "kill in the record" else lambda: None
            record()
            undo()
            self._say("recorded")
            return None

        def begun(save_dir: str, step: int) -> None:
            self._say("save", step, digest(runtime.model))
            if plan.end == "kill in a save" and step + plan.every > plan.last:
                dies_after(plan.renames)
            begins(save_dir, step)

        checkpoints.trajectory.record_start, checkpoints.save_begins = recorded, begun

    def write(self, record: StepRecord, decision: Decision) -> None:
        self._say("step", record.step, str(decision.action))
        if record.step != self.plan.last:
            return
        if self.plan.end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.plan.end == "kill in a step":
            if self.plan.settles:
                self.runtime.checkpoints.completion.close()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.plan.end.startswith("kill"):  # by a rename that did not come
            os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, *what: Any) -> None:
        with (self.folder / "events").open("a") as lines:
            lines.write(json.dumps(what) + "\n")


def digest(model: Any) -> str:
    """Of every parameter's bytes."""
    known = hashlib.sha256()
    for chunk in model:
        for parameter in chunk.parameters():
            known.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return known.hexdigest()[:16]


def dies_after(renames: int) -> Callable[[], None]:
    """SIGKILL to this process before the rename after so many; the answer undoes it."""
    left, real = [renames], (os.rename, os.replace)

    def counted(which: Any) -> Any:
        def rename(*args: Any, **kwargs: Any) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            which(*args, **kwargs)

        return rename

    os.rename, os.replace = counted(real[0]), counted(real[1])

    def undo() -> None:
        os.rename, os.replace = real

    return undo


@dataclass
class Seen:
    """What a rank wrote down."""

    started: str | None = None  # digest of the weights at the first step
    recorded: bool = False
    steps: list[tuple[int, str]] = field(default_factory=list)
    saves: dict[int, str] = field(default_factory=dict)
    order: list[tuple[str, int, str]] = field(default_factory=list)  # steps and saves

    @classmethod
    def read(cls, path: Path) -> Seen:
        seen = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            what, *rest = json.loads(line)
            if what == "recording":
                seen.started = rest[0]
            elif what == "recorded":
                seen.recorded = True
            else:
                seen.order.append((what, rest[0], rest[1]))
                if what == "step":
                    seen.steps.append((rest[0], rest[1]))
                else:
                    seen.saves[rest[0]] = rest[1]
        return seen


class Operators:
    """Random actions on two folders."""

    def __init__(self, pool: Pool, root: Path, seed: int) -> None:
        self.pool, self.chance, self.names = pool, random.Random(seed), 0
        self.roots = [root / "a", root / "b"]
        self.events = root / "events-of-a-start"
        self.told = [Expected(), Expected()]
        self.keep = self.chance.choice([0, 0, 1, 2])
        self.done: list[dict[str, Any]] = []
        self.after_death = [False, False]  # a save or a start of the folder's last job was cut short
        self.vain = [False, False]  # the folder's last start was
        self.evidence: list[set[int]] = [set(), set()]  # steps of what halts have saved
        self.branches: list[list[Any]] = [[], []]  # of each folder's history, as it was last seen
        self.ids: dict[Made, str] = {}
        self.weights: dict[Made, str] = {}
        for folder in self.roots:
            folder.mkdir(parents=True)

    def run(self, actions: int) -> None:
        kinds = [self.requeue] * 5 + [self.ckpt_step] * 3 + [self.edit] * 2 + [self.fresh] * 2 + [self.elsewhere]
        kinds += [self.prune, self.damage, self.in_vain, self.in_vain]
        while len(self.done) < actions:
            which = 0 if self.chance.random() < 0.8 else 1
            empty = not self.told[which].made
            action = self.fresh if empty else self.chance.choice(kinds)
            before = len(self.done)
            action(which)
            if len(self.done) > before:
                self.done[-1] = {"action": action.__name__, "folder": self.roots[which].name} | self.done[-1]
                self._compare()

    def _compare(self) -> None:
        for root, told in zip(self.roots, self.told, strict=True):
            found = [_identity(each.folder) for each in generations.candidates(root)]
            wanted = [(made.step, self.ids[made]) for made in told.survivors()]
            assert [identity for _, identity in wanted] == found, (root.name, wanted, found)

    # --- actions ----------------------------------------------------------------------------------------------------

    def requeue(self, which: int) -> None:
        self._start(which, load=which)

    def ckpt_step(self, which: int) -> None:
        steps = {made.step for made in self.told[which].made} - self.evidence[which] | {99}
        self._start(which, load=which, ckpt_step=self.chance.choice(sorted(steps)))

    def fresh(self, which: int) -> None:
        self._start(which, load=None, anew=self.chance.random() < 0.4)

    def elsewhere(self, which: int) -> None:
        if self.told[1 - which].made:
            self._start(which, load=1 - which)

    def in_vain(self, which: int) -> None:
        if not self.vain[which]:  # of a proven checkpoint's starts in vain only two may halt
            self._start(which, load=which, vain=True)

    def edit(self, which: int) -> None:
        told = self.told[which]
        if self.after_death[which]:  # a tracker that lags and an edit back can't be told apart
            return
        steps = {made.step for made in told.made} - self.evidence[which] | {98}
        step = self.chance.choice(sorted(steps))
        (self.roots[which] / TRACKER).write_text(f"{step}\n")
        told.tracker, told.edited = step, step != told.noted
        self.done.append({"step": step})

    def prune(self, which: int) -> None:
        told = self.told[which]
        if told.plain and not self.after_death[which]:
            gone = self.chance.choice(sorted(told.plain.values(), key=lambda made: made.name))
            shutil.rmtree(self.roots[which] / f"iter_{gone.step:07d}")
            told.removed(gone)
            self.done.append({"step": gone.step})

    def damage(self, which: int) -> None:
        told = self.told[which]
        if told.survivors() and not self.after_death[which]:
            hurt = told.survivors()[0]
            shard = next((self.roots[which] / f"iter_{hurt.step:07d}").glob("*.distcp"))
            shard.write_bytes(shard.read_bytes() + b"and more")
            hurt.damaged = True
            self.done.append({"step": hurt.step})

    # --- a start ----------------------------------------------------------------------------------------------------

    def _start(
        self, which: int, load: int | None, *, ckpt_step: int | None = None, anew: bool = False, vain: bool = False
    ) -> None:
        told = self.told[which]
        expected = None if load is None else self.told[load].next(ckpt_step)
        refused = expected is None if load is not None else bool(told.survivors()) and not anew
        plan = self._plan(expected, vain)
        where = ("--save", str(self.roots[which]), "--stability-record-dir", str(self.roots[which] / "stability"))
        flags = (*FLAGS, *where, *plan.flags(), "--stability-checkpoint-keep", str(self.keep))
        flags += () if load is None else ("--load", str(self.roots[load]))
        flags += () if ckpt_step is None else ("--ckpt-step", str(ckpt_step))
        flags += ("--stability-checkpoint-new-lineage", "true") if anew else ()
        before = self._bytes()
        shutil.rmtree(self.events, ignore_errors=True)
        self.events.mkdir()
        run = Run(flags, Watch("", 0, self.events, plan=plan))
        ((code, left),) = self.pool.run(launched, run, 1, world=1, timeout=120)
        seen = Seen.read(self.events / "events")
        said = {"from": "nothing" if load is None else self.roots[load].name, "ckpt_step": ckpt_step, "anew": anew}
        self.done.append({key: value for key, value in said.items() if value not in (None, False)} | {"code": code})
        assert left == [], f"{len(left)} processes were left"
        if refused:
            assert (code, seen.started) == (EXIT_UNUSABLE, None), f"not refused: code {code}"
            assert self._bytes() == before, "a start that was refused changed something"
            self.done[-1] |= {"refused": True}
            return
        self._judge(which, expected if load == which else None, expected, plan, code, seen)

    def _plan(self, loads: Made | None, vain: bool) -> Plan:
        first, every = (loads.step if loads is not None else 0) + 1, self.chance.choice([2, 3])
        renames = self.chance.randrange(6)  # a save has six or more, the record of a start two where it branches
        if vain:
            return Plan("halt", first, 3, (first, first + 1, first + 2), every, renames, True)
        end, steps = self.chance.choice(ENDS), self.chance.randrange(1, 7)
        if end == "kill in a save":
            steps = max(steps, every + 1)  # so that there is one, and not with the last step
        if end == "kill in the record":
            renames %= 2
        rest = range(first + 1, first + steps)  # the first is applied: a start that withholds it is counted
        withheld = tuple(step for step in rest if self.chance.random() < 0.3)
        doubt = bool(withheld) or loads is not None
        return Plan(end, first, steps, withheld, every, renames, doubt or self.chance.random() < 0.5)

    def _judge(self, which: int, began: Made | None, loads: Made | None, plan: Plan, code: int, seen: Seen) -> None:
        codes = {"halt": (EXIT_HALTED,), "exit": (0,), "signal": (0,)}.get(plan.end, (KILLED,))
        self.done[-1] |= {"loaded": None if loads is None else loads.step, "ended": _ended(plan, seen)}
        self.done[-1] |= {"steps": [step for step, _ in seen.steps], "saved": sorted(seen.saves)}
        assert code in codes, f"code {code}"
        assert seen.started is not None, "the first step was not reached"
        if loads is not None:
            assert seen.started == self.weights[loads], "other weights than were saved were loaded"
        if seen.steps:
            assert seen.steps[0][0] == plan.first, f"step {seen.steps[0][0]} came first, and {plan.first} should"
        self.vain[which] = plan.end == "halt"
        if plan.end == "kill before it":
            return
        if not self._recorded(which, began, seen):
            return
        self._trained(which, began, loads, seen, died=code == KILLED)
        if plan.end == "halt":
            self.told[which].in_vain(began)

    def _recorded(self, which: int, began: Made | None, seen: Seen) -> bool:
        """Whether the start was recorded; where it died in that, what the files say."""
        told, root = self.told[which], self.roots[which]
        self.after_death[which] = not seen.recorded
        if seen.recorded:
            if began is not None or told.stands is not None:
                told.goes_on(began)
            self.branches[which] = _history(root).get("branches", [])
            return True
        branches = _history(root).get("branches", [])
        if branches != self.branches[which] or began is told.stands:
            told.goes_on(began)
        self.branches[which] = branches
        self._reads_the_tracker(which)
        told.edited = told.tracker is not None and told.tracker != told.noted
        return False

    def _trained(self, which: int, began: Made | None, loads: Made | None, seen: Seen, died: bool) -> None:
        told, root = self.told[which], self.roots[which]
        applied, withheld = (loads.applied, loads.withheld) if loads is not None else (0, 0)
        whole = self._whole_saves(which, seen, died)
        halted = any(action == "halt" for _, action in seen.steps)
        for kind, step, what in seen.order:
            if kind == "step" and what == "apply":
                applied, withheld = step, 0
                told.updated()
            elif kind == "step":
                withheld += 1
            elif halted and step not in whole:
                self.evidence[which].add(step)
            elif step in whole:
                last = died and step == whole[-1]
                told.saved(f"n{self.names:03d}", step, applied, withheld, keep=0 if last else self.keep)
                self.names += 1
                assert told.stands is not None
                self.weights[told.stands] = what
                if last:
                    self._reads_the_tracker(which)
        if died:
            self.after_death[which] = True
            for made in list(told.plain.values()):
                folder = root / f"iter_{made.step:07d}"
                if not folder.exists() and not folder.with_name(folder.name + ".aside").exists():
                    told.removed(made)
        for made in told.plain.values():
            if made not in self.ids:
                self.ids[made] = _identity(root / f"iter_{made.step:07d}")

    def _whole_saves(self, which: int, seen: Seen, died: bool) -> list[int]:
        """Steps of the saves that came to their end; they do in their order."""
        saves = [step for kind, step, _ in seen.order if kind == "save"]
        known = set(self.ids.values())

        def whole(step: int) -> bool:
            folder = self.roots[which] / f"iter_{step:07d}"
            suspect = (folder / "stability_suspect.json").exists()
            return (folder / MARKER).exists() and not suspect and _identity(folder) not in known

        last = next((at for at in range(len(saves), 0, -1) if whole(saves[at - 1])), 0)
        halted = any(action == "halt" for _, action in seen.steps)
        if not died:
            assert last >= len(saves) - halted, f"of the saves at {saves} only the first {last} were completed"
        return saves[:last]

    def _reads_the_tracker(self, which: int) -> None:
        told, path = self.told[which], self.roots[which] / TRACKER
        told.tracker = int(path.read_text()) if path.exists() else None
        told.noted = _history(self.roots[which]).get("tracker")

    def _bytes(self) -> dict[str, str]:
        found = {}
        for path in (path for root in self.roots for path in root.rglob("*") if path.is_file()):
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found


def _ended(plan: Plan, seen: Seen) -> str:
    """As planned, unless the rename at which the rank should have died did not come."""
    in_the_last = seen.order[-1:] and seen.order[-1][:2] == ("step", plan.last)
    return "kill in a step" if plan.end.startswith("kill") and in_the_last else plan.end


def _identity(folder: Path) -> str:
    """Of a save: its manifest, which no other one has."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]


def _history(root: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        known: dict[str, Any] = json.loads((root / HISTORY).read_text())
        return known
    return {}
