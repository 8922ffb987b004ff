"""The signals of a step: each one's name, way over ranks, unit and sentence, once.

An observer that measures one of these puts it under this name on the steps on which it was measured, and gives its
`ways(...)` to the one reduction. A detector whose signal is absent from a record says nothing about that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

#: How ranks that have a value are combined; norm: the root of the sum of the parts' squares.
Combine = Literal["max", "min", "sum", "norm"]


class Signal(NamedTuple):
    """A row of the table.

    Attributes:
        way: how ranks are combined; "wide" where `observe/wide.py` makes it of more than one number.
        unit: of the value; empty for a count, a share or a ratio.
        says: what it is.
        notable: from where on it is worth a name, where a place goes with it: the mildest default of its detector.
    """

    way: Combine | Literal["wide"]
    unit: str
    says: str
    notable: float | None = None


_Row = tuple[Combine | Literal["wide"], str, str] | tuple[Combine, str, str, float]  # of `Signal`
_ROWS: dict[str, _Row] = {
    "clip_grad": ("max", "", "Megatron's --clip-grad; gradient norm above which a step is clipped"),
    "step_seconds": ("max", "s", "wall time from the step's begin to its gate"),
    "held_out": ("max", "", "number of sets evaluated at this step; present on the steps that evaluate only"),
    "held_out/<set>": ("max", "nats a token", "validation loss of one set, beside `held_out`"),
    "grad_norm/layer_max": ("wide", "", "largest L2 gradient norm of one decoder layer, over all stages"),
    "grad_norm/layer_max/at": ("wide", "1-based layer", "where it was"),
    "grad_norm/layer_median": ("wide", "", "median of the decoder layers' L2 gradient norms, over all stages"),
    "param_norm": ("norm", "", "L2 norm of all trainable parameters"),
    "embedding_norm": ("norm", "", "L2 norm of the word embedding's rows that are tokens"),
    "embedding/rows_clipped": ("max", "", "rows clipped after the step before, the most of a rank's shard"),
    "log_z/weight": ("sum", "tokens", "weight of the two sums below: valid tokens of the last stage"),
    "log_z/sum": ("sum", "nats x tokens", "sum of log Z, the log-partition of the output softmax"),
    "log_z/square_sum": ("sum", "nats^2 x tokens", "sum of log² Z, of which the z-loss is made"),
    "log_z/max": ("max", "nats", "largest log Z of a token"),
    "attention/max_logit": ("max", "", "largest attention logit before softcap and mask, over all heads"),
    "attention/min_entropy": ("min", "nats", "least mean attention entropy of a head, over layers and ranks"),
    "attention/nonfinite_heads": ("sum", "heads", "heads whose largest logit was NaN or Inf, over all stages"),
    "attention/nonpositive_heads": ("sum", "heads", "heads without a positive logit: dead, or measured wrongly"),
    "qk_norm/max_gain": ("max", "", "max|γ| of QK-norm, over layers and ranks"),
    "qk_clip/heads": ("sum", "heads", "heads above the clip's limit, scaled if the step is applied"),
    "qk_clip/min_factor": ("min", "", "least γ = limit/S_max of a head; 1 where none is above"),
    "fp8/saturation": ("max", "share", "largest share of a tensor's elements at the format's maximum", 0.001),
    "fp8/underflow": ("max", "share", "largest share of a tensor's non-zero elements that became zero", 0.1),
    # Values at a tensor's rms carry its products; amax / rms is about 4 for a Gaussian and up to 1000 where activations
    # have massive outliers (Sun et al., arXiv:2402.17762). E4M3 has 14.8 binades, E5M2 29.8.
    "fp8/binades": (
        "min",
        "binades",
        "fewest binades from the least normal value of a format to a tensor's amax",
        10.0,
    ),
    "fp8/scale_age": ("max", "steps", "most steps a tensor's scale has stood still while its amax moved", 1000.0),
    "fp8/amax_rise": ("max", "", "largest amax over its own past mean", 16.0),
    "fp8/amax_fall": ("max", "", "largest past mean of an amax over the amax", 256.0),
    "fp8/gemms": ("sum", "", "linear layers run in the step, over all ranks"),
    "fp8/fallbacks": ("sum", "", "of them, not quantized"),
    "moe/max_load": ("max", "", "tokens of the busiest expert over its layer's mean, worst layer and rank"),
    "moe/dropped": ("max", "share", "share of token-expert assignments dropped, worst layer and rank"),
    "moe/router_z": ("max", "", "mean logsumexp² of the router logits, worst layer and rank"),
    "data/repeated": ("max", "share", "largest share of repeated n-grams of a row of the batch"),
    "data/entropy": ("min", "nats", "least token entropy of a row of the batch"),
    "data/next/repeated": ("max", "share", "as data/repeated, of the batch after this step's"),
    "data/next/entropy": ("min", "nats", "as data/entropy, of the batch after this step's"),
    "data/masked": ("max", "tokens", "targets of the step that the skip list takes out of the loss"),
    "data/outside_vocabulary": ("max", "token id", "largest id that is no token; the run ends before it is applied"),
    "ranks/weights": ("wide", "ranks", "ranks whose weights differ from their data-parallel replicas'"),
    "ranks/expert_weights": ("wide", "ranks", "ranks whose expert weights differ from their replicas'"),
    "ranks/compute": ("wide", "ranks", "ranks that make something else of a fixed micro-batch than their replicas"),
}
_TABLE = {name: Signal(*columns) for name, columns in _ROWS.items()}
#: A place goes with each of these: `<signal>/at`, the first site, in the order of a step, whose value is `notable`.
PLACED: Final = tuple(name for name, row in _TABLE.items() if row.notable is not None)
_TABLE |= {f"{name}/at": Signal("min", "`sites.Site.order`", f"site where {name} began") for name in PLACED}

SIGNALS: Mapping[str, Signal] = MappingProxyType(_TABLE)
HELD_OUT = "held_out"
SETS = "held_out/"


def notable(name: str) -> float:
    """From where on a placed signal's value is worth a place."""
    value = SIGNALS[name].notable
    assert value is not None, f"{name} has no place"
    return value


def row(name: str) -> Signal:
    """The row of a signal; one of a set of names, such as `held_out/web`, has the row of its family."""
    return SIGNALS[f"{SETS}<set>" if name.startswith(SETS) else name]


def ways(names: Iterable[str]) -> Mapping[str, Combine]:
    """How each of `names` is combined over ranks, for an observer's declaration."""
    found: dict[str, Combine] = {}
    for name in names:
        way = row(name).way
        assert way != "wide", f"{name} is made in observe/wide.py"
        found[name] = way
    return MappingProxyType(found)
