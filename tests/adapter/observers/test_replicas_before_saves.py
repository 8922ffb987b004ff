"""Weights are compared on the steps that Megatron plans to save after."""

from argparse import Namespace

import pytest

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ({"save": None}, set()),
        ({}, {4, 8, 10}),
        ({"non_persistent_save_interval": 3}, {3, 4, 6, 8, 9, 10}),
        ({"exit_interval": 5}, {4, 5, 8, 10}),
        ({"save_interval": None}, {10}),
    ],
)
def test_saves_are_foreseen(given: dict[str, object], planned: set[int]) -> None:
    from megatron_stability.megatron.observers.replicas import saves_after

    usual = {"save": "out", "save_interval": 4, "non_persistent_save_interval": None, "exit_interval": None}
    args = Namespace(**{**usual, "train_iters": 10, **given})
    assert {step for step in range(1, 11) if saves_after(args, step)} == planned
