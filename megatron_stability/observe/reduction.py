"""The one collective of a step: an all-gather of a fixed vector a rank, combined locally in rank order.

A gather, not a reduce: every rank sees every rank's numbers, adds them in the same order and so gets the same bits,
and NaN travels as what it is beside a count that says so. (A MAX reduction may drop NaN: gloo's was seen to.)
float64 keeps step, token and sample counts exact up to 2^53.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist

from megatron_stability.observe.wide import Wide
from megatron_stability.records import Decision, StepRecord

#: Column order of the vector's scalar part; `Reduction.extra` follows, first the scalars, then what is `Wide`.
#: `loss_sum` is nats summed over the valid tokens that this rank alone speaks for.
COLUMNS = (
    "step",
    "first_sample",
    "samples",
    "loss_sum",
    "loss_tokens",
    "nonfinite_losses",
    "grad_norm",
    "nonfinite_norm",
    "nonfinite_grad",
    "overflow",
    "learning_rate",
    "history",
)
_AT = {name: i for i, name in enumerate(COLUMNS)}

#: How a signal of `LocalSignals.extra` is combined over the ranks that have one; NaN says that a rank has none.
Combine = Literal["max", "min", "sum", "norm"]  # norm: of the ranks' parts, the root of the sum of squares
How = Combine | Wide
WAYS: Mapping[Combine, Callable[[list[float]], float]] = MappingProxyType(
    {"max": max, "min": min, "sum": math.fsum, "norm": lambda parts: math.hypot(*parts)}
)
_NOTHING_EXTRA: Mapping[str, torch.Tensor | float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSignals:
    """What one rank saw of one step.

    Attributes:
        step: 1-based training iteration.
        first_sample: global index of the step's first sample.
        samples: global batch size.
        loss_sums_n2: [n, 2] float tensor: for each of this rank's n micro-batches the summed loss (nats) and the
            valid tokens; n = 0 on ranks that own no loss (not the last pipeline stage, or tensor rank > 0).
        grad_norm: the norm that Megatron computed before clipping; None where this rank has no gradient.
        grad_amax: the largest |g| in this rank's gradient buffers, NaN if one is NaN; None where there is none. The
            norm is blind to copies: a replicated parameter counts on tensor rank 0 only, a tied embedding on the first
            stage only.
        overflow: the fp16 loss scaler rejected the gradient.
        learning_rate: of the first parameter group; 0 on ranks without one.
        history: a digest of every record and decision so far, below 2^53: ranks that went apart show here.
        extra: further signals by name (`Reduction.extra` says which), scalars, or [columns] where they are `Wide`; NaN
            or absent where a rank has none.
    """

    step: int
    first_sample: int
    samples: int
    loss_sums_n2: torch.Tensor
    grad_norm: torch.Tensor | float | None
    grad_amax: torch.Tensor | float | None = None
    overflow: bool = False
    learning_rate: float = 0.0
    history: int = 0
    extra: Mapping[str, torch.Tensor | float] = field(default=_NOTHING_EXTRA)

    def pack(self, device: torch.device, extra: Sequence[str] = ()) -> torch.Tensor:
        """This rank's row, [len(COLUMNS) + len(extra)] float64 on `device`, made without a device-to-host copy."""
        sums_n2 = self.loss_sums_n2.to(device=device, dtype=torch.float64)
        finite_n2 = torch.isfinite(sums_n2)
        norm, amax = _scalar(self.grad_norm, device), _scalar(self.grad_amax, device)
        given = [self.extra.get(name, math.nan) for name in extra]
        known = [self.step, self.first_sample, self.samples, self.overflow, self.learning_rate, self.history]
        known += [math.nan if isinstance(value, torch.Tensor) else value for value in given]
        # All numbers that the host knows go to the device in one copy.
        host = torch.tensor(known, dtype=torch.float64).to(device, non_blocking=True).unbind()
        kept_n2 = torch.where(finite_n2, sums_n2, 0.0)  # a NaN micro-batch must not hide the others' loss
        return torch.stack(
            [
                *host[:3],
                kept_n2[:, 0].sum(),
                kept_n2[:, 1].sum(),
                (~finite_n2.all(dim=1)).sum().double(),
                torch.where(torch.isfinite(norm), norm, 0.0),
                (~torch.isfinite(norm)).double(),
                (~torch.isfinite(amax)).double(),
                *host[3:6],
                *(
                    _scalar(value, device) if isinstance(value, torch.Tensor) else on_device
                    for value, on_device in zip(given, host[6:], strict=True)
                ),
            ]
        )


def _scalar(value: torch.Tensor | float | None, device: torch.device) -> torch.Tensor:
    value = 0.0 if value is None else value
    return torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True).reshape(())


def combine(rows: Sequence[Sequence[float]], extra: Mapping[str, Combine] = MappingProxyType({})) -> StepRecord:
    """The record from all ranks' rows, in rank order; the same bits on every rank.

    Args:
        rows: [world][len(COLUMNS) + len(extra)], row r from rank r.
        extra: names and ways of the columns behind `COLUMNS`.

    Returns:
        The reduced record. `loss` is NaN if any micro-batch's loss was not finite or no target token was valid;
        `grad_norm` is the largest finite norm that a rank reported, NaN if any rank's was not finite.
    """

    def column(name: str) -> list[float]:
        return [row[_AT[name]] for row in rows]

    cursors = [tuple(row[_AT[c]] for c in ("step", "first_sample", "samples", "history")) for row in rows]
    tokens = sum(column("loss_tokens"))
    nonfinite_losses = int(sum(column("nonfinite_losses")))
    norms, grads = column("nonfinite_norm"), column("nonfinite_grad")
    nonfinite_grads = sum(bool(norm or grad) for norm, grad in zip(norms, grads, strict=True))
    bad_loss = nonfinite_losses > 0 or tokens <= 0
    return StepRecord(
        step=int(rows[0][_AT["step"]]),
        first_sample=int(rows[0][_AT["first_sample"]]),
        samples=int(rows[0][_AT["samples"]]),
        tokens=tokens,
        loss=math.nan if bad_loss else sum(column("loss_sum")) / tokens,
        grad_norm=math.nan if nonfinite_grads else max(column("grad_norm")),
        nonfinite_losses=nonfinite_losses,
        nonfinite_grads=nonfinite_grads,
        overflow=any(column("overflow")),
        learning_rate=max(column("learning_rate")),
        disagreeing_ranks=tuple(rank for rank, cursor in enumerate(cursors) if cursor != cursors[0]),
        culprit_ranks=_culprits(column("nonfinite_losses"), grads),
        signals=_signals(rows, extra),
    )


def _signals(rows: Sequence[Sequence[float]], extra: Mapping[str, Combine]) -> Mapping[str, float]:
    signals = {}
    for at, (name, how) in enumerate(extra.items(), len(COLUMNS)):
        values = [row[at] for row in rows if not math.isnan(row[at])]
        if values:
            signals[name] = WAYS[how](values)
    return MappingProxyType(signals)


def _culprits(nonfinite_losses: list[float], nonfinite_grads: list[float]) -> tuple[int, ...]:
    """Where it began: a loss is a rank's own, and makes every gradient behind it NaN, so it comes first."""
    flagged = nonfinite_losses if any(nonfinite_losses) else nonfinite_grads
    return tuple(rank for rank, count in enumerate(flagged) if count)


def chained(history: int, record: StepRecord, decision: Decision) -> int:
    """A 32-bit digest of all records and decisions so far; equal on ranks that went the same way.

    Args:
        history: the digest before this step, 0 at first.
        record: the step's, which holds its tokens.
        decision: what was done.
    """
    words = (
        f"{history} {record.step} {record.tokens!r} {record.loss!r} {record.grad_norm!r} {decision.action} "
        f"{decision.advised} {sorted(decision.parameters.items())}"
    )
    return zlib.crc32(words.encode())


@dataclass(frozen=True)
class Reduction:
    """`Pipeline.observe` for torch.distributed.

    Attributes:
        group: every rank that must agree; None where torch.distributed is not initialised (one process).
        device: where the collective's backend wants its tensors.
        extra: the signals that ranks may add, equal on every rank, and how each is combined.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    extra: Mapping[str, How] = field(default_factory=dict)

    @cached_property
    def _scalars(self) -> Mapping[str, Combine]:
        return {name: how for name, how in self.extra.items() if isinstance(how, str)}

    @cached_property
    def _wide(self) -> Mapping[str, Wide]:
        return {name: how for name, how in self.extra.items() if not isinstance(how, str)}

    @property
    def signals(self) -> frozenset[str]:
        """Names that records may have."""
        return frozenset(self._scalars).union(*(how.signals(name) for name, how in self._wide.items()))

    def __call__(self, local: LocalSignals) -> StepRecord:
        """One all-gather, one device-to-host copy."""
        row = self.row(local)
        if self.group is None:
            return self.record(row.cpu()[None])
        world = dist.get_world_size(self.group)
        rows = torch.empty(world * row.numel(), dtype=row.dtype, device=row.device)
        dist.all_gather_into_tensor(rows, row, group=self.group)
        return self.record(rows.cpu().view(world, -1))

    def row(self, local: LocalSignals) -> torch.Tensor:
        """What this rank gives to the all-gather, [columns] float64; as many on every rank and step."""
        parts = [local.pack(self.device, tuple(self._scalars))]
        for name, how in self._wide.items():
            value = local.extra.get(name)
            if value is None:
                parts.append(torch.full((how.columns,), math.nan, dtype=torch.float64, device=self.device))
            else:
                parts.append(torch.as_tensor(value, dtype=torch.float64).to(self.device).reshape(how.columns))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def record(self, rows: torch.Tensor) -> StepRecord:
        """The record from all ranks' rows, [world, columns] on the host."""
        at = len(COLUMNS) + len(self._scalars)
        record = combine(rows[:, :at].tolist(), self._scalars)
        signals, disagreeing = dict(record.signals), set(record.disagreeing_ranks)
        for name, how in self._wide.items():  # tensors still, for on most steps they are empty
            found, ranks = how.combine(name, rows[:, at : at + how.columns])
            signals |= found
            disagreeing = disagreeing or set(ranks)  # wrong weights make wrong outputs, on other ranks too
            at += how.columns
        if len(signals) == len(record.signals):
            return record
        return replace(record, signals=MappingProxyType(signals), disagreeing_ranks=tuple(sorted(disagreeing)))
