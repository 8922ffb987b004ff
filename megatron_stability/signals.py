"""The names in `StepRecord.signals` that detectors read: what each is, over what it is reduced, in which unit.

An observer that measures one of these puts it under this name on the steps on which it was measured. A detector whose
signal is absent from a record says nothing about that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SIGNALS: Mapping[str, str] = MappingProxyType(
    {
        "clip_grad": "Megatron's --clip-grad; gradient norm above which a step is clipped",
        "step_seconds": "wall time from the step's begin to its gate, maximum over ranks; seconds",
        "held_out": "number of sets evaluated at this step; present on the steps that evaluate only",
        "held_out/<set>": "validation loss of one set, beside `held_out`; nats a token",
        "grad_norm/layer_max": "largest L2 gradient norm of one decoder layer, over all stages",
        "grad_norm/layer_max/at": "its 1-based number",
        "grad_norm/layer_median": "median of the decoder layers' L2 gradient norms, over all stages",
        "param_norm": "L2 norm of all trainable parameters",
        "embedding_norm": "L2 norm of the word embedding's rows that are tokens",
        "attention/max_logit": "largest attention logit before softcap and mask, over layers, heads and ranks",
        "attention/min_entropy": "least mean attention entropy of a head, over layers and ranks; nats",
        "attention/nonfinite_heads": "heads whose largest logit was NaN or Inf, over all stages",
        "attention/nonpositive_heads": "heads without a positive logit, over all stages: dead, or measured wrongly",
        "qk_norm/max_gain": "max|γ| of QK-norm, over layers and ranks",
        "qk_clip/heads": "heads above the clip's limit, scaled if the step is applied, over all stages",
        "qk_clip/min_factor": "least γ = limit/S_max of a head, over layers and ranks; 1 where none is above",
        "fp8/saturation": "largest share of a tensor's elements at the format's maximum",
        "fp8/underflow": "largest share of a tensor's non-zero elements that became zero",
        "fp8/binades": "fewest binades from the least normal value of a format to a tensor's amax",
        "fp8/scale_age": "most steps a tensor's scale has stood still while its amax moved",
        "fp8/amax_rise": "largest amax over its own past mean",
        "fp8/amax_fall": "largest past mean of an amax over the amax",
        "fp8/gemms": "linear layers run in the step, over all ranks",
        "fp8/fallbacks": "of them, not quantized",
        "fp8/<signal>/at": "site where it began, `sites.Site.order`; absent where none is beyond",
        "moe/max_load": "largest tokens of an expert over the mean of its layer's experts, worst layer and rank",
        "moe/dropped": "share of token-expert assignments dropped, worst layer and rank",
        "moe/router_z": "mean logsumexp² of the router logits, worst layer and rank",
        "data/repeated": "largest share of repeated n-grams of a row of the batch",
        "data/entropy": "least token entropy of a row of the batch; nats",
        "data/next/repeated": "as data/repeated, of the batch after this step's",
        "data/next/entropy": "as data/entropy, of the batch after this step's; nats",
        "data/masked": "targets of the step that the skip list takes out of the loss",
        "ranks/weights": "ranks whose weights differ from their data-parallel replicas'",
        "ranks/expert_weights": "ranks whose expert weights differ from their replicas'",
        "ranks/compute": "ranks that make something else of a fixed micro-batch than their replicas",
    }
)
HELD_OUT = "held_out"
SETS = "held_out/"
