"""Facts of the model's own numbers: logits, layers, FP8, norms."""

from __future__ import annotations

import math
from statistics import median
from typing import Final

from megatron_stability.explain.facts.fact import Fact
from megatron_stability.explain.scene import Scene
from megatron_stability.ledger.entries import StepEntry

LOGITS = 50.0  # largest attention logit that a healthy model hardly reaches


def logits(scene: Scene) -> Fact | None:
    found = scene.spoke("attention_logits", "attention_logit_growth", "qk_gain_drift", "attention_entropy")
    values = [(at, value) for at, value in scene.signal("attention/max_logit") if value > 0]
    if not values:
        return Fact(True, found[0]) if found else None
    first, last = values[0][1], values[-1][1]
    grown = last > LOGITS and last > 2 * first
    says = f"the largest attention logit went from {first:.4g} to {last:.4g} in {values[-1][0] - values[0][0]} steps"
    return Fact(bool(found) or grown or not math.isfinite(last), found[0] if found else says)


def log_z(scene: Scene) -> Fact | None:
    values = _ratio(scene, "log_z/sum", "log_z/weight")
    if len(values) < SHORT_CURVE:
        return None
    first, last = median([v for _, v in values[: len(values) // 2]]), values[-1][1]
    return Fact(abs(last) > 3 * max(abs(first), 5.0), f"log Z went from {first:.3g} to {last:.3g}")


SHORT_CURVE: Final = 4


def _ratio(scene: Scene, above: str, below: str) -> list[tuple[int, float]]:
    def read(step: StepEntry) -> float | None:
        weight = step.signals.get(below)
        return step.signals[above] / weight if weight and above in step.signals else None

    return scene.curve(read, (*scene.before, scene.step))


def one_layer(scene: Scene) -> Fact | None:
    if found := scene.spoke("layer_outlier"):
        return Fact(True, found[0])
    largest = scene.signal("grad_norm/layer_max")[-1:]
    middle = scene.signal("grad_norm/layer_median")[-1:]
    if not largest or not middle or not middle[0][1] > 0:
        return None
    ratio = largest[0][1] / middle[0][1]
    return Fact(ratio > 10, f"the largest gradient norm of a layer is {ratio:.1f} times the median")


def fp8(scene: Scene) -> Fact | None:
    found = scene.spoke(
        "fp8_saturation",
        "fp8_underflow",
        "fp8_scale_stuck",
        "fp8_amax_rise",
        "fp8_amax_fall",
        "fp8_binades",
        "fp8_fallbacks",
    )
    if found:
        return Fact(True, found[0])
    runs = [run for run in scene.view.runs if run.generation <= scene.step.generation and run.settings]
    if runs and not runs[-1].settings.get("fp8") and not runs[-1].settings.get("fp8.emulate"):
        return Fact(False, "the run is not in FP8")
    if not any(name.startswith("fp8/") for step in (*scene.before, scene.step) for name in step.signals):
        return None
    return Fact(False, "no FP8 site was beyond its limits")


def grows(scene: Scene) -> Fact | None:
    found = scene.spoke("param_growth", "embedding_growth")
    if found:
        return Fact(True, found[0])
    return Fact(False, "norms of weights grew no faster than before") if scene.signal("param_norm") else None


def held_out(scene: Scene) -> Fact | None:
    if found := scene.spoke("held_out"):
        return Fact(True, found[0])
    sets = [step for step in (scene.step, *scene.after) if "held_out" in step.signals]
    return Fact(False, f"held-out losses at step {sets[0].step} are near their best") if sets else None
