"""What both hosts must make of the same faults: Megatron's own loop, and Megatron-Bridge's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_stability.ledger import bundle, entries, fates

STEPS = 17
WORLD = 2  # data-parallel, with the distributed optimizer
FAULTS = ("nan:step=6,rank=1", "inf-loss:step=8,rank=0", "scale:step=12,factor=50", "page:step=15")
STABILITY: Mapping[str, Any] = MappingProxyType(
    {
        "mode": "act",
        "detect": {"grad_norm_spike": {"warmup_steps": 4}, "bad_batch": {"calibration_steps": 10}},
        "decide": {
            "rules": [
                {"detector": "non_finite", "tier": "non_finite", "action": "skip"},
                {"detector": "grad_norm_spike", "tier": "large", "action": "scale_lr", "factor": 0.5, "steps": 2},
                {"detector": "bad_batch", "tier": "small", "action": "skip"},
            ]
        },
    }
)
OUTCOMES = MappingProxyType(
    {
        6: ("skip", "non_finite"),
        8: ("skip", "non_finite"),
        12: ("scale_lr", "grad_norm_spike"),
        15: ("skip", "bad_batch"),
    }
)


def stability(folder: Path, **more: Any) -> dict[str, Any]:
    """The tree, with its ledger in `folder`."""
    return dict(STABILITY) | {"record": {"dir": str(folder)}} | more


def assert_outcomes(folder: Path) -> None:
    """Each fault is met as `OUTCOMES` says, every other step is applied, and the evidence is there."""
    view = entries.read(folder)
    assert fates.audit(view) == []
    steps = {step.step: step for step in view.surviving}
    seen = {number: str(step.action) for number, step in steps.items()}
    assert seen == {number: OUTCOMES.get(number, ("apply",))[0] for number in range(1, STEPS + 1)}
    for number, (_, detector) in OUTCOMES.items():
        assert detector in {verdict.detector for verdict in steps[number].verdicts}, number
    assert [steps[number].culprit_ranks for number in (6, 8)] == [(1,), (0,)]
    withheld = [number for number, (action, _) in OUTCOMES.items() if action == "skip"]
    assert [int(path.name.split("-")[1]) for path in bundle.bundles(folder)] == withheld
