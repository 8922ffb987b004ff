"""Triage on ledgers with one thing wrong: the cause is named, and never with confidence where it can't be known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_stability import cli
from megatron_stability.errors import UsageError
from megatron_stability.explain.facts import FACTS
from megatron_stability.explain.rules import CAUSES, RULES, Class
from megatron_stability.explain.scene import Scene
from megatron_stability.explain.triage import triage
from megatron_stability.ledger.entries import FILE, LedgerView, line_of
from megatron_stability.records import Action, Tier
from tests.unit.explain.runs import Run, at, both, settings, since, verdict, view

SKIP = {"action": Action.SKIP, "fate": "skipped"}


def _spike(step: int, *detectors: str, **fields: Any) -> dict[str, Any]:
    return {**SKIP, "verdicts": tuple(verdict(step, name) for name in detectors), "reason": "a spike", **fields}


def _restarted(at_step: int, wrong: Any, **changed: Any) -> LedgerView:
    return view(Run(steps=at_step), Run(steps=80, first=at_step + 1, generation=2, seed=1, wrong=wrong, **changed))


NAN = {"loss": math.nan, "grad_norm": math.nan, "nonfinite_losses": 2}
RISE = since(121, loss=lambda n: 3.3 + 0.3 * n, verdicts=(verdict(121, "loss_divergence"),))
CASES: dict[str, tuple[LedgerView, int]] = {
    "bad_batch": (
        view(Run(wrong=at(120, **_spike(120, "bad_batch"), loss=6.0, signals={"data/repeated": 0.8}))),
        120,
    ),
    "objective": (
        view(Run(wrong=since(120, loss=7.0, tokens=300.0, verdicts=(verdict(120, "loss_delta"),)))),
        120,
    ),
    "data_stage": (
        _restarted(
            110, since(111, loss=4.4, verdicts=(verdict(111, "loss_delta"),)), data={"data_path": "b", "seed": "1"}
        ),
        111,
    ),
    "learning_rate": (
        view(
            Run(
                wrong=both(
                    since(115, learning_rate=3e-3),
                    since(117, grad_norm=lambda n: 6.0 * 1.3**n),
                    since(121, loss=lambda n: 3.8 + 0.3 * n, verdicts=(verdict(121, "loss_divergence"),)),
                )
            )
        ),
        121,
    ),
    "optimizer_setting": (
        _restarted(
            110,
            both(since(114, grad_norm=8.0), since(118, loss=4.5, verdicts=(verdict(118, "loss_divergence"),))),
            settings=settings(adam_beta2=0.999),
        ),
        118,
    ),
    "attention_logits": (
        view(
            Run(
                wrong=both(
                    since(60, signals={}, verdicts=()),
                    lambda n, f: f["signals"].update({"attention/max_logit": 8.0 * 1.06 ** max(0, n - 60)}),
                    RISE,
                )
            )
        ),
        121,
    ),
    "output_logits": (
        view(
            Run(wrong=both(lambda n, f: f["signals"].update({"log_z/sum": 256 * (0.3 + 0.5 * max(0, n - 80))}), RISE))
        ),
        121,
    ),
    "fp8_range": (
        view(
            Run(
                settings=settings(fp8="hybrid"),
                wrong=since(118, loss=4.5, verdicts=(verdict(118, "fp8_saturation"), verdict(118, "loss_delta"))),
            )
        ),
        118,
    ),
    "overflow": (view(Run(wrong=at(120, **_spike(120, "non_finite"), **NAN, culprit_ranks=(0, 1, 2, 3)))), 120),
    "model_setting": (
        _restarted(
            110,
            since(111, loss=6.0, verdicts=(verdict(111, "loss_delta"),)),
            settings=settings(**{"model.final_softcap": 30.0}),
        ),
        111,
    ),
    "rank": (
        view(
            Run(
                wrong=at(
                    120, **_spike(120, "grad_norm_spike", "rank_agreement"), grad_norm=50.0, disagreeing_ranks=(2,)
                )
            )
        ),
        120,
    ),
    "storage": (
        view(
            Run(
                wrong=since(
                    120, 140, signals={"step_seconds": 9.0}, verdicts=(verdict(120, "throughput", Tier.MEDIUM),)
                )
            )
        ),
        120,
    ),
    "software": (
        _restarted(110, since(112, loss=4.2, verdicts=(verdict(112, "loss_delta"),)), versions={"torch": "2.12"}),
        112,
    ),
}


@pytest.mark.parametrize("cause", CASES)
def test_the_cause_is_named_first_and_with_evidence_of_its_own(cause: str) -> None:
    ledger, step = CASES[cause]
    found = triage(Scene.at(ledger, step))
    assert found.first.name == cause, [(h.name, round(h.probability, 3)) for h in found.hypotheses[:4]]
    assert found.first.cause.kind is next(iter(found.classes))
    assert found.confidence in ("high", "medium")
    assert found.first.speaks_for
    assert found.first.speaks_for[0].weight >= 2.5
    assert found.commands("runs/a")


def test_lost_moments_are_told_where_they_can_be_and_else_stay_open() -> None:
    ledger = _restarted(110, since(111, 125, loss=5.0, verdicts=(verdict(111, "loss_delta"),)))
    found = triage(Scene.at(ledger, 111))
    assert "optimizer_state" in [each.name for each in found.hypotheses[:3]]
    assert found.confidence != "high"


def test_one_rank_that_alone_was_not_finite_points_at_the_rank_and_all_ranks_at_an_overflow() -> None:
    for culprits, cause in (((3,), "rank"), ((0, 1, 2, 3), "overflow")):
        ledger = view(Run(wrong=at(120, **_spike(120, "non_finite"), **NAN, culprit_ranks=culprits)))
        assert triage(Scene.at(ledger, 120)).first.name == cause


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_step_has_nothing_wrong(seed: int) -> None:
    found = triage(Scene.at(view(Run(seed=seed)), 130))
    assert found.first.cause.kind is Class.NONE
    assert found.confidence == "high"


@pytest.mark.parametrize("cause", [name for name in CASES if name not in ("overflow", "rank", "software")])
def test_without_the_deciding_signal_nothing_is_said_with_confidence_and_the_flag_is_named(cause: str) -> None:
    plain: dict[str, Any] = {"loss": 5.0, "verdicts": (verdict(120, "loss_delta"),)}
    run = Run(signals=False, settings={}, data={}, versions={}, wrong=since(120, 10**9, **plain))
    found = triage(Scene.at(view(run), 120))
    assert found.confidence in ("undetermined", "low")
    flags = " ".join(each.flag for each in found.enable)
    wanted = {
        "bad_batch": "observe-batch-enabled",
        "attention_logits": "observe-attention-enabled",
        "output_logits": "model-z-loss",
        "fp8_range": "fp8-sample-every",
    }
    assert wanted.get(cause, "") in flags
    assert "replicas" in flags


def test_every_rule_speaks_of_a_fact_and_of_causes_that_exist_and_every_fact_and_cause_is_spoken_of() -> None:
    assert {rule.fact for rule in RULES} == set(FACTS)
    spoken = {cause for rule in RULES for cause in (*rule.holds, *rule.fails)}
    assert spoken == set(CAUSES)
    assert len({rule.fact for rule in RULES}) == len(RULES)
    for name, cause in CAUSES.items():
        if name != "none":
            assert max(rule.holds.get(name, 0.0) for rule in RULES) >= 2.0
            assert cause.next
            assert cause.prevents


def _replayed(branch: str, present: bool, equal: bool) -> tuple[LedgerView, int, dict[str, Any]]:
    """A scene with the result of a replay: the plain branch met it again, to the bit, but where it is the one asked."""
    plain = {"name": "replay", "failure": "", "present": True, "equal": True, "meaning": "met again"}
    row = {**plain, "name": branch, "present": present, "equal": equal}
    rows = [row] if branch == "replay" else [plain, row]
    return (*CASES["rank"], {"branches": rows})


def _facts(ledger: LedgerView, step: int, replay: dict[str, Any] | None = None) -> dict[str, bool | None]:
    found = triage(Scene.at(ledger, step, replay)).facts
    return {name: None if fact is None else fact.holds for name, fact in found.items()}


HELD_OUT = {"held_out": 1.0, "held_out/a": 3.0}
#: A ledger and step in which each fact holds, and one in which it is measured and does not.
BOTH: dict[str, Any] = {
    "found": (CASES["rank"], (view(Run()), 120)),
    "non_finite": (CASES["overflow"], CASES["rank"]),
    "from_start": ((view(Run()), 4), CASES["rank"]),
    "sudden": (CASES["bad_batch"], CASES["learning_rate"]),
    "norm_first": (CASES["learning_rate"], CASES["bad_batch"]),
    "amplified": (CASES["rank"], CASES["bad_batch"]),
    "by_itself": ((view(Run(wrong=at(120, loss=6.0))), 120), CASES["objective"]),
    "gone_when_withheld": (
        CASES["bad_batch"],
        (view(Run(wrong=since(120, **_spike(120, "loss_delta"), loss=6.0))), 120),
    ),
    "compute_differs": (
        (view(Run(wrong=at(120, signals={"ranks/compute": 1.0}))), 120),
        (view(Run(wrong=at(120, signals={"ranks/compute": 0.0}))), 120),
    ),
    "stays": (CASES["objective"], CASES["bad_batch"]),
    "ranks_differ": (CASES["rank"], CASES["bad_batch"]),
    "few_culprits": (
        (view(Run(wrong=at(120, **_spike(120, "non_finite"), **NAN, culprit_ranks=(1,)))), 120),
        CASES["overflow"],
    ),
    "slow": (CASES["storage"], CASES["rank"]),
    "data_odd": (CASES["bad_batch"], CASES["rank"]),
    "tokens_changed": (CASES["objective"], CASES["rank"]),
    "rate_jumped": (CASES["learning_rate"], CASES["rank"]),
    "at_peak": (
        (view(Run(wrong=lambda n, f: f.update(learning_rate=3e-4 * min(1.0, n / 120)))), 119),
        CASES["rank"],
    ),
    "optimizer_changed": (CASES["optimizer_setting"], CASES["model_setting"]),
    "rate_changed": (
        (_restarted(110, since(112), settings=settings(lr=1e-3)), 112),
        CASES["optimizer_setting"],
    ),
    "tokens_setting_changed": (
        (_restarted(110, since(112), settings=settings(reset_attention_mask=True)), 112),
        CASES["optimizer_setting"],
    ),
    "model_changed": (CASES["model_setting"], CASES["optimizer_setting"]),
    "data_changed": (CASES["data_stage"], CASES["model_setting"]),
    "code_changed": (CASES["software"], CASES["data_stage"]),
    "restarted": (CASES["software"], CASES["rank"]),
    "logits_grew": (CASES["attention_logits"], CASES["rank"]),
    "log_z_grew": (CASES["output_logits"], CASES["rank"]),
    "one_layer": (
        (view(Run(wrong=since(100, signals={"grad_norm/layer_max": 30.0, "grad_norm/layer_median": 1.0}))), 120),
        (view(Run(wrong=since(100, signals={"grad_norm/layer_max": 3.0, "grad_norm/layer_median": 1.0}))), 120),
    ),
    "fp8_limits": (CASES["fp8_range"], CASES["rank"]),
    "weights_grew": (
        (view(Run(wrong=at(120, verdicts=(verdict(120, "param_growth"),)))), 120),
        (view(Run(wrong=since(100, signals={"param_norm": 50.0}))), 120),
    ),
    **{
        name: tuple(_replayed(branch, present, equal) for present, equal in values)
        for name, branch, values in (
            ("reproduces", "replay", ((True, True), (False, False))),
            ("skip_clears", "skip", ((False, False), (True, True))),
            ("control_clears", "control", ((False, False), (True, False))),
            ("lr_clears", "lr", ((False, False), (True, False))),
            ("bf16_clears", "bf16", ((False, False), (True, False))),
            ("moments_clear", "moments", ((False, False), (True, False))),
        )
    },
    "held_out_rose": (
        (view(Run(wrong=at(120, verdicts=(verdict(120, "held_out"),), signals=HELD_OUT))), 120),
        (view(Run(wrong=at(120, signals=HELD_OUT))), 120),
    ),
}


@pytest.mark.parametrize("fact", BOTH)
def test_a_fact_holds_where_it_should_and_is_refuted_where_it_was_measured(fact: str) -> None:
    holds, fails = BOTH[fact]
    assert _facts(*holds)[fact] is True
    assert _facts(*fails)[fact] is False


def test_samples_that_were_read_again_tell_a_bad_batch_from_what_does_not_come_back() -> None:
    bad = at(120, **_spike(120, "loss_delta"), loss=6.0)
    for again in (True, False):
        second = Run(steps=40, first=101, generation=2, seed=1)
        second.wrong = bad if again else second.wrong
        ledger = view(Run(wrong=bad), second)
        first = next(step for step in ledger.steps if step.step == 120)
        scene = Scene(view=ledger, step=first, before=tuple(ledger.steps[60:119]), after=tuple(ledger.steps[120:140]))
        fact = triage(scene).facts["recurs_with_samples"]
        assert fact is not None
        assert fact.holds is again
    assert _facts(view(Run(wrong=bad)), 120)["recurs_with_samples"] is None


def test_no_step_and_no_incident_are_said_with_what_there_is() -> None:
    with pytest.raises(UsageError, match="step 999: is not in the ledger, which holds steps 1 to 160"):
        Scene.at(view(Run()), 999)
    with pytest.raises(UsageError, match="no incident"):
        Scene.at(view(Run()))


def test_the_last_incident_begins_at_the_first_step_of_its_stretch() -> None:
    ledger = view(Run(wrong=both(at(40, **_spike(40, "x")), since(120, 124, **_spike(120, "grad_norm_spike")))))
    assert Scene.at(ledger).step.step == 120


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder whose one incident is a bad batch at step 120."""
    place = tmp_path / "run" / "stability"
    place.mkdir(parents=True)
    (place / FILE).write_bytes(b"".join(line_of(entry) for entry in CASES["bad_batch"][0].entries))
    return place.parent


def test_the_command_names_the_cause_and_the_next_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "bad_batch spoke" in shown
    assert "confidence: high" in shown
    assert f"next: megatron-stability replay {folder} 120 --branches replay,skip,control" in shown
    assert cli.main(["triage", str(folder), "60", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["hypotheses"][0]["cause"] == "none"
    assert said["step"] == 60


def test_the_post_mortem_holds_timeline_evidence_gate_and_recurrence(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "step-120.md"
    assert cli.main(["triage", str(folder), "120", "--post-mortem", str(page)]) == 1
    text = page.read_text()
    for part in ("## Timeline", "| 120 | 952–960 | 6.0000", "## Cause", "## Repair gate", "## Prevents recurrence"):
        assert part in text
    assert "--stability-decide-skip-samples '[[952, 960]]'" in text


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", str(tmp_path)]) == 2
    assert "ledger.jsonl" in capsys.readouterr().err
