"""Facts of what was changed: the learning rate, and what restarts set anew."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from megatron_stability.explain.facts.fact import SOON, Fact, Reader
from megatron_stability.explain.scene import Scene

OPTIMIZER: Final = (
    "adam_",
    "weight_decay",
    "clip_grad",
    "optimizer",
    "muon_",
    "sgd_",
    "decoupled_",
    "start_weight_decay",
)
RATE: Final = ("lr", "min_lr", "max_lr", "lr_", "decoupled_lr", "override_opt", "global_batch_size", "step_batch_size")
TOKENS: Final = ("tokenizer", "vocab", "merge_file", "reset_", "eod_mask", "padded_vocab")


def rate_jumped(scene: Scene) -> Fact | None:
    """A step of the schedule, not its warm-up: the rate rose by half or more at once."""
    rates = [(s.step, s.learning_rate) for s in (*scene.before[-50:], scene.step) if s.learning_rate > 0]
    if len(rates) < 2:
        return None
    pairs = itertools.pairwise(rates)
    jumps = [(at, old, new) for (_, old), (at, new) in pairs if new > 1.5 * old and new - old > 0.2 * rates[-1][1]]
    if not jumps:
        return Fact(False, f"the learning rate moved smoothly, to {rates[-1][1]:.3g}")
    at, old, new = jumps[-1]
    return Fact(
        at > scene.first_step + 5 or at == scene.first_step,
        f"the learning rate rose from {old:.3g} to {new:.3g} at step {at}",
    )


def at_peak(scene: Scene) -> Fact | None:
    if found := scene.spoke("lr_peak"):
        return Fact(True, found[0])
    rates = [step.learning_rate for step in (*scene.before, scene.step)]
    if len(rates) < SOON or not max(rates) > 0:
        return None
    share = scene.step.learning_rate / max(s.learning_rate for s in scene.view.steps)
    rising = rates[-1] >= max(rates) and rates[-1] > 1.02 * rates[-SOON]
    says = f"the learning rate is at {share:.0%} of the run's highest, and {'rises' if rising else 'does not rise'}"
    return Fact(share > 0.9 and (rising or max(rates) > 1.02 * rates[0]), says)


def changed(prefixes: Sequence[str] | None, kinds: Sequence[str] = ("settings",)) -> Reader:
    """A restart changed a setting whose name begins so; None: one that no other list here names, of the model's."""
    known = (*OPTIMIZER, *RATE, *TOKENS)

    def read(scene: Scene) -> Fact | None:
        runs = [run for run in scene.view.runs if run.generation <= scene.step.generation]
        if not runs or not any(getattr(runs[-1], kind) for kind in kinds):
            return None
        named = [
            each
            for each in scene.changes
            if each.kind in kinds
            and (each.name.startswith(tuple(prefixes)) if prefixes else not each.name.startswith(known))
        ]
        if not named:
            return Fact(False, "no restart changed it")
        return Fact(True, "; ".join(str(each) for each in named[:3]))

    return read


def restarted(scene: Scene) -> Fact | None:
    if not scene.view.runs:
        return None
    since = scene.step.step - scene.first_step + 1
    soon = scene.first_step > 1 and since <= SOON
    return Fact(soon, f"the process had made {since} step{'s' * (since > 1)} since its start")
