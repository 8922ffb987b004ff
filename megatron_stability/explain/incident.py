"""An incident on one page: what was seen and done, where, with which data, what came before, and what to run next.

One document, from the ledger and what lies beside it; terminal, HTML and JSON show the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_stability.decide.urgency import Urgency
from megatron_stability.explain import batch
from megatron_stability.explain.batch import Batch, Decoder
from megatron_stability.explain.scene import Scene
from megatron_stability.explain.triage import SHOWN, Triage, triage
from megatron_stability.ledger import bundle
from megatron_stability.ledger.entries import FILE, EpisodeEntry, LedgerView, SaveEntry, StepEntry, UndoEntry
from megatron_stability.ledger.incidents import Incident, incidents
from megatron_stability.records import Change, encode_float
from megatron_stability.sites import Site

AROUND = 5  # steps shown on either side
DOCUMENTS = 12  # shown on a page; JSON has all
PLACES = {"grad_norm/layer_max/at": "largest gradient norm in decoder layer {value:.0f}"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: a heading, a table if it has one, and lines."""

    title: str
    lines: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """What is known of an incident.

    Attributes:
        run: the run's folder, as the reader named it.
        folder: of the ledger.
        incident: its episodes and decisions; None where the step that is asked for is in no incident.
        triage: of its step.
        batch: of its step.
        bundle: its evidence; None where no bundle was written or it was pruned.
    """

    run: str
    folder: Path
    incident: Incident | None
    triage: Triage
    batch: Batch
    bundle: Path | None

    @property
    def scene(self) -> Scene:
        """The step and what stood around it."""
        return self.triage.scene

    @property
    def step(self) -> StepEntry:
        """Where it began, or the step that was asked for."""
        return self.scene.step

    @property
    def title(self) -> str:
        """One line."""
        step, incident = self.step, self.incident
        if incident is None:
            return f"Step {step.step} of {self.run}: in no incident"
        steps = f"steps {step.step} to {incident.last_step}" if incident.last_step > step.step else f"step {step.step}"
        page = Urgency.PAGE if incident.page is not None else Urgency.DIGEST
        return f"Incident {incident.number} of {self.run}: {steps}, {incident.tier}, {page}"

    @property
    def episodes(self) -> list[EpisodeEntry]:
        """Of the incident, the gravest first; else those that were open at the step."""
        open_then = (each for each in self.scene.episodes if each.first_step <= self.step.step)
        found = open_then if self.incident is None else self.incident.episodes.values()
        return sorted(found, key=lambda each: (-each.tier.severity, each.first_step, each.detector))

    @property
    def decisions(self) -> list[StepEntry]:
        """What was done, step by step."""
        if self.incident is not None:
            return self.incident.decisions
        return [self.step] if self.step.eventful else []

    @property
    def where(self) -> list[str]:
        """Ranks, layers and sites that the record names."""
        step, found = self.step, []
        if step.culprit_ranks:
            found.append(f"not finite first on rank {_listed(step.culprit_ranks)} of {self.scene.ranks or '?'}")
        if step.disagreeing_ranks:
            found.append(f"rank {_listed(step.disagreeing_ranks)} differs from the others")
        if step.nonfinite_losses:
            found.append(f"the losses of {step.nonfinite_losses} micro-batches are not finite")
        if step.nonfinite_grads:
            found.append(f"the gradients of {step.nonfinite_grads} ranks are not finite, after the reduction")
        for name, value in step.signals.items():
            if name in PLACES:
                found.append(PLACES[name].format(value=value))
            elif name.startswith("fp8/") and name.endswith("/at"):
                found.append(f"{name.removesuffix('/at')} began at {Site.at(value)}")
        return found

    @property
    def before(self) -> list[str]:
        """What had changed, the latest first."""
        scene, step = self.scene, self.step
        found = [str(change) for change in scene.changes]
        if scene.first_step > 1:
            found.insert(0, f"the process had begun, or gone back, {step.step - scene.first_step} steps before")
        known = [*scene.before, step]
        for earlier, later in reversed(list(pairwise(known))):
            if later.samples != earlier.samples:
                found.append(f"batch size {earlier.samples} -> {later.samples} at step {later.step}")
        found.append(_rate(known))
        saved = _saves_before(scene)
        found.append(f"last checkpoint: step {saved[-1]}" if saved else "no checkpoint before it")
        return found

    def commands(self) -> list[str]:
        """What to run next."""
        more = [f"megatron-stability triage {self.run} {self.step.step}"]
        if self.batch.reads and not any(read.text for read in self.batch.reads):
            more.append(f"megatron-stability incident {self.run} {self.step.step} --text")
        return [*self.triage.commands(self.run), *more]

    def sections(self) -> list[Section]:
        """The page, part by part."""
        step = self.step
        return [
            Section(
                title="Seen",
                lines=tuple(_said(each) for each in self.episodes),
                head=("step", "detector", "tier", "value", "threshold", "what it says"),
                rows=tuple(
                    (str(v.step), v.detector, v.tier, f"{v.value:.4g}", f"{v.threshold:.4g}", v.reason)
                    for v in sorted(step.verdicts, key=lambda v: -v.tier.severity)
                ),
            ),
            Section(title="Done", lines=tuple(_done(self.decisions)) or ("nothing was withheld, scaled or undone",)),
            Section(title="Where", lines=tuple(self.where) or ("no rank, layer or tensor stands out in the record",)),
            self._data(),
            Section(
                title="Around it",
                head=("step", "samples", "loss", "gradient norm", "learning rate", "done"),
                rows=tuple(_row(each) for each in (*self.scene.before[-AROUND:], step, *self.scene.after[:AROUND])),
            ),
            Section(title="Before it", lines=tuple(self.before)),
            self._cause(),
            Section(title="Evidence", lines=(f"ledger: {self.folder / FILE}", f"bundle: {self.bundle or 'none'}")),
            Section(title="Next", lines=tuple(self.commands())),
        ]

    def _data(self) -> Section:
        found, reads = self.batch, self.batch.reads
        lines = [f"samples {found.first} to {found.last - 1}; documents: {len(reads) or 'unknown'}"]
        if len(reads) > DOCUMENTS:
            lines.append(f"the {DOCUMENTS} with most tokens; --json has all")
        if found.told:
            lines.append(found.told)
        texts = any(read.text for read in reads)
        return Section(
            title="Data",
            lines=tuple(lines),
            head=("data set", "document", "tokens", "in samples", "file", *(["text"] if texts else [])),
            rows=tuple(
                (
                    read.prefix,
                    str(read.document),
                    f"{read.tokens:,} of {read.first:,}–{read.last - 1:,}",
                    _listed(read.samples),
                    read.place,
                    *([read.text] if texts else []),
                )
                for read in reads[:DOCUMENTS]
            ),
        )

    def _cause(self) -> Section:
        found = self.triage
        missing = [f"not measured: {each.fact}; it takes {each.flag}" for each in found.enable]
        return Section(
            title="Cause",
            lines=(f"confidence: {found.confidence}", *(missing if found.confidence != "high" else [])),
            head=("", "class", "cause", "for it"),
            rows=tuple(
                (f"{h.probability:.0%}", h.cause.kind.value, h.cause.says, "; ".join(e.says for e in h.speaks_for[:3]))
                for h in found.hypotheses[:SHOWN]
                if h.probability >= 0.01
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """The same, as JSON primitives."""
        step = self.step
        return {
            "run": self.run,
            "title": self.title,
            "incident": None if self.incident is None else self.incident.number,
            "step": step.step,
            "generation": step.generation,
            "seen": [_judged(each) for each in (*step.verdicts, *self.episodes)],
            "done": [
                {"step": each.step, "action": each.action.value, "advised": each.advised.value, "reason": each.reason}
                | {"parameters": {name: encode_float(value) for name, value in each.parameters.items()}}
                for each in self.decisions
            ],
            "where": self.where,
            "batch": self.batch.to_json(),
            "before": self.before,
            "triage": self.triage.to_json(),
            "ledger": str(self.folder / FILE),
            "bundle": None if self.bundle is None else str(self.bundle),
            "next": self.commands(),
        }


def page(view: LedgerView, folder: Path, run: str, number: int | None, decoder: Decoder | None = None) -> Page:
    """The page of an incident.

    Args:
        view: the run's ledger.
        folder: where it lies.
        run: as the reader named the run.
        number: a step; None: the last incident.
        decoder: for excerpts of training text; None: none.

    Raises:
        UsageError: there is no such step, or no incident.
    """
    known = incidents(view.entries)
    if number is None and known:
        last = known[-1]
        number = min([last.number, *(each.step for each in last.decisions)])
    scene = Scene.at(view, number)
    incident = _of(known, scene.step)
    step = scene.step
    return Page(
        run=run,
        folder=folder,
        incident=incident,
        triage=triage(scene),
        batch=batch.of_step(view, step.generation, step.first_sample, step.last_sample, decoder),
        bundle=_bundle(folder, step, incident),
    )


def _of(known: list[Incident], step: StepEntry) -> Incident | None:
    """The latest incident that the step is in."""
    for incident in reversed(known):
        first = min([incident.number, *(each.step for each in incident.decisions)])
        if first <= step.step <= incident.last_step:
            return incident
    return None


def _bundle(folder: Path, step: StepEntry, incident: Incident | None) -> Path | None:
    """The bundle of the step, else the first of its incident."""
    steps = [(step.step, step.generation)]
    steps += [(each.step, each.generation) for each in (incident.decisions if incident else ())]
    there = {path.name: path for path in bundle.bundles(folder)} if folder.is_dir() else {}
    return next((there[name] for s, g in steps if (name := f"incident-{s}-g{g}") in there), None)


def _done(decisions: list[StepEntry]) -> list[str]:
    return [_decided(each) for each in decisions]


def _decided(step: StepEntry) -> str:
    would = f" (would {step.advised.upper()})" if step.action is not step.advised else ""
    parameters = ", ".join(f"{name} {value:g}" for name, value in step.parameters.items())
    return f"step {step.step} {step.action.upper()}{would}: {step.reason}" + (f" ({parameters})" if parameters else "")


def _said(entry: EpisodeEntry) -> str:
    """An episode, as far as it went."""
    still = ", open" if entry.change is not Change.CLOSED else ""
    steps = f"steps {entry.first_step} to {entry.last_step}, {entry.verdicts} verdict{'s' * (entry.verdicts > 1)}"
    worst = f"worst {entry.value:.4g} against {entry.threshold:.4g}"
    return f"{entry.detector} ({entry.tier}{still}): {steps}, {worst}: {entry.reason}"


def _judged(each: Any) -> dict[str, Any]:
    values = {"value": encode_float(each.value), "threshold": encode_float(each.threshold)}
    steps = [each.first_step, each.last_step] if isinstance(each, EpisodeEntry) else [each.step, each.step]
    return {"detector": each.detector, "tier": each.tier.value, "steps": steps, "reason": each.reason, **values}


def _row(step: StepEntry) -> tuple[str, ...]:
    done = step.action.value if step.action is step.advised else f"{step.action} (would {step.advised})"
    figures = f"{step.loss:.4f}", f"{step.grad_norm:.4g}", f"{step.learning_rate:.4g}"
    return str(step.step), f"{step.first_sample}–{step.last_sample - 1}", *figures, done


def _rate(known: list[StepEntry]) -> str:
    """Where the learning rate stood on its schedule, as far as the steps show."""
    rates = [step.learning_rate for step in known[-21:] if step.computed]
    now, past = (rates or [0.0])[-1], rates[:-1]
    if not past:
        return f"learning rate {now:.4g}"
    way = "rising" if now > past[0] * (1 + 1e-9) else "falling" if now < past[0] * (1 - 1e-9) else "level"
    return f"learning rate {now:.4g}, {way} over the {len(past)} steps before"


def _saves_before(scene: Scene) -> list[int]:
    """Saves on the trajectory that led to the step."""
    live: list[int] = []
    for entry in scene.view.entries:
        if entry is scene.step:
            break
        if isinstance(entry, UndoEntry):
            live = [step for step in live if step <= entry.from_step]
        elif isinstance(entry, SaveEntry):
            live.append(entry.step)
    return live


def _listed(items: tuple[int, ...], most: int = 6) -> str:
    return ", ".join(map(str, items[:most])) + (", …" if len(items) > most else "")
