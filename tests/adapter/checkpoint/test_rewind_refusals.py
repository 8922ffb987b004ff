"""What a rewind could not put back is refused at the start, by the name of its flag."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.arguments import refuse_what_cannot_work

FINE: dict[str, Any] = {"save": "out", "ckpt_format": "torch_dist", "dataloader_type": "single"}


def refuse(changes: dict[str, Any], **decide: Any) -> None:
    rule = {"detector": "*", "tier": "large", "action": "rewind", "generations": 1, "skip_steps": 1}
    config = StabilityConfig.model_validate({"decide": decide | {"rules": [rule]}})
    refuse_what_cannot_work(config, Namespace(**(FINE | changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"save": None}, "--save"),
        ({"ckpt_format": "torch"}, "--ckpt-format torch"),
        ({"dataloader_type": "external"}, "--dataloader-type external"),
        ({"no_save_rng": True}, "--no-save-rng"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
    ],
)
def test_within_the_process(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse(changes)
    refuse({})


def test_a_restart_needs_checkpoints_only() -> None:
    refuse({"ckpt_format": "torch", "dataloader_type": "external"}, rewind="restart")
    with pytest.raises(UsageError, match="--save"):
        refuse({"save": None}, rewind="restart")


def test_a_snapshot_needs_state_that_it_holds() -> None:
    with pytest.raises(UsageError, match="--fp8-format hybrid with --stability-decide-snapshot-steps"):
        refuse({"fp8": "hybrid"}, snapshot_steps=100)
    refuse({"fp8": "hybrid"})
