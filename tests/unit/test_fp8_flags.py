"""What `--stability-fp8-inspect` can't go with is refused by name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.megatron.fp8_flags import refuse_inactive_fp8
from megatron_stability.numerics.fp8_config import Fp8

ACTIVE = {"fp8": "hybrid", "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("changes", "mode", "named"),
    [
        ({"fp8": None}, "act", "no FP8 of Transformer Engine"),
        ({}, "off", "--stability-mode off"),
        ({"cuda_graph_impl": "local"}, "act", "--cuda-graph-impl"),
        ({"delay_wgrad_compute": True}, "act", "--delay-wgrad-compute"),
    ],
)
def test_inspection_that_could_not_look_is_refused(changes: dict[str, Any], mode: str, named: str) -> None:
    refuse_inactive_fp8(Fp8(inspect=True), "act", Namespace(**ACTIVE))
    refuse_inactive_fp8(Fp8(), mode, Namespace(**(ACTIVE | changes)))
    with pytest.raises(UsageError, match=f"--stability-fp8-inspect true with {named}"):
        refuse_inactive_fp8(Fp8(inspect=True), mode, Namespace(**(ACTIVE | changes)))
