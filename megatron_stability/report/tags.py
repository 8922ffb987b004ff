"""Tags of TensorBoard and W&B: `stability/FAMILY/NAME`, in the words of the ledger.

What a reader wants is written, not what it is made of: means, not sums and weights. Of layers and heads there is
nothing at defaults, for a deep model has thousands; the ledger and the report have them (`record.writer_tags`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from megatron_stability.records import Action, AttentionTable, Decision, StepRecord
from megatron_stability.signals import HELD_OUT, SIGNALS

PREFIX: Final = "stability/"
EPISODES, DECISIONS = f"{PREFIX}text/episodes", f"{PREFIX}text/decisions"
MOST = 300  # tags of a run at defaults
Detail = Literal["run", "layers", "heads"]


class Tag(NamedTuple):
    """A row of docs/tags.md.

    Attributes:
        unit: of the value; empty for a count, a share or a ratio.
        when: at which steps it is written.
        says: what it is.
    """

    unit: str
    when: str
    says: str


EVERY = "every step"
_ACTIONS = ", ".join(f"{action.precedence} {action.value.replace('_', ' ')}" for action in Action)
#: Made of a record and its decision.
OWN: Final[Mapping[str, Tag]] = MappingProxyType(
    {
        "step/loss": Tag("nats a token", EVERY, "loss, the mean over the step's valid tokens"),
        "step/grad_norm": Tag("", EVERY, "global L2 gradient norm before clipping"),
        "step/learning_rate": Tag("", EVERY, "of the step itself; Megatron's own curve is the next step's"),
        "step/action": Tag("", EVERY, f"what was done: {_ACTIONS}"),
        "step/advised": Tag("", EVERY, "what the policy would do in `act` mode; as step/action"),
        "step/verdicts": Tag("", EVERY, "detectors that spoke"),
        "step/open_episodes": Tag("", EVERY, "episodes that are open"),
        "step/generation": Tag("", EVERY, "rewinds of this process so far"),
        "step/tokens_per_second": Tag("tokens / s", EVERY, "valid tokens of the step over `step/step_seconds`"),
    }
)
#: Made of sums over ranks, which are not written.
DERIVED: Final[Mapping[str, Tag]] = MappingProxyType(
    {
        "log_z/mean": Tag("nats", EVERY, "mean over valid tokens of log Z, the log-partition of the output softmax"),
        "log_z/mean_square": Tag("nats^2", EVERY, "mean over valid tokens of log² Z"),
        "log_z/z_loss": Tag("nats a token", EVERY, "what the z-loss adds to the loss: β times log_z/mean_square"),
    }
)
HIDDEN: Final = frozenset({"log_z/weight", "log_z/sum", "log_z/square_sum", HELD_OUT})

_TableField = Literal["max_logit_lh", "entropy_lh", "growth_lh", "factor_lh", "clips_lh"]
#: Of each layer and head: the table's field, what stands for a layer among its heads, and the row.
CURVES: Final[Mapping[str, tuple[_TableField, Callable[[Sequence[float]], float], Tag]]] = MappingProxyType(
    {
        "attention/max_logit": ("max_logit_lh", max, Tag("", "", "largest attention logit before softcap and mask")),
        "attention/min_entropy": ("entropy_lh", min, Tag("nats", "", "least mean attention entropy")),
        "attention/logit_growth": ("growth_lh", max, Tag("1 / 1000 steps", "", "slope of ln max_logit")),
        "qk_clip/min_factor": ("factor_lh", min, Tag("", "", "least γ since the table before")),
        "qk_clip/clips": ("clips_lh", sum, Tag("", "", "clips since the process began")),
    }
)
MAX_GAIN = "qk_norm/max_gain"

#: When a signal is measured, by the beginning of its name; the longest that fits.
_WHEN = {
    "": "every step on which it is measured",
    "clip_grad": EVERY,
    "step_seconds": EVERY,
    "held_out": "the step after an evaluation",
    "grad_norm/": "every `observe.norms.layers_every` steps",
    "param_norm": "every `observe.norms.params_every` steps",
    "embedding_norm": "every `observe.norms.params_every` steps",
    "embedding/rows_clipped": "every step, with `model.embedding_norm_clip`",
    "log_z/": "every step, with a z-loss or a final softcap",
    "attention/": "with `qk_clip` or `observe.attention`, every step on which logits are measured",
    "attention/min_entropy": "every `observe.attention.every` steps",
    "qk_": "with `qk_clip` or `observe.attention`, every step on which logits are measured",
    "fp8/": "every step of an FP8 run on which it is sampled",
    "moe/": "every `observe.moe.every` steps of a run with experts",
    "data/": "every step, with `observe.batch`",
    "ranks/weights": "every `observe.replicas.weights_every` steps",
    "ranks/expert_weights": "every `observe.replicas.weights_every` steps",
    "ranks/compute": "every `observe.replicas.compute_every` steps",
}


def tag_of(signal: str) -> str:
    """The tag, without `PREFIX`, of a signal: its own name; one without a family is the step's."""
    return signal if "/" in signal else f"step/{signal}"


def rows() -> dict[str, Tag]:
    """Every tag that a run may write at defaults, without `PREFIX`; of a set of names its pattern."""
    found = dict(OWN)
    for name, row in SIGNALS.items():
        if name not in HIDDEN:
            when = _WHEN[max((start for start in _WHEN if name.startswith(start)), key=len)]
            found[tag_of(name)] = Tag(row.unit, when, row.says)
    when = _WHEN["log_z/"]
    found |= {name: row._replace(when=when) for name, row in DERIVED.items()}
    return found


def scalars(record: StepRecord, decision: Decision, *, z_loss: float, generation: int, open_: int) -> dict[str, float]:
    """What is written of a finished step.

    Args:
        record: its record.
        decision: what was done with it.
        z_loss: β of the z-loss; 0: there is none.
        generation: rewinds of this process.
        open_: episodes that are open.

    Returns:
        Values by whole tag; NaN as NaN.
    """
    signals = record.signals
    found = {
        "step/loss": record.loss,
        "step/grad_norm": record.grad_norm,
        "step/learning_rate": record.learning_rate,
        "step/action": float(decision.action.precedence),
        "step/advised": float(decision.advised.precedence),
        "step/verdicts": float(len(decision.verdicts)),
        "step/open_episodes": float(open_),
        "step/generation": float(generation),
    }
    found |= {tag_of(name): value for name, value in signals.items() if name not in HIDDEN}
    seconds = signals.get("step_seconds", 0.0)
    if seconds > 0:
        found["step/tokens_per_second"] = record.tokens / seconds
    weight = signals.get("log_z/weight", 0.0)
    if weight > 0:
        found["log_z/mean"] = signals["log_z/sum"] / weight
        found["log_z/mean_square"] = signals["log_z/square_sum"] / weight
        if z_loss:
            found["log_z/z_loss"] = z_loss * found["log_z/mean_square"]
    return {PREFIX + name: value for name, value in found.items()}


def table_scalars(table: AttentionTable, detail: Detail) -> dict[str, float]:
    """A scalar for each curve and layer, e.g. "stability/attention/max_logit/decoder.layers.7"; NaN is left out.

    Args:
        table: of one step.
        detail: "run": nothing; "layers"; "heads": a scalar for each head too, e.g. "…/decoder.layers.7/head_3".
    """
    found: dict[str, float] = {}
    if detail == "run":
        return found
    for at, layer in enumerate(table.layers):
        for name, (field, over_heads, _) in CURVES.items():
            known = {f"head_{head}": v for head, v in enumerate(getattr(table, field)[at]) if not math.isnan(v)}
            if known:
                found[f"{PREFIX}{name}/{layer}"] = over_heads(list(known.values()))
            if detail == "heads":
                found |= {f"{PREFIX}{name}/{layer}/{head}": value for head, value in known.items()}
        if not math.isnan(table.max_gain_l[at]):
            found[f"{PREFIX}{MAX_GAIN}/{layer}"] = table.max_gain_l[at]
    return found


def layout() -> dict[str, dict[str, list[object]]]:
    """TensorBoard's custom-scalars page: what belongs on one chart, in the order in which a person looks."""

    def chart(*names: str) -> list[object]:
        return ["Multiline", [f"{PREFIX}{name}$" for name in names]]

    return {
        "Stability": {
            "loss": chart("step/loss", "held_out/.*"),
            "gradient norm": chart("step/grad_norm", "step/clip_grad", "grad_norm/layer_max", "grad_norm/layer_median"),
            "learning rate": chart("step/learning_rate"),
            "decisions": chart("step/action", "step/advised", "step/open_episodes"),
            "log Z": chart("log_z/mean", "log_z/max"),
            "attention logits": chart("attention/max_logit"),
            "attention entropy": chart("attention/min_entropy"),
            "QK-clip": chart("qk_clip/min_factor"),
            "weights": chart("step/param_norm", "step/embedding_norm"),
            "FP8": chart("fp8/saturation", "fp8/underflow"),
            "experts": chart("moe/max_load", "moe/dropped"),
            "data": chart("data/repeated", "data/entropy"),
            "tokens per second": chart("step/tokens_per_second"),
        }
    }
