"""Faults on purpose: what a drill, the quickstart and the tests inject into a real run.

    --drill-fault scale:step=60,factor=50        every gradient of step 60 is 50 times too large (the loss is not)
    --drill-fault nan:step=160,rank=2            one element of one gradient on rank 2 is NaN in step 160
    --drill-fault inf:step=160,rank=2            the same with Inf
    --drill-fault nan-loss:step=50,rank=3        the loss itself is NaN on rank 3 (a rank that owns one)

A fault repeats when Megatron's rerun machine runs its step again, as a bad batch would. Hooks sit on the instances
that a model builder hands over; nothing of Megatron is replaced.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

KINDS = ("scale", "nan", "inf", "nan-loss")


@dataclass(frozen=True)
class Fault:
    """One fault at one 1-based step; `rank` None means every rank."""

    kind: str
    step: int
    rank: int | None = None
    factor: float = 50.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From the flag's text; argparse turns the error into its own sentence."""
        kind, _, rest = text.partition(":")
        try:
            fields = dict(part.split("=") for part in rest.split(",") if part)
            unknown = set(fields) - {"step", "rank", "factor"}
            if kind not in KINDS or unknown or "step" not in fields:
                raise ValueError
            rank = int(fields["rank"]) if "rank" in fields else None
            return cls(kind, int(fields["step"]), rank, float(fields.get("factor", 50.0)))
        except ValueError:
            raise ArgumentTypeError(
                f"{text!r} is not KIND:step=N[,rank=R][,factor=F] with KIND one of {', '.join(KINDS)}"
            ) from None

    def strikes(self, args: Namespace) -> bool:
        """Whether it strikes this rank in the step that runs now."""
        return args.curr_iteration + 1 == self.step and self.rank in (None, dist.get_rank())


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--drill-fault`, which may be given more than once."""
    group = parser.add_argument_group("drills")
    group.add_argument("--drill-fault", action="append", default=[], metavar="KIND:step=N[,rank=R][,factor=F]")
    return parser


def faults(args: Namespace) -> list[Fault]:
    """The faults asked for; text on `args`, since checkpoints keep args and load primitives only."""
    return [Fault.parse(text) for text in args.drill_fault]


def hook_gradients(model: torch.nn.Module, args: Namespace) -> None:
    """Let NaN and Inf faults write to the first element of the model chunk's first trainable gradient."""
    wanted = [fault for fault in faults(args) if fault.kind in ("nan", "inf")]
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if not wanted or parameter is None:
        return

    def strike(grad: torch.Tensor) -> torch.Tensor:
        for fault in wanted:
            if fault.strikes(args):
                grad = grad.clone()
                grad.view(-1)[0] = math.nan if fault.kind == "nan" else math.inf
        return grad

    parameter.register_hook(strike)


def scale_gradient(loss: torch.Tensor, args: Namespace) -> torch.Tensor:
    """The same loss with a scaled gradient, or a NaN loss, where a fault strikes; the very same tensor elsewhere."""
    for fault in faults(args) if torch.is_grad_enabled() else ():
        if fault.strikes(args):
            loss = loss * math.nan if fault.kind == "nan-loss" else loss
            loss = _Scale.apply(loss, fault.factor) if fault.kind == "scale" else loss
    return loss


class _Scale(torch.autograd.Function):
    """Identity forward, gradient times `factor`."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return loss.clone()  # the schedule divides it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None
