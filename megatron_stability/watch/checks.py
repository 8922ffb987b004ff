"""The checks of a look: each a function from what is known of a run to findings."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from statistics import median

from megatron_stability.decide.episodes import LASTS, sentence
from megatron_stability.decide.urgency import Urgency, pages
from megatron_stability.echo import said
from megatron_stability.ledger.entries import EpisodeEntry, StepEntry
from megatron_stability.ledger.incidents import Event, events
from megatron_stability.records import Action, Decision, Episode
from megatron_stability.watch.findings import Finding, Kind
from megatron_stability.watch.limits import Limits
from megatron_stability.watch.run import WatchedRun

PAST = 600.0  # seconds before the watcher began, of which it still speaks
NAMED = 8  # nodes that a sentence names

Check = Callable[[WatchedRun, Limits], Iterator[Finding]]


def findings(run: WatchedRun, limits: Limits, began: float) -> list[Finding]:
    """Everything that is wrong with a run.

    Args:
        run: after a look.
        limits: from where on to speak.
        began: Unix time at which the watcher began; it does not tell what was over long before.

    Returns:
        The gravest first, else in the order of `CHECKS`.
    """
    found = [each for check in CHECKS for each in check(run, limits)] + list(_incidents(run, began))
    return sorted(found, key=lambda each: each.urgency is not Urgency.PAGE)


def _finding(run: WatchedRun, kind: Kind, text: str, *, what: str = "", page: bool = True, **more: bool) -> Finding:
    urgency = Urgency.PAGE if page else Urgency.DIGEST
    command = ""
    if kind is Kind.INCIDENT:
        command = f"megatron-stability incident {run.name} {what.removesuffix(' halt')}"
    elif kind is Kind.CHECKPOINT:
        command = f"megatron-stability checkpoint list {run.checkpoints}"
    return Finding(run=run.name, kind=kind, what=what, urgency=urgency, text=said(text), command=command, **more)


def _unreadable(run: WatchedRun, limits: Limits) -> Iterator[Finding]:
    if run.problem:
        yield _finding(run, Kind.LEDGER, run.problem, what="unreadable")
    if run.damaged:
        yield _finding(
            run, Kind.LEDGER, f"{run.damaged} lines of the ledger are damaged (wrong checksum)", what="damaged"
        )


def silent_nodes(run: WatchedRun, limits: Limits) -> list[str]:
    """Nodes whose heartbeat stands still."""
    living = [node for node, beat in run.beats.items() if beat.state == "training"]
    return [node for node in living if run.beat_age(node) > limits.node]


def _nodes(run: WatchedRun, limits: Limits) -> Iterator[Finding]:
    silent = silent_nodes(run, limits)
    if silent and not run.over:
        age = min(run.beat_age(node) for node in silent)
        text = f"{_named(run, silent)} without a heartbeat for {age:.0f} s at least: stopped, dead or cut off"
        yield _finding(run, Kind.NODE, text, what="nodes")


def _named(run: WatchedRun, nodes: list[str]) -> str:
    names = ", ".join(f"{node} (rank {run.beats[node].rank}, step {run.beats[node].step})" for node in nodes[:NAMED])
    more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    return f"{len(nodes)} of {len(run.beats)} nodes, {names}{more}"


def step_limit(run: WatchedRun, limits: Limits) -> float:
    """Seconds without a line of the ledger after which the run stalls."""
    begun = run.process is not None and any(each.generation == run.process.generation for each in run.steps)
    limit = limits.seconds_for_a_step(run.step_seconds) if begun else limits.start
    return max(limit, limits.save) if run.saving is not None and run.saving is run.recent[-1] else limit


def _stall(run: WatchedRun, limits: Limits) -> Iterator[Finding]:
    if run.over or run.line_age <= step_limit(run, limits):
        return
    seconds = run.step_seconds
    usual = f" (a step takes {median(seconds):.3g} s)" if seconds else ""
    text = f"no step has ended for {run.line_age:.0f} s{usual}; the last was {run.step}"
    silent = silent_nodes(run, limits)
    if silent:
        text += f"; {_named(run, silent)} without a heartbeat"
    elif run.beats:
        text += (
            "; every node's first rank lives: a collective hangs, the data don't come, or a file system does not answer"
        )
    yield _finding(run, Kind.STALL, text, what=f"after step {run.step}")


def _non_finite(run: WatchedRun, limits: Limits) -> Iterator[Finding]:
    last = list(run.steps)[-LASTS:]
    if len(last) == LASTS and all(_is_not_finite(each) for each in last):
        text = f"loss or gradient norm were not finite in each of the steps {last[0].step} to {last[-1].step}"
        yield _finding(run, Kind.NON_FINITE, text)


def _is_not_finite(step: StepEntry) -> bool:
    counted = step.nonfinite_losses or step.nonfinite_grads
    return step.computed and not step.overflow and bool(counted or not math.isfinite(step.loss + step.grad_norm))


def _episodes(run: WatchedRun, limits: Limits) -> Iterator[Finding]:
    for each in run.open.values():
        what = f"{each.detector} from step {each.first_step}"
        yield _finding(run, Kind.EPISODE, sentence(each.change, _as_episode(each)), what=what, page=False)


def _ended(run: WatchedRun, limits: Limits) -> Iterator[Finding]:
    end, generation = run.end, run.process.generation if run.process else 0
    failed = [beat for beat in run.beats.values() if beat.state == "failed"]
    if end is not None:
        text = f"the run left after step {end.step} with exit code {end.code}: {end.reason}"
        yield _finding(run, Kind.ENDED, text, what=f"generation {generation}", page=end.code != 0, event=True)
    elif failed:
        first = min(failed, key=lambda beat: beat.time)
        text = f"rank {first.rank} on {first.node} failed after step {first.step} ({first.error}); its log says more"
        yield _finding(run, Kind.ENDED, text, what=f"generation {generation}", event=True)


def _checkpoints(run: WatchedRun, limits: Limits) -> Iterator[Finding]:
    saving = run.saving
    if saving is not None and saving.time and time.time() - saving.time > limits.save:
        age = time.time() - saving.time
        text = f"the checkpoint of step {saving.step} was begun {age:.0f} s ago and is not complete"
        yield _finding(run, Kind.CHECKPOINT, text, what=f"step {saving.step}")
    every = run.save_steps
    if every and run.step - run.saves[-1].step > 2 * every:
        text = f"no checkpoint since step {run.saves[-1].step}, where one was begun every {every} steps; now {run.step}"
        yield _finding(run, Kind.CHECKPOINT, text, what=f"late after {run.saves[-1].step}")


def _storage(run: WatchedRun, limits: Limits) -> Iterator[Finding]:
    if run.space is not None and run.space.percent < limits.free_percent:
        text = f"{run.space.percent:.2g} % of the file system of {run.folder} are free ({run.space.free / 1e9:.3g} GB)"
        yield _finding(run, Kind.STORAGE, text)


#: In the order in which a person wants to read them.
CHECKS: tuple[Check, ...] = (
    _ended,
    _stall,
    _nodes,
    _non_finite,
    _checkpoints,
    _storage,
    _unreadable,
    _episodes,
)


def _incidents(run: WatchedRun, began: float) -> Iterator[Finding]:
    """Pages, once an incident and once for its halt; what was done at other steps is for the digest."""
    seen = list(events(run.recent))
    paged = list(pages(seen))
    for number, event in paged:
        if event.time >= began - PAST:
            halt = " halt" if getattr(event, "action", None) is Action.HALT else ""
            yield _finding(run, Kind.INCIDENT, f"incident {number}: {_told(event)}", what=f"{number}{halt}", event=True)
    numbers = {number for number, _ in paged}
    quiet: dict[int, list[StepEntry]] = {}
    for number, event in seen:
        if isinstance(event, StepEntry) and number not in numbers and event.time >= began - PAST:
            quiet.setdefault(number, []).append(event)
    for number, steps in quiet.items():
        text = f"incident {number}: {len(steps)} step{'s' * (len(steps) > 1)}, the last: {_told(steps[-1])}"
        yield _finding(run, Kind.INCIDENT, text, what=str(number), page=False, event=True)


def _told(event: Event) -> str:
    if isinstance(event, EpisodeEntry):
        return sentence(event.change, _as_episode(event))
    decision = Decision(step=event.step, action=event.action, advised=event.advised, reason=event.reason)
    return f"step {event.step} {decision.told}: {event.reason}"


def _as_episode(entry: EpisodeEntry) -> Episode:
    fields = {each.name: getattr(entry, each.name) for each in dataclasses.fields(Episode)}
    return Episode(**fields)
