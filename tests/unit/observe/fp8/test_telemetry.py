"""Sites, worst values with their place, amax history, detectors, and the reduction that carries a place."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_stability.detect import build
from megatron_stability.detect.config import Detect
from megatron_stability.observe.fp8.telemetry import SIGNALS, AmaxHistory, binades, table, worst
from megatron_stability.records import StepRecord
from megatron_stability.sites import MODULES, TENSORS, Site
from tests.unit.steps import reduced


def test_every_site_survives_its_order() -> None:
    for layer in (1, 126, 4000):
        for module in MODULES:
            for tensor in TENSORS:
                for expert in (-2, -1, 0, 255):
                    site = Site(layer, module, tensor, expert)
                    assert Site.at(site.order) == site
    assert str(Site(3, "linear_fc1", "grad_output")) == "layer 3 linear_fc1 grad_output"


def test_orders_follow_a_step() -> None:
    steps = [
        Site(1, "linear_qkv", "input"),
        Site(1, "linear_fc1", "input"),
        Site(9, "linear_qkv", "input"),
        Site(9, "linear_fc2", "grad_output"),
        Site(9, "linear_qkv", "grad_output"),
        Site(1, "linear_qkv", "grad_output"),
    ]
    assert [site.order for site in steps] == sorted(site.order for site in steps)


def test_worst_says_where_it_began_and_ignores_what_is_unknown() -> None:
    orders = torch.tensor([10.0, 11.0, 12.0, 13.0], dtype=torch.float64)
    found = worst("fp8/amax_rise", torch.tensor([math.nan, 2.0, 50.0, 900.0]), orders)
    assert (float(found["fp8/amax_rise"]), float(found["fp8/amax_rise/at"])) == (900.0, 12.0)
    calm = worst("fp8/amax_rise", torch.tensor([1.0, 2.0, 3.0, math.nan]), orders)
    assert float(calm["fp8/amax_rise"]) == 3.0
    assert calm["fp8/amax_rise/at"].isnan()
    assert worst("fp8/amax_rise", torch.full((4,), math.nan), orders)["fp8/amax_rise"].isnan()


def test_the_reduction_takes_the_largest_value_and_the_earliest_place() -> None:
    extra = {name: SIGNALS[name] for name in ("fp8/amax_rise", "fp8/amax_rise/at")}
    names = tuple(extra)
    given = [dict(zip(names, row, strict=True)) for row in ((300.0, 100.0), (math.nan, math.nan), (70.0, 50.0))]
    assert dict(reduced(extra, *given).signals) == {"fp8/amax_rise": 300.0, "fp8/amax_rise/at": 50.0}


def test_amax_is_compared_with_accepted_steps_only() -> None:
    history, scale = AmaxHistory(2, torch.device("cpu")), torch.ones(2)
    calm = torch.tensor([2.0, 0.0])
    for _ in range(8):
        assert history.rise(calm).isnan().all()
        history.learn(calm, scale)
    assert history.rise(torch.tensor([200.0, 5.0]))[0] == pytest.approx(100.0)
    assert history.rise(torch.tensor([200.0, 5.0]))[1].isnan(), "a silent tensor has no past"


def test_a_scale_ages_while_its_amax_moves() -> None:
    history = AmaxHistory(1, torch.device("cpu"))
    ages = []
    for amax, scale in ((1.0, 5.0), (2.0, 5.0), (3.0, 5.0), (3.0, 5.0), (4.0, 6.0), (5.0, 6.0)):
        pair = torch.tensor([amax]), torch.tensor([scale])
        ages.append(float(history.age(*pair)))
        history.learn(*pair)
    assert ages == [0.0, 1.0, 2.0, 2.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("signals", "detector"),
    [
        ({"fp8/amax_rise": 100.0, "fp8/amax_rise/at": Site(3, "linear_fc1", "input").order}, "fp8_amax_rise"),
        ({"fp8/amax_fall": 1e4, "fp8/amax_fall/at": Site(3, "linear_fc1", "input").order}, "fp8_amax_fall"),
        ({"fp8/gemms": 24.0, "fp8/fallbacks": 20.0}, "fp8_fallbacks"),
    ],
)
def test_detectors_report_in_the_step_and_name_the_place(signals: dict[str, float], detector: str) -> None:
    record = StepRecord(
        step=9, first_sample=0, samples=1, tokens=1.0, loss=1.0, grad_norm=1.0, learning_rate=1.0, signals=signals
    )
    verdicts = [v for d in build(Detect()) if d.name.startswith("fp8") and (v := d.inspect(record))]
    assert [v.detector for v in verdicts] == [detector]
    if "fp8/gemms" not in signals:
        assert verdicts[0].reason.endswith("layer 3 linear_fc1 input")


def test_tables_keep_full_precision() -> None:
    rows = table([Site(1, "linear_qkv", "input")], [1 / 3], [math.nan], [{"underflow": 3e-6}])
    assert rows[0]["amax"] == 1 / 3
    assert rows[0]["scale"] == "nan"
    assert rows[0]["underflow"] == 3e-6


def test_binades_count_from_the_least_normal_value_and_leave_out_unset_scales() -> None:
    amax, least = torch.tensor([4.0, 4.0, 4.0, 0.0]), torch.tensor([2.0**-6] * 4)
    scale = torch.tensor([112.0, 112.0 / 256, 1.0, 112.0])
    found = binades(amax, scale, least, torch.tensor([10.0, 11.0, 9.0, 8.0], dtype=torch.float64))
    assert float(found["fp8/binades"]) == pytest.approx(math.log2(448 / 256) + 6), "margin 8 of E4M3"
    assert float(found["fp8/binades/at"]) == 11.0
    one = slice(0, 1)
    healthy = binades(amax[one], scale[one], least[one], torch.tensor([10.0], dtype=torch.float64))
    assert float(healthy["fp8/binades"]) == pytest.approx(14.8, abs=0.01)
    assert healthy["fp8/binades/at"].isnan()
    begin = binades(amax, torch.ones(4), least, torch.arange(4, dtype=torch.float64))
    assert begin["fp8/binades"].isnan()
