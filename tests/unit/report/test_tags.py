"""Tags: one scheme, values that can be read as they are, and few of them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from megatron_stability.config import leaves
from megatron_stability.records import Action, AttentionTable, Decision, StepRecord
from megatron_stability.report import tags
from megatron_stability.signals import SIGNALS

NAME = re.compile(r"stability/[a-z_0-9]+(/[A-Za-z_0-9.<>-]+)+")


def _written(**signals: float) -> dict[str, float]:
    record = StepRecord(
        step=1, first_sample=0, samples=1, tokens=512.0, loss=2.0, grad_norm=1.5, learning_rate=1e-3, signals=signals
    )
    decision = Decision(step=1, action=Action.SKIP, advised=Action.SKIP, reason="so")
    return tags.scalars(record, decision, z_loss=1e-4, generation=2, open_=3)


def test_sums_become_means_and_are_not_written() -> None:
    found = _written(**{"log_z/weight": 4.0, "log_z/sum": 20.0, "log_z/square_sum": 104.0, "log_z/max": 7.0})
    mine = {name: value for name, value in found.items() if "log_z" in name}
    assert mine == {
        "stability/log_z/mean": 5.0,
        "stability/log_z/mean_square": 26.0,
        "stability/log_z/z_loss": pytest.approx(26e-4),
        "stability/log_z/max": 7.0,
    }
    none = _written(**{"log_z/weight": 0.0, "log_z/sum": 0.0, "log_z/square_sum": 0.0})
    assert not any("log_z" in name for name in none)


def test_a_step_in_its_tags() -> None:
    found = _written(step_seconds=2.0, param_norm=9.0, **{"held_out": 1.0, "held_out/web": 3.5, "moe/dropped": 0.1})
    assert found == {
        "stability/step/loss": 2.0,
        "stability/step/grad_norm": 1.5,
        "stability/step/learning_rate": 1e-3,
        "stability/step/action": 3.0,
        "stability/step/advised": 3.0,
        "stability/step/verdicts": 0.0,
        "stability/step/open_episodes": 3.0,
        "stability/step/generation": 2.0,
        "stability/step/step_seconds": 2.0,
        "stability/step/tokens_per_second": 256.0,
        "stability/step/param_norm": 9.0,
        "stability/held_out/web": 3.5,
        "stability/moe/dropped": 0.1,
    }


def test_everything_that_is_written_is_in_the_page_and_fits_the_scheme() -> None:
    everything = _written(**dict.fromkeys(SIGNALS, 1.0))
    assert set(everything) == {tags.PREFIX + name for name in tags.rows()}
    assert all(NAME.fullmatch(name) for name in everything)


def test_a_deep_run_with_everything_on_stays_below_the_limit() -> None:
    sets = {f"held_out/set{number}": 1.0 for number in range(100)}
    layers, heads = 126, 128
    grid = tuple((1.0,) * heads for _ in range(layers))
    names = tuple(f"decoder.layers.{number}" for number in range(layers))
    table = AttentionTable(
        step=1,
        layers=names,
        max_logit_lh=grid,
        entropy_lh=grid,
        factor_lh=grid,
        clips_lh=grid,
        growth_lh=grid,
        max_gain_l=(1.0,) * layers,
    )
    of_run = _written(**dict.fromkeys(SIGNALS, 1.0), **sets)
    assert len(of_run) + len(tags.table_scalars(table, "run")) <= tags.MOST
    assert len(tags.table_scalars(table, "layers")) == 6 * layers
    assert len(tags.table_scalars(table, "heads")) == 6 * layers + 5 * layers * heads


def test_the_layout_asks_for_tags_that_are_written() -> None:
    written = [tags.PREFIX + name for name in tags.rows()]
    for charts in tags.layout().values():
        for _, patterns in charts.values():
            for pattern in patterns:
                assert any(re.match(pattern, name) for name in written), pattern


def test_the_page_names_settings_that_exist() -> None:
    known = {".".join(path) for path, _ in leaves()}
    sections = {name.rsplit(".", depth)[0] for name in known for depth in (1, 2)}
    named = {found for row in tags.rows().values() for found in re.findall(r"`([a-z_0-9.]+)`", row.when)}
    assert len(named) > 5
    assert named <= known | sections


def test_nan_stays_nan() -> None:
    found = tags.scalars(
        StepRecord(step=1, first_sample=0, samples=1, tokens=1.0, loss=math.nan, grad_norm=math.inf),
        Decision(step=1, action=Action.APPLY, advised=Action.APPLY, reason=""),
        z_loss=0.0,
        generation=0,
        open_=0,
    )
    assert math.isnan(found["stability/step/loss"])


def test_tensorboard_takes_the_layout(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(tags.layout())
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    read = Layout.FromString(event.tensor_proto.string_val[0])
    assert [chart.title for chart in read.category[0].chart] == list(tags.layout()["Stability"])
