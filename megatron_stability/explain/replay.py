"""`megatron-stability replay`: an incident again from the last good checkpoint, in branches that differ by one thing.

Every branch is the run's own command in a process of its own, with flags appended: it loads a copy (hard links) of the
checkpoint, saves nothing, writes its own ledger, and ends some steps after the incident. The run's folder is only read.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_stability import files
from megatron_stability.checkpoints import drill, generations
from megatron_stability.checkpoints.generations import Generation
from megatron_stability.errors import UsageError
from megatron_stability.explain import branches
from megatron_stability.explain.branches import Branch
from megatron_stability.explain.scene import Scene
from megatron_stability.ledger.entries import LedgerView, StepEntry, read

#: Flags of the run that would write into its folders, or load from them.
WRITES: Final = (
    *("--save", "--load", "--ckpt-step", "--save-interval", "--exit-interval", "--tensorboard-dir", "--wandb-project"),
    *("--wandb-exp-name", "--wandb-save-dir", "--stability-record-dir", "--exit-duration-in-mins", "--async-save"),
)
ALLOW: Final = "--stability-checkpoint-allow-changes"
LOG, FOLDER, RESULT = "log.txt", "stability", "replay.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a replay would do.

    Attributes:
        scene: of the incident.
        good: the checkpoint it starts from.
        until: the step after which each branch ends.
        command: the run's, as the words of a process, without what would write into the run's folders.
        settings: of the process that met the incident, from the ledger.
        chosen: branches by name.
        left_out: why others that were asked for can't be run.
    """

    scene: Scene
    good: Generation
    until: int
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    chosen: Mapping[str, Branch]
    left_out: Mapping[str, str]

    @property
    def steps(self) -> int:
        """Of one branch."""
        return self.until - self.good.step

    @property
    def samples(self) -> tuple[int, int]:
        """Of the incident's step."""
        return self.scene.step.first_sample, self.scene.step.last_sample

    @property
    def rank_seconds(self) -> float | None:
        """Of all branches at the run's own step time, without start-up; None where the ledger has no step time."""
        level = self.scene.level(lambda step: step.signals.get("step_seconds"))
        return None if level is None else level.middle * self.steps * len(self.chosen) * max(self.scene.ranks, 1)

    def argv(self, branch: Branch, folder: Path) -> list[str]:
        """The words of one branch's process.

        Args:
            branch: one of `chosen`.
            folder: its own, with the checkpoint's copy in it.
        """
        own = ["--load", str(folder / "checkpoint"), "--exit-interval", str(self.until)]
        own += ["--stability-record-dir", str(folder / FOLDER)]
        kept = branches.without(self.command, branch.drops)
        allowed = [*branches.values(kept, ALLOW), *branch.changes]
        own += [ALLOW, ",".join(allowed)] * bool(allowed)
        return [*branches.without(kept, (ALLOW,)), *own, *branches.flags(branch, self.settings, self.samples)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one branch showed.

    Attributes:
        name: of the branch.
        failure: why it gave no answer; empty: it did.
        present: the incident came again: the step was not applied as usual, was flagged, or its loss departed.
        equal: every step up to the incident is equal to the run's, to the bit.
        departs_at: the first step that differs from the run's; None: none does.
        loss: of the incident's step, nats; NaN where it was passed over.
        grad_norm: likewise.
        last_loss: of the branch's last step.
        meaning: what this says, as a sentence.
    """

    name: str
    failure: str = ""
    present: bool = False
    equal: bool = False
    departs_at: int | None = None
    loss: float = math.nan
    grad_norm: float = math.nan
    last_loss: float = math.nan
    meaning: str = ""


def plan(
    view: LedgerView,
    *,
    step: int | None,
    command: Sequence[str],
    names: Sequence[str],
    checkpoints: Path | None,
    after: int,
) -> Plan:
    """Where a replay would start, and what it would run.

    Args:
        view: the run's ledger.
        step: the incident's; None: the last one.
        command: of the run, as it follows `megatron-stability` (pretrain, run), or of any launcher.
        names: branches.
        checkpoints: the folder of the run's saves; None: the --save or --load of the command.
        after: steps after the incident.

    Raises:
        UsageError: no such step, branch or folder, or no good checkpoint before it.
    """
    words = _words(command)
    scene = Scene.at(view, step)
    chosen = branches.known(names)
    settings = _settings(view, scene)
    left_out = {name: why for name, branch in chosen.items() if (why := branches.unfit(branch, settings))}
    return Plan(
        scene=scene,
        good=_good(checkpoints or _folder(command), scene.step.step),
        until=scene.step.step + after,
        command=tuple(branches.without(words, WRITES)),
        settings=settings,
        chosen={name: branch for name, branch in chosen.items() if name not in left_out},
        left_out=left_out,
    )


def _settings(view: LedgerView, scene: Scene) -> dict[str, Any]:
    runs = [run for run in view.runs if run.generation <= scene.step.generation]
    if not runs:
        return {}
    seed = runs[-1].data.get("seed", "")
    return {**({"seed": int(seed)} if seed.isdigit() else {}), **runs[-1].settings}


def _words(command: Sequence[str]) -> list[str]:
    if not command:
        raise UsageError("after `--` comes the run's command: pretrain FLAGS, run SCRIPT FLAGS, or your launcher's")
    words = list(command[1:] if command[0] == "megatron-stability" else command)
    if words[:1] == ["nemo"]:
        raise UsageError("nemo: a recipe's run can't be replayed yet; give its pretrain or launcher command")
    return [sys.executable, "-m", "megatron_stability", *words] if words[0] in ("pretrain", "run") else words


def _folder(command: Sequence[str]) -> Path:
    for flag in ("--save", "--load"):
        if named := branches.values(command, flag):
            return Path(named[-1])
    raise UsageError("the command has neither --save nor --load; give --checkpoints FOLDER")


def _good(folder: Path, step: int) -> Generation:
    """The newest complete checkpoint of before the step; a suspect one is evidence, not a start."""
    if not folder.is_dir():
        raise UsageError(f"--checkpoints {folder}: there is no such folder; name the one that holds iter_*")
    for each in generations.candidates(folder):
        if each.step < step and generations.generation(each.folder, full=True).state == "complete":
            return each
    raise UsageError(f"{folder}: holds no complete checkpoint of before step {step}; give another --checkpoints")


def run(planned: Plan, out: Path, *, timeout_s: float) -> Iterator[Outcome]:
    """Every branch, one after the other.

    Args:
        planned: what to do.
        out: a folder of the replay's own; a branch whose ledger is there already is not run again.
        timeout_s: for each branch.

    Yields:
        An outcome a branch, in the plan's order.
    """
    for name, branch in planned.chosen.items():
        folder = out / name
        failure = "" if _done(folder, planned.until) else _train(planned, branch, folder, timeout_s)
        yield _judged(name, branch, planned, folder, failure)


def _done(folder: Path, until: int) -> bool:
    try:
        return read(folder / FOLDER).steps[-1].step >= until
    except (UsageError, IndexError):
        return False


def _train(planned: Plan, branch: Branch, folder: Path, timeout_s: float) -> str:
    if folder.exists():
        files.remove(folder)
    folder.mkdir(parents=True)
    copy = folder / "checkpoint"
    drill.link_copy(planned.good.folder, copy / planned.good.folder.name)
    generations.write_tracker(copy, planned.good.step)
    argv = planned.argv(branch, folder)
    with files.open_log(folder / LOG) as log:
        log.write(f"{shlex.join(argv)}\n".encode())
        log.flush()
        began = time.monotonic()
        try:
            done = subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return f"no end after {time.monotonic() - began:.0f} s ({folder / LOG})"
        except OSError as error:
            return f"{argv[0]} can't be run ({error.strerror})"
    if done.returncode and not _done(folder, planned.scene.step.step):
        return f"exit code {done.returncode} before the step ({folder / LOG}): {_last_line(folder / LOG)}"
    return "" if _done(folder, planned.scene.step.step) else f"ended before the step ({folder / LOG})"


def _last_line(path: Path) -> str:
    return "".join(path.read_text(errors="replace").strip().splitlines()[-1:])[:300]


def _judged(name: str, branch: Branch, planned: Plan, folder: Path, failure: str) -> Outcome:
    if failure:
        return Outcome(name=name, failure=failure, meaning="no answer")
    steps = {step.step: step for step in read(folder / FOLDER).steps}
    at = steps[planned.scene.step.step]
    theirs = [step for step in planned.scene.before if step.step > planned.good.step]
    pairs = [(step, steps.get(step.step)) for step in (*theirs, planned.scene.step)]
    departs_at = next((step.step for step, other in pairs if other is None or not _same(step, other)), None)
    present = _present(at, planned.scene)
    outcome = Outcome(
        name=name,
        present=present,
        equal=departs_at is None,
        departs_at=departs_at,
        loss=at.loss,
        grad_norm=at.grad_norm,
        last_loss=max(steps.values(), key=lambda step: step.step).loss,
    )
    return dataclasses.replace(outcome, meaning=_meaning(branch, outcome))


def _present(step: StepEntry, scene: Scene) -> bool:
    """The same detectors spoke, or, where none had, the loss is as far off as it was."""
    told = {verdict.detector for verdict in scene.step.verdicts}
    if told:
        return any(verdict.detector in told for verdict in step.verdicts)
    if scene.loss is None:
        return _same(step, scene.step)
    return scene.loss.distance(step.loss) > 0.5 * scene.loss.distance(scene.step.loss)


def _same(one: StepEntry, other: StepEntry) -> bool:
    """Loss and gradient norm to the bit, NaN equal to NaN."""
    pairs = ((one.loss, other.loss), (one.grad_norm, other.grad_norm))
    return all(a == b or (a != a and b != b) for a, b in pairs)


def _meaning(branch: Branch, outcome: Outcome) -> str:
    if not branch.cleared:
        if outcome.equal:
            return "reproducible to the bit: hardware that computes at random is not its cause"
        where = f"it departs from the run at step {outcome.departs_at}"
        if outcome.present:
            return f"it came again, but {where}: statistical only"
        return f"not reproducible, {where}: a rank, storage or an undetermined kernel (systems)"
    said = branch.kept if outcome.present else branch.cleared
    return f"{said} (an experiment, not a remedy)" if branch.experiment else said
