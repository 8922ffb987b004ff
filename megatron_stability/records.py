"""What the rooms hand to each other: frozen records, identical on every rank.

Legend, used in every docstring and shape comment of this project:

    T  ranks of a tensor-parallel (TP) group      D  ranks of a data-parallel (DP) group     P  pipeline stages (PP)
    b  micro-batch size     s  sequence length    h  hidden size     H_q, H_kv  query / kv heads     d_k  head size
    V  vocabulary rows, V/T of them on a TP rank  L  layers

    loss            nats per valid target token, mean over the global batch (pure cross-entropy, no z-loss)
    grad_norm       L2 norm of the whole model's gradient before clipping, dimensionless
    step            1-based training iteration: the number Megatron prints, `args.iteration + 1` while it runs
    sample index    0-based position in the global order in which Megatron consumes samples (`consumed_train_samples`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

PASSED_OVER = "passed_over"  # Decision.parameters: the step's samples were drawn and nothing was computed
LEVEL = "level"  # Decision.parameters: of a rewind that may have met a level, of an APPLY that took it as one
_NO_SIGNALS: Mapping[str, float] = MappingProxyType({})


class Tier(StrEnum):
    """How bad a verdict is; the order below is the order of severity."""

    WATCH = "watch"
    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"
    NON_FINITE = "non_finite"
    SYSTEM = "system"  # ranks disagree: the process itself can't be trusted

    @property
    def severity(self) -> int:
        """0 (watch) to 5 (system)."""
        return list(Tier).index(self)


class Action(StrEnum):
    """What is done with a step; the order below is the order of precedence."""

    APPLY = "apply"
    SCALE_WEIGHT_DECAY = "scale_weight_decay"
    SCALE_LR = "scale_lr"
    SKIP = "skip"
    REWIND = "rewind"
    HALT = "halt"

    @property
    def precedence(self) -> int:
        """0 (apply) to 5 (halt)."""
        return list(Action).index(self)

    @property
    def updates_weights(self) -> bool:
        """Whether the optimizer step runs."""
        return self not in (Action.SKIP, Action.REWIND, Action.HALT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step as every rank sees it after the one reduction.

    `loss` and `grad_norm` are NaN exactly where the count beside them is not zero; finiteness is always judged by the
    counts, never by comparing the values. `signals` holds what optional observers add, by name (see `observe/`).
    """

    step: int
    first_sample: int
    samples: int
    tokens: float
    loss: float
    grad_norm: float
    nonfinite_losses: int = 0  # micro-batch losses that were NaN or Inf, summed over the ranks that own one
    nonfinite_grads: int = 0  # ranks whose gradient norm was NaN or Inf
    overflow: bool = False  # fp16: the loss scaler itself rejected the gradient
    learning_rate: float = 0.0
    disagreeing_ranks: tuple[int, ...] = ()  # ranks that differ in what must be equal: see `detect.ranks`
    culprit_ranks: tuple[int, ...] = ()  # ranks where something was non-finite before any reduction mixed it
    signals: Mapping[str, float] = field(default=_NO_SIGNALS)
    finite: bool = field(init=False, repr=False, compare=False)  # no NaN or Inf in any loss or gradient

    def __post_init__(self) -> None:
        """Every detector asks for `finite`, so it is worked out once."""
        finite = not (self.nonfinite_losses or self.nonfinite_grads or self.overflow)
        object.__setattr__(self, "finite", finite)

    @property
    def last_sample(self) -> int:
        """The sample index just past this step's."""
        return self.first_sample + self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTable:
    """Every layer with self-attention and every query head, after one step; rows follow `layers`, over all stages.

    NaN says that a value was not measured, or that a layer has fewer heads than the widest.
    """

    step: int
    layers: tuple[str, ...]  # paths in the model, 0-based numbers, e.g. "decoder.layers.7"
    max_logit_lh: tuple[tuple[float, ...], ...]  # before softcap, over micro-batches and ranks; inf: not finite
    entropy_lh: tuple[tuple[float, ...], ...]  # nats, mean over queries, least over data-parallel ranks
    factor_lh: tuple[tuple[float, ...], ...]  # least γ of the clips since the table before, 1 where none was made
    clips_lh: tuple[tuple[float, ...], ...]  # clips since the process began
    growth_lh: tuple[tuple[float, ...], ...]  # slope of ln max_logit over the last tables, 1 / (1000 steps)
    max_gain_l: tuple[float, ...]  # max|γ| of QK-norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one detector found in one step. A detector that found nothing returns None instead.

    `onset` is the step at which that may have begun, as far as the records say; 0: with `step`.
    """

    detector: str
    tier: Tier
    step: int
    value: float
    threshold: float
    reason: str  # one sentence, with the numbers and their units
    onset: int = 0


class Change(StrEnum):
    """What became of an episode in a step."""

    OPENED = "opened"
    WORSENED = "worsened"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Verdicts of one detector that belong together; equal on every rank.

    `tier`, `value`, `threshold` and `reason` are those of the worst verdict so far. `incident` is the first step of the
    earliest of the episodes that overlap, or that a rewind closed just before, so that one divergence has one number.
    """

    incident: int
    detector: str
    first_step: int
    last_step: int
    tier: Tier
    value: float
    threshold: float
    verdicts: int
    grave: int = 0  # of the verdicts, those that were LARGE or above
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done with a step, computed from its record alone, so equal on every rank.

    `advised` is what the policy would do in `act` mode; it differs from `action` only in `observe` mode.
    """

    step: int
    action: Action
    advised: Action
    reason: str
    verdicts: tuple[Verdict, ...] = ()
    parameters: Mapping[str, float] = field(default=_NO_SIGNALS)  # factor, steps, ... of the action

    @property
    def updates_weights(self) -> bool:
        """Whether the optimizer step runs."""
        return self.action.updates_weights

    @property
    def told(self) -> str:
        """The action in capitals, with the advised one where that is another."""
        taken = self.action.upper()
        return taken if self.action is self.advised else f"{taken} (would {self.advised.upper()})"


def encode_float(value: float) -> float | str:
    """A float for strict JSON: NaN and infinities become the strings "nan", "inf", "-inf"."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def decode_float(value: float | str) -> float:
    """The inverse of `encode_float`."""
    return float(value)
