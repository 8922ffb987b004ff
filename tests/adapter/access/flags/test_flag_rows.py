"""Flags that don't go with the plugin, that work otherwise beside it, or that nothing reads."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags import flag_rows

ON, OBSERVED = StabilityConfig(), StabilityConfig(mode="observe")


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        (OBSERVED, {"rampup_batch_size": ["2", "2", "16"]}, "--rampup-batch-size 2 2 16 .*--step-batch-size-schedule"),
        (ON, {"fp16": True}, "--fp16 with --stability-mode act"),
        (OBSERVED, {"optimizer_cuda_graph": True}, "--optimizer-cuda-graph with"),
        (OBSERVED, {"save_retain_interval": 5}, "--save-retain-interval 5"),
        (OBSERVED, {"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type local"),
    ],
)
def test_a_flag_that_cannot_be_had_is_named_with_the_way_out(
    config: StabilityConfig, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        flag_rows.refuse(config, Namespace(**flags))


def test_a_row_holds_under_its_settings_only() -> None:
    flag_rows.refuse(OBSERVED, Namespace(fp16=True))
    flag_rows.refuse(ON, Namespace())


def test_what_nothing_reads_is_told_where_it_is_given() -> None:
    (line,) = flag_rows.unread(Namespace(openai_gelu=True, use_flash_attn=False, dino_head_hidden_size=2048))
    assert line.startswith("--openai-gelu:")


def test_a_check_that_is_turned_off_is_told() -> None:
    args = Namespace(check_for_nan_in_loss_and_grad=True)
    assert [line[:30] for line in flag_rows.told(ON, args, flag_rows.TOLD)] == ["--check-for-nan-in-loss-and-gr"]
    assert [*flag_rows.told(OBSERVED, args, flag_rows.TOLD)] == []
