"""Ranked hypotheses about an incident: the facts of its scene, weighed by the table of rules.

The score of a cause is its prior and the weights of every measured fact, all natural log-odds; scores become
probabilities by a softmax over the causes. That takes facts to be independent, which they are not, so a probability
here ranks; the confidence beside it is held down where what would decide was not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_stability.explain import facts
from megatron_stability.explain.facts import FACTS, Fact
from megatron_stability.explain.rules import CAUSES, REPLAY, RULES, Cause, Class
from megatron_stability.explain.scene import Scene

HIGH, MEDIUM = 0.8, 0.5
DECIDES = 2.5  # a weight from here on can turn the order round
OPEN = 0.005  # the least probability of a hypothesis that one more fact could still bring up
SHOWN = 4  # hypotheses


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A measured fact, and its weight for one cause."""

    fact: str
    weight: float
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A fact that was not measured and could change the order, with what would measure it."""

    fact: str
    weight: float  # the largest it could have had for this cause
    flag: str


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One cause and what speaks for and against it, the weightiest first."""

    name: str
    cause: Cause
    probability: float
    speaks_for: tuple[Evidence, ...]
    against: tuple[Evidence, ...]
    missing: tuple[Missing, ...]


@dataclass(frozen=True, kw_only=True)
class Triage:
    """What is thought of one incident."""

    scene: Scene
    facts: dict[str, Fact | None]
    hypotheses: tuple[Hypothesis, ...]  # of every cause, the likeliest first

    @property
    def first(self) -> Hypothesis:
        """The likeliest."""
        return self.hypotheses[0]

    @cached_property
    def classes(self) -> dict[Class, float]:
        """The probability of each class, the likeliest first."""
        sums = {kind: sum(h.probability for h in self.hypotheses if h.cause.kind is kind) for kind in Class}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @cached_property
    def confidence(self) -> str:
        """high, medium, low; or undetermined where the first hypothesis has no fact of its own that decides."""
        first, second = self.hypotheses[:2]
        if first.cause.kind is Class.NONE:
            return "high" if first.probability >= HIGH else "low"
        if not any(each.weight >= DECIDES for each in first.speaks_for):
            return "undetermined"
        open_questions = [each for each in second.missing if each.weight >= DECIDES]
        if first.probability >= HIGH and not (open_questions and second.probability > 0.05):
            return "high"
        return "medium" if first.probability >= MEDIUM else "low"

    @property
    def enable(self) -> tuple[Missing, ...]:
        """What could have decided between the hypotheses and was not measured, the most telling first."""
        found: dict[str, tuple[float, Missing]] = {}
        for hypothesis in self.hypotheses:
            for each in hypothesis.missing:
                worth = each.weight * hypothesis.probability
                if (
                    each.weight >= DECIDES
                    and hypothesis.probability >= OPEN
                    and worth > found.get(each.fact, (0.0,))[0]
                ):
                    found[each.fact] = worth, each
        return tuple(each for _, each in sorted(found.values(), key=lambda pair: -pair[0]))

    def commands(self, run: str) -> list[str]:
        """The next steps of the likeliest hypothesis, as lines to run; where nothing decides, the replay that would.

        Args:
            run: the run's folder, as the reader named it.
        """
        lines = (REPLAY,) if self.confidence == "undetermined" else self.first.cause.next
        return [filled(line, self.scene, run) for line in lines]

    def to_json(self) -> dict[str, Any]:
        """Everything above, as JSON primitives."""
        return {
            "step": self.scene.step.step,
            "generation": self.scene.step.generation,
            "confidence": self.confidence,
            "classes": {kind.value: round(p, 4) for kind, p in self.classes.items()},
            "hypotheses": [_hypothesis_json(each) for each in self.hypotheses if each.probability >= OPEN],
            "facts": {
                name: None if fact is None else {"holds": fact.holds, "says": fact.says}
                for name, fact in self.facts.items()
            },
            "enable": [{"fact": each.fact, "flag": each.flag} for each in self.enable],
        }


def triage(scene: Scene) -> Triage:
    """Weigh an incident's facts.

    Args:
        scene: of its step.

    Returns:
        Every cause, the likeliest first.
    """
    found = facts.gather(scene)
    scores = {name: _score(name, cause, found) for name, cause in CAUSES.items()}
    top = max(scores.values())
    total = sum(math.exp(score - top) for score in scores.values())
    ranked = sorted(scores, key=lambda name: -scores[name])
    return Triage(
        scene=scene,
        facts=found,
        hypotheses=tuple(_hypothesis(name, math.exp(scores[name] - top) / total, found) for name in ranked),
    )


def filled(line: str, scene: Scene, run: str) -> str:
    """A command of the table with the incident's own numbers in it."""
    step = scene.step
    ranks = ", ".join(map(str, step.culprit_ranks or step.disagreeing_ranks)) or "?"
    samples = f"[{step.first_sample}, {step.last_sample}]"
    named = {"{run}": run, "{step}": str(step.step), "{samples}": samples, "{ranks}": ranks}
    for name, value in named.items():
        line = line.replace(name, value)
    return line


def _score(name: str, cause: Cause, found: dict[str, Fact | None]) -> float:
    return cause.prior + sum(each.weight for each in _weighed(name, found))


def _weighed(name: str, found: dict[str, Fact | None]) -> list[Evidence]:
    weighed = []
    for rule in RULES:
        fact = found[rule.fact]
        if fact is not None:
            weight = (rule.holds if fact.holds else rule.fails).get(name, 0.0)
            if weight:
                weighed.append(Evidence(fact=rule.fact, weight=weight, says=fact.says))
    return sorted(weighed, key=lambda each: -abs(each.weight))


def _hypothesis(name: str, probability: float, found: dict[str, Fact | None]) -> Hypothesis:
    weighed = _weighed(name, found)
    missing = [
        Missing(fact=rule.fact, weight=max(abs(rule.holds.get(name, 0.0)), abs(rule.fails.get(name, 0.0))), flag=flag)
        for rule in RULES
        if found[rule.fact] is None and (flag := FACTS[rule.fact].flag)
    ]
    return Hypothesis(
        name=name,
        cause=CAUSES[name],
        probability=probability,
        speaks_for=tuple(each for each in weighed if each.weight > 0),
        against=tuple(each for each in weighed if each.weight < 0),
        missing=tuple(sorted((each for each in missing if each.weight), key=lambda each: -each.weight)),
    )


def _hypothesis_json(each: Hypothesis) -> dict[str, Any]:
    return {
        "cause": each.name,
        "class": each.cause.kind.value,
        "says": each.cause.says,
        "probability": round(each.probability, 4),
        "for": [{"fact": e.fact, "weight": e.weight, "says": e.says} for e in each.speaks_for],
        "against": [{"fact": e.fact, "weight": e.weight, "says": e.says} for e in each.against],
        "missing": [{"fact": m.fact, "flag": m.flag} for m in each.missing],
    }
