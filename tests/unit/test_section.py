"""A section that is given in part keeps the rest of what it is by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stability import config
from megatron_stability.config import StabilityConfig
from megatron_stability.detect.config import Detect
from megatron_stability.section import Section

NAMES = [name for name, info in Detect.model_fields.items() if isinstance(info.default, Section)]


def test_one_limit_by_flag_leaves_the_others() -> None:
    found = config.load(overrides={"stability_detect_moe_load_watch": "5"}).detect.moe_load
    assert (found.watch, found.small, found.persistence) == (5.0, 16.0, 20)
    assert config.load(overrides={"stability_detect_grad_norm_drift_t": "9"}).detect.grad_norm_drift.rise == 0.7


def test_one_limit_by_file_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("detect: {fp8_saturation: {small: 0.1}, throughput: {watch: 2}}\n")
    found = config.load(tmp_path / "s.yaml").detect
    default = Detect()
    assert (found.fp8_saturation.small, found.fp8_saturation.medium) == (0.1, default.fp8_saturation.medium)
    assert found.throughput.model_dump() == default.throughput.model_dump() | {"watch": 2.0}
    assert found.moe_load == default.moe_load


@pytest.mark.parametrize("name", NAMES)
def test_turning_any_detector_off_and_on_changes_nothing_else(name: str) -> None:
    default = getattr(Detect(), name)
    if not hasattr(default, "enabled"):
        pytest.skip("has no switch")
    given = StabilityConfig.model_validate({"detect": {name: {"enabled": default.enabled}}})
    assert getattr(given.detect, name) == default


def test_what_is_given_wins_and_what_is_unknown_is_refused() -> None:
    found = StabilityConfig.model_validate({"detect": {"moe_load": {"watch": None, "persistence": 1}}}).detect.moe_load
    assert (found.watch, found.small, found.persistence) == (None, 16.0, 1)
    with pytest.raises(ValueError, match="wacth"):
        StabilityConfig.model_validate({"detect": {"moe_load": {"wacth": 1}}})
