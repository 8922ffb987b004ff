"""Facts of when: what moved first, what came back, what stayed."""

from __future__ import annotations

import math

from megatron_stability.explain.facts.fact import (
    FAR_SIGMA,
    NORM_FACTOR,
    SOON,
    Fact,
    amplified,
    departs,
    listed,
)
from megatron_stability.explain.scene import Scene
from megatron_stability.records import Action, Tier


def norm_first(scene: Scene) -> Fact | None:
    """The gradient norm left its level at least two steps before the loss did."""
    loss, norm = scene.loss, scene.norm
    if loss is None or norm is None:
        return None
    window = (*scene.before[-SOON:], scene.step, *scene.after)
    loss_at = next((step.step for step in window if departs(step, loss)), None)
    norm_at = next((step.step for step in window if amplified(step, norm)), None)
    if norm_at is None:
        return Fact(False, f"the gradient norm stayed within {NORM_FACTOR:g} times its usual {norm.middle:.3g}")
    if loss_at is None:
        return None if norm_at == scene.step.step else Fact(False, "the loss did not leave its level")
    lead = loss_at - norm_at
    says = f"the gradient norm left its level at step {norm_at}, the loss at {loss_at}"
    return Fact(lead >= 2, says)


def sudden(scene: Scene) -> Fact | None:
    """The loss left its level in one step, and nothing before it had moved."""
    loss, norm = scene.loss, scene.norm
    if loss is None or norm is None:
        return None
    window = (*scene.before[-SOON:], scene.step, *scene.after)
    at = next((place for place, step in enumerate(window) if departs(step, loss)), None)
    if at is None:
        return Fact(False, f"the loss stayed near its usual {loss.middle:.3f} nats")
    last = window[max(0, at - 3) : at]
    quiet = not any(amplified(step, norm) or loss.distance(step.loss) > FAR_SIGMA / 2 for step in last)
    value = window[at].loss
    says = f"the loss went from {loss.middle:.3f} to {value:.3f} nats at step {window[at].step}"
    return Fact(quiet, f"{says}, {'without a sign before' if quiet else 'after it had begun to move'}")


def by_itself(scene: Scene) -> Fact | None:
    """The step was applied, and the loss was back within three steps all the same."""
    return _back(scene) if scene.step.fate == "trained" else None


def gone_when_withheld(scene: Scene) -> Fact | None:
    """The step was withheld, and the next ones, with the same weights and other samples, were well."""
    return _back(scene) if scene.step.fate == "skipped" else None


def _back(scene: Scene) -> Fact | None:
    loss, norm = scene.loss, scene.norm
    if loss is None or not (departs(scene.step, loss) or amplified(scene.step, norm)) or len(scene.after) < 3:
        return None
    back = next((s for s in scene.after[:3] if not departs(s, loss) and not amplified(s, norm)), None)
    return Fact(back is not None, f"loss and gradient norm were {'' if back else 'not '}back within three steps")


def stays(scene: Scene) -> Fact | None:
    loss = scene.loss
    if loss is None or len(scene.after) < SOON:
        return None
    high = [step for step in scene.after if departs(step, loss) or loss.distance(step.loss) > FAR_SIGMA]
    says = f"{len(high)} of the {len(scene.after)} steps after it lie above the old level"
    return Fact(len(high) >= 0.8 * len(scene.after), says)


def from_start(scene: Scene) -> Fact | None:
    first = min((run.resumed_step for run in scene.view.runs), default=0)
    return Fact(scene.step.step - first <= 10, f"it is step {scene.step.step - first} of the run")


def non_finite(scene: Scene) -> Fact | None:
    step = scene.step
    if step.overflow:
        return Fact(True, "fp16: the loss scaler rejected the gradient")
    what = [f"{step.nonfinite_losses} losses"] * bool(step.nonfinite_losses)
    what += [f"the gradients of {step.nonfinite_grads} ranks"] * bool(step.nonfinite_grads)
    return Fact(bool(what), f"not finite: {listed(what)}" if what else "every loss and gradient is finite")


def amplification(scene: Scene) -> Fact | None:
    if scene.norm is None or not math.isfinite(scene.step.grad_norm):
        return None
    ratio = scene.step.grad_norm / scene.norm.middle if scene.norm.middle else math.inf
    return Fact(ratio > NORM_FACTOR, f"the gradient norm is {ratio:.1f} times its usual {scene.norm.middle:.3g}")


def found(scene: Scene) -> Fact | None:
    grave = [v for v in scene.step.verdicts if v.tier.severity > Tier.SMALL.severity]
    acted = scene.step.advised is not Action.APPLY
    open_ = [each for each in scene.episodes if each.tier.severity > Tier.SMALL.severity]
    reason = (grave[0].reason if grave else "") or scene.step.reason or (open_[0].reason if open_ else "")
    return Fact(bool(grave or acted or open_), reason or "no detector above `small`, and nothing was withheld")
