"""Emulated FP8 in Megatron's own schedule: equal scales, telemetry over layouts, outliers, resume, skips, MoE."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.numerics.fp8.config import Fp8
from megatron_stability.sites import Site
from tests.dist.fp8.fp8_models import Run
from tests.dist.model import prevention_models as small
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron

DELAYED = {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}


def scales_after_steps(context: Context, folder: str, tp: int, pp: int) -> Any:
    run = Run(context, small.layout(context.world, tp=tp, pp=pp, **DELAYED), Fp8(emulate="delayed"), folder)
    for _ in range(4):
        run.step()
    return run.scales(), run.amax(), run.losses


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 1)], ids=["tp2pp2", "dp2"])
def test_delayed_scales_are_equal_on_all_ranks_of_a_stage(
    megatron_ranks: Pool, tmp_path: Any, tp: int, pp: int
) -> None:
    world = 4 if pp == 2 else 2
    results = megatron_ranks.run(scales_after_steps, str(tmp_path), tp, pp, world=world, timeout=300)
    stages = [results[: world // pp], results[world // pp :]] if pp == 2 else [results]
    for stage in stages:
        first = stage[0][0]
        assert all(scale != 1.0 for scale in first.values())
        for scales, _, _ in stage[1:]:
            assert scales == first
        assert len({tuple(amax.items()) for _, amax, _ in stage}) > 1, "unequal local amax, or the test says nothing"
    assert len({str(sorted(stage[0][0])) for stage in stages}) == len(stages), "stages have sites of their own"


def telemetry(context: Context, folder: str, recipe: str, weights: Any) -> Any:
    run = Run(
        context, small.layout(context.world, tp=context.world), Fp8(emulate=recipe, sample_every=1), folder, weights
    )
    chunk = run.chunks[0]
    start = {small.whole_name(chunk, name): p.detach().float().clone() for name, p in chunk.named_parameters()}
    signals = run.step()
    return start, run.amax(), signals


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_telemetry_at_tp_1_and_2_agrees(megatron_ranks: Pool, tmp_path: Any, recipe: str) -> None:
    """First step, equal weights: weights to the bit, the rest within BF16 sums, and shards' own scales for current."""
    ((weights, whole, one),) = megatron_ranks.run(telemetry, str(tmp_path), recipe, None, world=1, timeout=200)
    first, second = megatron_ranks.run(telemetry, str(tmp_path), recipe, weights, world=2, timeout=200)
    for site, amax in whole.items():
        largest = max(first[1][site], second[1][site])
        assert largest == (
            amax if site.endswith("weight") else pytest.approx(amax, rel=0.03 if recipe == "delayed" else 0.1)
        ), site
    for name in ("fp8/saturation", "fp8/underflow"):
        assert first[2][name] == second[2][name], "combined over the stage, equal on its ranks"
        assert first[2][name] == pytest.approx(one[name], rel=0.1, abs=1e-3), name


def outliers(context: Context, folder: str) -> Any:
    run = Run(context, small.layout(1, **DELAYED), Fp8(emulate="delayed", sample_every=1), folder)
    for _ in range(14):
        calm = run.step()
    hot = run.chunks[0].decoder.layers[2].mlp.linear_fc1
    handle = hot.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 100,))
    rise = run.step(update=False)
    handle.remove()
    again = run.step(update=False)
    run.scale_loss = lambda step: 1e-4
    fall = run.step(update=False)
    return calm, rise, again, fall


def test_an_activation_outlier_and_a_shrunken_gradient_are_seen_in_their_step(
    megatron_ranks: Pool, tmp_path: Any
) -> None:
    ((calm, rise, again, fall),) = megatron_ranks.run(outliers, str(tmp_path), world=1, timeout=300)
    assert calm["fp8/amax_rise"] < 16
    assert calm["fp8/amax_fall"] < 256
    assert rise["fp8/amax_rise"] > 50
    assert Site.at(rise["fp8/amax_rise/at"]) == Site(3, "linear_fc1", "input")
    assert rise["fp8/saturation"] > 0.1
    assert Site.at(rise["fp8/saturation/at"]) == Site(3, "linear_fc1", "input")
    assert again["fp8/amax_rise"] < 16, "a withheld step leaves no trace"
    assert 3e3 < fall["fp8/amax_fall"] < 1e5
    assert Site.at(fall["fp8/amax_fall/at"]) == Site(4, "linear_fc2", "grad_output"), "where a backward begins"
    assert fall["fp8/underflow"] > 5 * calm["fp8/underflow"]


def resumed(context: Context, folder: str, where: dict[str, Any]) -> Any:
    import copy
    import json

    run = Run(context, where, Fp8(emulate="delayed"), folder)
    for _ in range(3):
        run.step()
        assert not run.hook.history[0].any(), "an amax stays staged over the step's end, where ranks differ in it"
    before = run.scales()
    run.step(update=False)
    assert run.scales() == before, "a withheld step leaves no trace"
    text = json.dumps(run.hook.state_dict())
    saved = json.loads(text)
    weights = [chunk.state_dict() for chunk in run.chunks]
    saved_rest = copy.deepcopy((weights, run.optimizer.state_dict(), run.data.get_state()))
    losses = len(run.losses)
    for _ in range(2):
        run.step()
    outcomes = [(run.losses[losses:], run.scales())]
    for state, recalibrate in ((saved, 0), (None, 1)):
        other = Run(context, where, Fp8(emulate="delayed", recalibrate=recalibrate), folder)
        weights, optimizer, data = copy.deepcopy(saved_rest)
        for chunk, part in zip(other.chunks, weights, strict=True):
            chunk.load_state_dict(part)
        other.optimizer.load_state_dict(optimizer)
        other.data.set_state(data)
        other.hook.load_state_dict(state)
        signals = [other.step() for _ in range(2)]
        outcomes.append((other.losses, other.scales()))
    quantized = [step["fp8/gemms"] - step["fp8/fallbacks"] for step in signals]
    strict = Run(context, where, Fp8(emulate="delayed"), folder).hook
    with pytest.raises(UsageError, match="has no FP8 scaling state for delayed scaling"):
        strict.load_state_dict(None)
    site = strict.sites[-1]
    del saved["linears"][f"{site.layer}/{site.expert}/{site.module}"]
    with pytest.raises(UsageError, match=f"lacks the FP8 scaling state of {str(site).removesuffix(' grad_output')};"):
        strict.load_state_dict(saved)
    return outcomes, quantized, str(site), text


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
EXPERTS |= {"moe_token_dispatcher_type": "alltoall"}
STAGED = small.layout(4, pp=2, vpp=2, ep=2, **EXPERTS, **DELAYED)


@pytest.mark.parametrize("where", [small.layout(1, **DELAYED), STAGED], ids=["one", "pp2-vpp2-ep2"])
def test_resume_is_bit_identical_with_the_state_and_not_without(
    megatron_ranks: Pool, tmp_path: Any, where: dict[str, Any]
) -> None:
    """Chunks, stages and experts have states of their own; without them, one step sets the scales anew."""
    results = megatron_ranks.run(resumed, str(tmp_path), where, world=where["world"], timeout=300)
    assert len({text for *_, text in results}) == 1, "one rank's state is what the checkpoint keeps"
    for (uninterrupted, with_state, without), quantized, last, _ in results:
        assert with_state == uninterrupted
        assert without != uninterrupted
        assert quantized[0] == 0, "the recalibrating step runs without quantization"
        assert quantized[1] > 0
        assert ("expert" in last) is (where is STAGED)
    if where is STAGED:
        scales = [outcomes[0][1] for outcomes, *_ in results]
        assert scales[0] == scales[1], "experts of one local number share their scale over the amax group, as in TE"
        assert scales[2] == scales[3]
        assert not scales[0].keys() & scales[2].keys()


def skips(context: Context, folder: str) -> Any:
    run = Run(context, small.layout(1, **DELAYED), Fp8(emulate="delayed", keep_amax_after_skips=3), folder)
    for _ in range(3):
        run.step()
    before = run.scales()
    hot = run.chunks[0].decoder.layers[1].mlp.linear_fc1
    hot.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 100,))
    history = []
    for _ in range(3):
        run.step(update=False)
        history.append(run.scales())
    return before, history


def test_a_skip_restores_scales_but_stale_ones_do_not_livelock(megatron_ranks: Pool, tmp_path: Any) -> None:
    ((before, (first, second, third)),) = megatron_ranks.run(skips, str(tmp_path), world=1, timeout=300)
    assert first == before
    assert second == before
    site = "layer 2 linear_fc1 input"
    assert third[site] == pytest.approx(before[site] / 100, rel=0.2)


def recipes(context: Context, folder: str) -> Any:
    results = {}
    from megatron_stability.megatron.access import handle

    for recipe in ("none", "delayed", "current", "block", "mxfp8"):
        handle.SLOT.runtime = None
        fp8 = Fp8(emulate="current" if recipe == "none" else recipe, sample_every=5)
        run = Run(context, small.layout(context.world, tp=context.world, sp=context.world > 1), fp8, folder)
        if recipe == "none":
            for state in run.hook.states:
                state.calibrating = True
            run.hook._guard.recalibrates_until = 10**9
        for _ in range(10):
            signals = run.step()
        results[recipe] = run.losses, signals
    return results


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.rare), 2])
def test_every_recipe_trains_near_the_unquantized_run(megatron_ranks: Pool, tmp_path: Any, world: int) -> None:
    for results in megatron_ranks.run(recipes, str(tmp_path), world=world, timeout=400):
        plain = results["none"][0]
        assert plain[-1] < 0.8 * plain[0]
        for name, (losses, signals) in results.items():
            assert losses[-1] == pytest.approx(plain[-1], rel=0.05), name
            if name != "none":
                assert losses != plain, name
                assert signals["fp8/fallbacks"] == 0
                assert 0 <= signals["fp8/saturation"] <= 1
                assert 0 <= signals["fp8/underflow"] <= 1
        assert results["none"][1]["fp8/fallbacks"] == results["none"][1]["fp8/gemms"] > 0
        assert not math.isnan(results["delayed"][1]["fp8/amax_rise"])


def layers_in_fp8(context: Context, folder: str, vpp: int | None) -> list[int]:
    kept = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    run = Run(context, small.layout(2, pp=2, vpp=vpp, **DELAYED, **kept), Fp8(emulate="delayed"), folder)
    return sorted({site.layer for site in run.hook.sites})


@pytest.mark.parametrize(("vpp", "expected"), [(None, [[2], [3]]), (2, [[3], [2]])], ids=["pp2", "pp2-vpp2"])
def test_the_models_first_and_last_layers_stay_bf16_not_each_stages(
    megatron_ranks: Pool, tmp_path: Any, vpp: int | None, expected: list[list[int]]
) -> None:
    assert megatron_ranks.run(layers_in_fp8, str(tmp_path), vpp, world=2, timeout=200) == expected


def amax_over_tensor_ranks_only(context: Context, folder: str) -> str | None:
    where = small.layout(context.world, tp=1, **DELAYED, tp_only_amax_red=True)
    try:
        Run(context, where, Fp8(emulate="delayed"), folder)
    except UsageError as error:
        return str(error)
    return None


def test_scales_that_differ_over_replicas_are_refused_by_the_models_own_field(
    megatron_ranks: Pool, tmp_path: Any
) -> None:
    """Megatron has no flag for it: Bridge sets the field."""
    for said in megatron_ranks.run(amax_over_tensor_ranks_only, str(tmp_path), world=2, timeout=200):
        assert said is not None
        assert "tp_only_amax_red: scales then differ over data-parallel ranks" in said
    assert megatron_ranks.run(amax_over_tensor_ranks_only, str(tmp_path), world=1, timeout=200) == [None]
