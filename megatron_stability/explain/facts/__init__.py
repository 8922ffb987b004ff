"""The facts that triage weighs: each is taken from an incident's scene, or said not to have been measured.

A fact holds, does not hold, or is unknown; the sentence says the numbers. `rules.py` weighs them.
"""

from __future__ import annotations

from typing import Final

from megatron_stability.explain.facts import changes, model, order, ranks_and_batch, replayed
from megatron_stability.explain.facts.fact import Fact, Measured
from megatron_stability.explain.scene import Scene

__all__ = ["FACTS", "Fact", "gather"]

_REPLAY = "a replay with branch {}, given by --replay"
_ALWAYS = ""  # measured in every run
FACTS: Final[dict[str, Measured]] = {
    "found": Measured(order.found, _ALWAYS),
    "non_finite": Measured(order.non_finite, _ALWAYS),
    "from_start": Measured(order.from_start, _ALWAYS),
    "sudden": Measured(order.sudden, "at least 5 steps before it"),
    "norm_first": Measured(order.norm_first, "at least 5 steps before it"),
    "amplified": Measured(order.amplification, "at least 5 steps before it"),
    "by_itself": Measured(order.by_itself, "an applied step, and three after it"),
    "gone_when_withheld": Measured(order.gone_when_withheld, "a withheld step, and three after it"),
    "stays": Measured(order.stays, "20 steps after it: --stability-mode observe"),
    "ranks_differ": Measured(ranks_and_batch.ranks_differ, "--stability-observe-replicas-weights-every 10"),
    "compute_differs": Measured(ranks_and_batch.compute_differs, "--stability-observe-replicas-compute-every 10"),
    "few_culprits": Measured(ranks_and_batch.few_culprits, "more than one rank, and a non-finite gradient"),
    "slow": Measured(ranks_and_batch.slow, "at least 5 steps before it"),
    "data_odd": Measured(ranks_and_batch.data_odd, "--stability-observe-batch-enabled true"),
    "tokens_changed": Measured(ranks_and_batch.tokens_changed, "at least 5 steps before it"),
    "recurs_with_samples": Measured(ranks_and_batch.recurs_with_samples, "a replay with the same samples"),
    "rate_jumped": Measured(changes.rate_jumped, "at least 2 steps before it"),
    "at_peak": Measured(changes.at_peak, "at least 20 steps before it"),
    "optimizer_changed": Measured(changes.changed(changes.OPTIMIZER), "a ledger of this version, from the start"),
    "rate_changed": Measured(changes.changed(changes.RATE), "a ledger of this version, from the start"),
    "tokens_setting_changed": Measured(changes.changed(changes.TOKENS), "a ledger of this version, from the start"),
    "model_changed": Measured(changes.changed(None), "a ledger of this version, from the start"),
    "data_changed": Measured(changes.changed(("data_path", "train_data", "split", "seed", "mock"), ("data",)), _ALWAYS),
    "code_changed": Measured(changes.changed(("",), ("versions",)), _ALWAYS),
    "restarted": Measured(changes.restarted, _ALWAYS),
    "logits_grew": Measured(model.logits, "--stability-observe-attention-enabled true"),
    "log_z_grew": Measured(model.log_z, "--stability-model-z-loss 1e-4"),
    "one_layer": Measured(model.one_layer, "--stability-observe-norms-layers-every 10"),
    "fp8_limits": Measured(model.fp8, "--stability-fp8-sample-every 10, in an FP8 run"),
    "weights_grew": Measured(model.grows, "--stability-observe-norms-params-every 10"),
    "held_out_rose": Measured(model.held_out, "--eval-interval 100, with a validation set"),
    "reproduces": Measured(replayed.reproduces, _REPLAY.format("replay")),
    "skip_clears": Measured(replayed.clears("skip"), _REPLAY.format("skip")),
    "control_clears": Measured(replayed.clears("control"), _REPLAY.format("control")),
    "lr_clears": Measured(replayed.clears("lr"), _REPLAY.format("lr")),
    "bf16_clears": Measured(replayed.clears("bf16"), _REPLAY.format("bf16")),
    "moments_clear": Measured(replayed.clears("moments"), _REPLAY.format("moments")),
}


def gather(scene: Scene) -> dict[str, Fact | None]:
    """Every fact of an incident; None: not measured."""
    return {name: each.read(scene) for name, each in FACTS.items()}
