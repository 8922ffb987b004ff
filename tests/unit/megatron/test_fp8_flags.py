"""FP8 flags: both spellings, and what would silently train in BF16 or differently is refused."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from megatron_stability import config
from megatron_stability.errors import UsageError
from megatron_stability.megatron.fp8.flags import refuse_inactive_fp8
from megatron_stability.numerics.fp8.config import Fp8

FINE: dict[str, Any] = {
    "fp8": None,
    "transformer_impl": "local",
    "spec": ["megatron_stability"],
    "moe_grouped_gemm": False,
    "recompute_granularity": None,
    "data_parallel_size": 2,
}


@pytest.mark.parametrize(
    ("changes", "fp8", "mode", "said"),
    [
        ({"fp8": "hybrid"}, {}, "act", "--fp8-format hybrid with --transformer-impl local would train in BF16"),
        ({"fp8": "e4m3"}, {}, "off", "--fp8-format e4m3 with --transformer-impl local would train in BF16"),
        ({}, {"emulate": "delayed"}, "off", "--stability-mode off"),
        ({"transformer_impl": "transformer_engine"}, {"emulate": "block"}, "act", "--transformer-impl"),
        ({"spec": None}, {"emulate": "current"}, "act", "add --spec megatron_stability"),
        ({"moe_grouped_gemm": True}, {"emulate": "mxfp8"}, "act", "--moe-grouped-gemm"),
        ({"recompute_granularity": "full"}, {"emulate": "current"}, "act", "--recompute-granularity"),
    ],
)
def test_what_cannot_be_active_is_refused(changes: dict[str, Any], fp8: Any, mode: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse_inactive_fp8(Fp8(**fp8), mode, Namespace(**(FINE | changes)))


def test_what_can_be_active_is_let_through() -> None:
    refuse_inactive_fp8(Fp8(emulate="delayed"), "act", Namespace(**FINE))
    te = FINE | {"fp8": "hybrid", "transformer_impl": "transformer_engine"}
    refuse_inactive_fp8(Fp8(), "act", Namespace(**te))


@pytest.mark.parametrize("name", ["--stability-fp8-emulate", "--fp8-emulate"])
def test_both_spellings_are_one_setting(name: str) -> None:
    parser = config.add_flags(ArgumentParser())
    given = parser.parse_args([name, "block", "--fp8-recalibrate", "7"])
    fp8 = config.load(overrides=vars(given)).fp8
    assert (fp8.emulate, fp8.recalibrate) == ("block", 7)
    with pytest.raises(UsageError, match="--stability-fp8-emulate = 'blocks'"):
        config.load(overrides=vars(parser.parse_args([name, "blocks"])))


ACTIVE = {"fp8": "hybrid", "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("changes", "mode", "named"),
    [
        ({"fp8": None}, "act", "no FP8 of Transformer Engine"),
        ({}, "off", "--stability-mode off"),
        ({"cuda_graph_impl": "local"}, "act", "--cuda-graph-impl local"),
        ({"enable_cuda_graph": True}, "act", "--enable-cuda-graph"),
        ({"delay_wgrad_compute": True}, "act", "--delay-wgrad-compute"),
        ({"fp8_recipe": "custom"}, "act", "--fp8-recipe custom"),
    ],
)
def test_inspection_that_could_not_look_is_refused(changes: dict[str, Any], mode: str, named: str) -> None:
    refuse_inactive_fp8(Fp8(inspect=True), "act", Namespace(**ACTIVE))
    refuse_inactive_fp8(Fp8(), mode, Namespace(**(ACTIVE | changes)))
    with pytest.raises(UsageError, match=f"--stability-fp8-inspect true with {named}"):
        refuse_inactive_fp8(Fp8(inspect=True), mode, Namespace(**(ACTIVE | changes)))
