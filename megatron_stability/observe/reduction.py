"""What ranks tell each other about a step: two all-reduces of fixed width, and the record that follows from them.

Sums travel as exact integers and maxima as ordered keys (`exact.py`), so that the result has the same bits on every
rank, whatever the order of the reduction, and what a rank receives does not grow with their number. NaN travels as
what it is, a count beside a zero: a MAX reduction may drop NaN (gloo's was seen to). Which ranks are to blame is asked
for by a gather, in the steps only whose record says that there is something to blame; all ranks see that alike.
float64 keeps step, token and sample counts exact up to 2^53.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from megatron_stability.observe import exact
from megatron_stability.observe.wide import Wide
from megatron_stability.records import Decision, StepRecord
from megatron_stability.signals import Combine

#: What every rank must have in common, and the ranks are compared in with rank 0.
CURSOR: Final = ("step", "first_sample", "samples", "history")
#: Maxima of the scalar part: the cursor, the cursor negated, then these.
LARGEST: Final = (*CURSOR, *(f"-{name}" for name in CURSOR), "overflow", "learning_rate", "grad_norm")
#: What a rank says of itself where it is asked for names: its cursor, then these, then its digests.
OWN: Final = (*CURSOR, "nonfinite_losses", "nonfinite_grad")
NAMED: Final = 16  # ranks that a record names at most

How = Combine | Wide
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


def _scalar(value: torch.Tensor | float | None, device: torch.device) -> torch.Tensor:
    value = 0.0 if value is None else value
    return torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True).reshape(())


class Sent(NamedTuple):
    """What a rank gives: integers to be added, keys of which the largest counts, and what it would say of itself."""

    sums_s: torch.Tensor  # [s] int64
    keys_k: torch.Tensor  # [k] int64
    own_c: torch.Tensor  # [len(OWN) + digests] float64


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
        extra: the signals that ranks may add, equal on every rank, and how each is combined (NaN: a rank has none).
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

    @cached_property
    def _added(self) -> tuple[str, ...]:
        return tuple(name for name, how in self._scalars.items() if how in ("sum", "norm"))

    @property
    def signals(self) -> frozenset[str]:
        """Names that records may have."""
        return frozenset(self._scalars).union(*(how.signals(name) for name, how in self._wide.items()))

    def __call__(self, local: LocalSignals) -> StepRecord:
        """Two all-reduces, one device-to-host copy; a third collective where ranks are to be named."""
        sent = self.sent(local)
        if self.group is None:
            return self.record(sent, lambda: sent.own_c.cpu()[None])
        dist.all_reduce(sent.sums_s, dist.ReduceOp.SUM, group=self.group)
        dist.all_reduce(sent.keys_k, dist.ReduceOp.MAX, group=self.group)
        return self.record(sent, lambda: self._everyone(sent.own_c))

    def _everyone(self, own_c: torch.Tensor) -> torch.Tensor:
        """[world, columns] on the host. Collective."""
        world = dist.get_world_size(self.group)
        rows = torch.empty(world * own_c.numel(), dtype=own_c.dtype, device=own_c.device)
        dist.all_gather_into_tensor(rows, own_c, group=self.group)
        return rows.cpu().view(world, -1)

    def together(self, everyone: Sequence[Sent]) -> StepRecord:
        """The record of ranks that live in one process, as the collectives would make it.

        Args:
            everyone: what each rank gives, in their order.
        """
        sums_s = torch.stack([each.sums_s for each in everyone]).sum(0)
        keys_k = torch.stack([each.keys_k for each in everyone]).amax(0)
        return self.record(
            Sent(sums_s, keys_k, everyone[0].own_c), lambda: torch.stack([each.own_c for each in everyone])
        )

    # --- what a rank gives --------------------------------------------------------------------------------------

    def sent(self, local: LocalSignals) -> Sent:
        """Of the same shapes on every rank and step, made without a device-to-host copy."""
        sums_n2 = local.loss_sums_n2.to(device=self.device, dtype=torch.float64)
        finite_n2 = torch.isfinite(sums_n2)
        kept_n2 = torch.where(finite_n2, sums_n2, 0.0)  # a NaN micro-batch must not hide the others' loss
        norm, amax = _scalar(local.grad_norm, self.device), _scalar(local.grad_amax, self.device)
        given = [local.extra.get(name, math.nan) for name in self._scalars]
        cursor = [float(getattr(local, name)) for name in CURSOR]
        known = [*cursor, *(-value for value in cursor), float(local.overflow), local.learning_rate]
        known += [math.nan if isinstance(value, torch.Tensor) else float(value) for value in given]
        # All numbers that the host knows go to the device in one copy.
        host = torch.tensor(known, dtype=torch.float64).to(self.device, non_blocking=True)
        at = len(LARGEST) - 1
        values = {
            name: _scalar(value, self.device) if isinstance(value, torch.Tensor) else on_device
            for (name, value), on_device in zip(zip(self._scalars, given, strict=True), host[at:].unbind(), strict=True)
        }
        wide = [self._wide_part(local, name, how) for name, how in self._wide.items()]
        bad_losses = (~finite_n2.all(dim=1)).sum()
        bad_grad = ~torch.isfinite(amax)
        counts_2 = torch.stack([bad_losses, (bad_grad | ~torch.isfinite(norm)).to(torch.int64)])
        added = [values[name] if self._scalars[name] == "sum" else values[name].square() for name in self._added]
        sums = torch.cat([torch.stack([*kept_n2.sum(0), *added]), *(sums for sums, _, _ in wide)])
        largest = [_signed(values[name], how) for name, how in self._scalars.items()]
        largest.insert(0, torch.where(torch.isfinite(norm), norm, 0.0))
        keys = [host[:at], torch.stack(largest), *(keys for _, keys, _ in wide)]
        own = [host[: len(CURSOR)], torch.stack([bad_losses, bad_grad.to(torch.int64)]).double()]
        return Sent(
            torch.cat([counts_2, exact.to_limbs(sums).flatten()]),
            exact.to_keys(torch.cat(keys)),
            torch.cat([*own, *(value[:1] for _, _, value in wide)]),
        )

    def _wide_part(self, local: LocalSignals, name: str, how: Wide) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        value = local.extra.get(name)
        if value is None:
            value = torch.full((how.columns,), math.nan, dtype=torch.float64, device=self.device)
        value = torch.as_tensor(value, dtype=torch.float64).to(self.device).reshape(how.columns)
        return (*how.give(value), value)

    # --- what all ranks have from it ------------------------------------------------------------------------------

    def record(self, reduced: Sent, ask: Callable[[], torch.Tensor]) -> StepRecord:
        """The record, the same bits on every rank.

        Args:
            reduced: sums and maxima over all ranks.
            ask: collective; what each rank says of itself, [world, columns] on the host. Called where there is
                something to blame.

        Returns:
            The reduced record. `loss` is NaN if any micro-batch's loss was not finite or no target token was valid;
            `grad_norm` is the largest finite norm that a rank reported, NaN if any rank's was not finite.
        """
        everything = torch.cat([reduced.sums_s, reduced.keys_k]).cpu()
        sums_s, keys_k = everything[: reduced.sums_s.numel()], exact.from_keys(everything[reduced.sums_s.numel() :])
        nonfinite_losses, nonfinite_grads, *limbs = sums_s.tolist()
        sums = [exact.from_limbs(limbs[at : at + exact.WIDTH]) for at in range(0, len(limbs), exact.WIDTH)]
        largest = dict(zip(LARGEST, keys_k[: len(LARGEST)].tolist(), strict=True))
        signals, unequal = self._signals(sums[2:], keys_k[len(LARGEST) :])
        loss_sum, tokens = sums[:2]
        bad_loss = nonfinite_losses > 0 or tokens <= 0
        record = StepRecord(
            step=int(largest["step"]),
            first_sample=int(largest["first_sample"]),
            samples=int(largest["samples"]),
            tokens=tokens,
            loss=math.nan if bad_loss else loss_sum / tokens,
            grad_norm=math.nan if nonfinite_grads else largest["grad_norm"],
            nonfinite_losses=nonfinite_losses,
            nonfinite_grads=nonfinite_grads,
            overflow=largest["overflow"] > 0,
            learning_rate=largest["learning_rate"],
            signals=MappingProxyType(signals),
        )
        apart = any(largest[name] != -largest[f"-{name}"] for name in CURSOR)
        return self._naming(record, ask()) if apart or unequal or not record.finite else record

    def _signals(self, sums: Sequence[float], keys_k: torch.Tensor) -> tuple[dict[str, float], bool]:
        """Those that a rank measured, and whether replicas disagree."""
        added = dict(zip(self._added, sums, strict=False))
        signals = {}
        for (name, how), key in zip(self._scalars.items(), keys_k.tolist(), strict=False):
            if math.isnan(key):
                continue
            if name in added:
                signals[name] = math.sqrt(added[name]) if how == "norm" else added[name]
            else:
                signals[name] = -key if how == "min" else key
        at, key_at, unequal = len(added), len(self._scalars), False
        for name, wide in self._wide.items():
            found, differ = wide.take(name, sums[at : at + wide.sums], keys_k[key_at : key_at + wide.keys])
            signals |= found
            unequal = unequal or differ
            at, key_at = at + wide.sums, key_at + wide.keys
        return signals, unequal

    def _naming(self, record: StepRecord, own_rc: torch.Tensor) -> StepRecord:
        """With the ranks to blame, up to `NAMED`, from what each says of itself."""
        rows = own_rc.tolist()
        cursors = [row[: len(CURSOR)] for row in rows]
        disagreeing = [rank for rank, cursor in enumerate(cursors) if cursor != cursors[0]]
        signals = dict(record.signals)
        for at, (name, how) in enumerate(self._wide.items(), len(OWN)):
            outvoted = how.outvoted([row[at] for row in rows])
            if outvoted:
                signals[how.signals(name)[0]] = float(len(outvoted))
                disagreeing = disagreeing or sorted(outvoted)  # wrong weights make wrong outputs, on other ranks too
        step, first_sample, samples, _ = map(int, cursors[0])
        return replace(
            record,
            step=step,
            first_sample=first_sample,
            samples=samples,
            disagreeing_ranks=tuple(disagreeing[:NAMED]),
            culprit_ranks=_culprits([row[len(CURSOR)] for row in rows], [row[len(CURSOR) + 1] for row in rows]),
            signals=MappingProxyType(signals),
        )


def _signed(value: torch.Tensor, how: Combine) -> torch.Tensor:
    """What the largest is taken of: for a sum it only says whether a rank has one."""
    return -value if how == "min" else value


def _culprits(nonfinite_losses: list[float], nonfinite_grads: list[float]) -> tuple[int, ...]:
    """Where it began: a loss is a rank's own, and makes every gradient behind it NaN, so it comes first."""
    flagged = nonfinite_losses if any(nonfinite_losses) else nonfinite_grads
    return tuple(rank for rank, count in enumerate(flagged) if count)[:NAMED]
