"""Losses of validation sets from Megatron's evaluation to a verdict."""

from argparse import Namespace

import pytest
import torch

from megatron_stability.detect.config import Early, HeldOut
from megatron_stability.detect.growth import HeldOut as Detector
from megatron_stability.megatron.observers.held_out import HeldOutHook
from megatron_stability.observe.reduction import LocalSignals, Reduction
from megatron_stability.records import Tier

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("args", "suffixes", "names"),
    [
        (Namespace(multiple_validation_sets=False, eval_iters=3), ("",), ("validation",)),
        (
            Namespace(multiple_validation_sets=True, eval_iters=[2, 2], validation_set_names=None),
            ("-0", "-1"),
            ("0", "1"),
        ),
        (
            Namespace(multiple_validation_sets=True, eval_iters=[2, 2], validation_set_names=["web", "code-c"]),
            ("-web", "-code-c"),
            ("web", "code-c"),
        ),
    ],
)
def test_one_set_that_gets_worse_is_a_verdict(
    args: Namespace, suffixes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    last, other = HeldOutHook(args), HeldOutHook(args)
    reduction = Reduction(None, torch.device("cpu"), last.signals)
    detector = Detector(HeldOut(), Early())

    def step(number: int, *losses: float):
        for suffix, loss in zip(suffixes, losses, strict=False):
            last.evaluated(suffix, {"lm loss": torch.tensor(loss)})
            other.evaluated(suffix, {})  # a rank that is not on the last stage
        rows = []
        for hook in (other, last):
            local = LocalSignals(
                step=number,
                first_sample=8 * number,
                samples=8,
                loss_sums_n2=torch.ones(1, 2),
                grad_norm=1.0,
                extra=hook.observe(),
            )
            rows.append(reduction.sent(local))
        record = reduction.together(rows)
        verdict = detector.inspect(record)
        detector.learn(record, True)
        for hook in (last, other):
            hook.update_done(record, True)
        return record, verdict

    record, verdict = step(1, *[2.0] * len(names))
    assert verdict is None
    assert record.signals == {"held_out": len(names), **{f"held_out/{name}": 2.0 for name in names}}
    record, verdict = step(2)
    assert (dict(record.signals), verdict) == ({}, None), "only the step after an evaluation has its losses"
    _, verdict = step(3, *[1.9] * (len(names) - 1), 2.7)
    assert verdict is not None
    assert verdict.tier is Tier.LARGE
