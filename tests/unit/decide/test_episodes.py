"""Episodes: a detector that repeats itself is heard when it begins, when it grows worse, and when it is over."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes, sentence
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import Action, Change, Decision, Episode, StepRecord, Tier, Verdict
from tests.unit.steps import gauss, step

QUIET = 20


def episodes() -> Episodes:
    return Episodes(build(Detect()), QUIET)


def verdict(at: int, value: float = 2.0, tier: Tier = Tier.WATCH, detector: str = "loss_delta") -> Verdict:
    return Verdict(detector=detector, tier=tier, step=at, value=value, threshold=1.0, reason=f"value {value:g}")


def told(
    of: Episodes, at: int, *verdicts: Verdict, action: Action = Action.APPLY, **signals: float
) -> list[tuple[Change, Episode]]:
    decision = Decision(step=at, action=action, advised=action, reason="", verdicts=verdicts)
    return of.settle(step(at, signals=signals), decision)


def changes(found: Iterable[tuple[Change, Episode]]) -> list[str]:
    return [f"{change} {episode.detector}" for change, episode in found]


def test_a_repeated_verdict_is_one_episode_that_ends_after_quiet_steps() -> None:
    of = episodes()
    assert changes(told(of, 10, verdict(10))) == ["opened loss_delta"]
    assert [told(of, at, verdict(at)) for at in range(11, 40)] == [[]] * 29
    assert [told(of, at) for at in range(40, 39 + QUIET)] == [[]] * (QUIET - 1)
    ((change, over),) = told(of, 39 + QUIET)
    assert (change, over.first_step, over.last_step, over.verdicts) == (Change.CLOSED, 10, 39, 30)
    assert of.open == ()


def test_what_grows_worse_is_said_by_tier_and_by_distance() -> None:
    of = episodes()
    told(of, 1, verdict(1, 2.0))  # one threshold beyond
    assert told(of, 2, verdict(2, 4.9)) == []  # 3.9
    assert changes(told(of, 3, verdict(3, 5.1))) == ["worsened loss_delta"]  # 4.1
    assert changes(told(of, 4, verdict(4, 3.0, Tier.LARGE))) == ["worsened loss_delta"]
    assert told(of, 5, verdict(5, 40.0)) == []  # a milder verdict does not change the worst
    assert of.open[0].value == 3.0
    assert changes(told(of, 6, verdict(6, math.inf, Tier.LARGE))) == ["worsened loss_delta"]


def test_a_signal_that_is_seldom_measured_is_not_over_before_it_was_looked_at_twice() -> None:
    of, name = episodes(), "attention/max_logit"
    told(of, 100, verdict(100, detector="attention_logits"), **{name: 200.0})
    assert all(told(of, at) == [] for at in range(101, 300))
    assert told(of, 300, **{name: 10.0}) == []
    assert changes(told(of, 400, **{name: 10.0})) == ["closed attention_logits"]


def test_a_step_that_is_not_finite_is_no_look() -> None:
    of = episodes()
    told(of, 1, verdict(1))
    for at in range(2, 200):
        decision = Decision(step=at, action=Action.SKIP, advised=Action.SKIP, reason="")
        assert of.settle(step(at, loss=math.nan), decision) == []


def test_overlapping_episodes_are_one_incident() -> None:
    of = episodes()
    told(of, 10, verdict(10))
    ((_, second),) = told(of, 15, verdict(15, detector="loss_spike"))
    assert second.incident == 10
    for at in range(16, 80):
        told(of, at)
    ((_, later),) = told(of, 80, verdict(80))
    assert later.incident == 80


def test_a_rewind_or_halt_closes_all() -> None:
    for action in (Action.REWIND, Action.HALT):
        of = episodes()
        told(of, 1, verdict(1), verdict(1, detector="loss_spike"))
        assert changes(told(of, 2, verdict(2), action=action)) == ["closed loss_delta", "closed loss_spike"]


def test_state_goes_on_where_it_was() -> None:
    of, again = episodes(), episodes()
    told(of, 1, verdict(1, math.inf), verdict(1, 2.0, detector="loss_spike"))
    told(of, 2, verdict(2))
    again.load_state_dict(json.loads(json.dumps(of.state_dict(), allow_nan=False)))
    assert again.state_dict() == of.state_dict()
    assert again.open == of.open
    for at in range(3, 40):
        assert told(again, at) == told(of, at)


def run(losses: Iterable[float]) -> list[tuple[Change, Episode]]:
    """What a run with all detectors tells."""
    found: list[tuple[Change, Episode]] = []

    class Sink:
        def write(self, record: StepRecord, decision: Decision) -> None: ...

        def write_episode(self, change: Change, episode: Episode) -> None:
            found.append((change, episode))

    detectors = build(Detect())
    policy = TablePolicy(Decide(), "act")
    pipeline = Pipeline(lambda record: record, detectors, policy, (Sink(),), Episodes(detectors, 50))
    for number, loss in enumerate(losses, 1):
        pipeline.finish(*pipeline.decide(step(number, loss, 1.0 + gauss(number, 0.05, 1))))
    return found


def test_a_lasting_shift_opens_one_episode_a_detector() -> None:
    shift = [2.5 + gauss(n, 0.02) + (0.1 if n > 400 else 0.0) for n in range(1, 2400)]
    opened = [episode.detector for change, episode in run(shift) if change is Change.OPENED]
    assert "loss_delta" in opened
    assert len(opened) == len(set(opened))
    assert len(run(shift)) < 12


def test_sentences_carry_the_numbers() -> None:
    of = episodes()
    ((change, episode),) = told(of, 7, verdict(7, 3.5, Tier.LARGE))
    assert sentence(change, episode) == "loss_delta opened (large), incident 7: value 3.5"
    for at in range(8, 7 + QUIET):
        told(of, at)
    ((change, episode),) = told(of, 7 + QUIET)
    assert sentence(change, episode) == (
        "loss_delta closed (large), incident 7: steps 7 to 7, 1 verdict, worst 3.5 against 1: value 3.5"
    )


def test_a_verdict_in_between_starts_the_looks_anew() -> None:
    of, name = episodes(), "attention/max_logit"
    high = verdict(100, detector="attention_logits")
    told(of, 100, high, **{name: 200.0})
    told(of, 300, **{name: 10.0})
    told(of, 400, verdict(400, detector="attention_logits"), **{name: 200.0})
    assert told(of, 600, **{name: 10.0}) == []
    assert changes(told(of, 700, **{name: 10.0})) == ["closed attention_logits"]


def test_worse_is_measured_from_what_was_told_last() -> None:
    of = episodes()
    told(of, 1, verdict(1, 2.0))
    assert changes(told(of, 2, verdict(2, 5.1))) == ["worsened loss_delta"]  # 4.1 thresholds beyond
    assert told(of, 3, verdict(3, 8.0)) == []
    assert changes(told(of, 4, verdict(4, 18.0))) == ["worsened loss_delta"]
