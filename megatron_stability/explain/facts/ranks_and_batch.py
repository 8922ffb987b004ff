"""Facts of where: which ranks, which samples."""

from __future__ import annotations

from megatron_stability.explain.facts.fact import FAR_SIGMA, SOON, Fact, listed
from megatron_stability.explain.scene import Scene
from megatron_stability.ledger.entries import StepEntry
from megatron_stability.records import PASSED_OVER, Action


def ranks_differ(scene: Scene) -> Fact | None:
    found = scene.spoke("rank_agreement")
    if found or scene.step.disagreeing_ranks:
        return Fact(True, found[0] if found else f"ranks {listed(scene.step.disagreeing_ranks)} differ from the others")
    if not scene.signal("ranks/weights", (scene.step, *scene.after)):
        return None
    return Fact(False, "replicas hold the same weights, to the bit")


def compute_differs(scene: Scene) -> Fact | None:
    """What replicas make of a fixed micro-batch: the one check of a GPU itself."""
    checks = scene.signal("ranks/compute", (*scene.before[-SOON:], scene.step, *scene.after))
    if not checks:
        return None
    at, worst = max(checks, key=lambda check: check[1])
    says = f"{worst:g} ranks" if worst else "no rank"
    return Fact(worst > 0, f"{says} made something else of a fixed micro-batch (step {at})")


def few_culprits(scene: Scene) -> Fact | None:
    culprits, world = scene.step.culprit_ranks, scene.ranks
    if not culprits or world < 2:
        return None
    few = 2 * len(culprits) < world or len(culprits) == 1
    return Fact(few, f"it was non-finite on rank {listed(culprits)} of {world} before any reduction mixed it")


def slow(scene: Scene) -> Fact | None:
    level = scene.level(lambda step: step.signals.get("step_seconds"))
    now = scene.step.signals.get("step_seconds")
    if level is None or now is None:
        return None
    worst = max([now, *[value for _, value in scene.signal("step_seconds", scene.after[:SOON])]])
    says = f"a step took {worst:.3g} s, {worst / level.middle:.1f} times the usual {level.middle:.3g} s"
    return Fact(worst > 2 * level.middle, says)


def data_odd(scene: Scene) -> Fact | None:
    if found := scene.spoke("bad_batch"):
        return Fact(True, found[0])
    if not scene.step.computed and scene.step.reason.startswith("bad_batch "):
        return Fact(True, scene.step.reason)
    if "data/repeated" not in scene.step.signals:
        return None
    shift = _data_shift(scene)
    if shift is not None and shift.holds:
        return shift
    return Fact(False, "the batch's scores are like those before it: " + _scores(scene.step))


def _data_shift(scene: Scene) -> Fact | None:
    """The batch's scores against those of the steps before, by the run's own spread."""
    for name, sign, floor in (("data/repeated", 1, 0.02), ("data/entropy", -1, 0.05)):
        level = scene.level(lambda step, name=name: step.signals.get(name), floor=floor)  # type: ignore[misc]
        if level is None:
            return None
        distance = sign * level.distance(scene.step.signals[name])
        if abs(distance) > FAR_SIGMA:
            return Fact(True, f"{name} is {scene.step.signals[name]:.3g}, {level.middle:.3g} usually")
    return Fact(False, "")


def _scores(step: StepEntry) -> str:
    named = {name: step.signals.get(name) for name in ("data/repeated", "data/entropy")}
    return ", ".join(f"{name} {value:.3g}" for name, value in named.items() if value is not None)


def tokens_changed(scene: Scene) -> Fact | None:
    if not scene.step.samples or not scene.step.computed or scene.step.tokens != scene.step.tokens:
        return None
    level = scene.level(lambda step: step.tokens / step.samples if step.samples else None)
    if level is None or not level.middle:
        return None
    now = scene.step.tokens / scene.step.samples
    changed = abs(now / level.middle - 1) > 0.02 and abs(now - level.middle) > 6 * level.sigma
    return Fact(changed, f"{now:.1f} target tokens a sample, {level.middle:.1f} usually")


def recurs_with_samples(scene: Scene) -> Fact | None:
    """Met again, after a rewind or restart: with the same samples, or without them."""
    here = range(scene.step.first_sample, scene.step.last_sample)
    later = [s for s in scene.view.steps if s.generation > scene.step.generation and s.first_sample in here]
    read = [s for s in later if PASSED_OVER not in s.parameters and s.samples]
    if read:
        again = [s for s in read if s.advised not in (Action.APPLY,) or any(v.tier.severity >= 2 for v in s.verdicts)]
        where = f"samples {here.start} to {here.stop} were read again in generation {read[-1].generation}"
        return Fact(bool(again), f"{where}: {'flagged again' if again else 'nothing was flagged'}")
    return None
