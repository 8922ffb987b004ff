"""Faults on purpose: what a drill, the quickstart and the tests inject into a real run.

    --drill-fault scale:step=60,factor=50        every gradient of step 60 is 50 times too large (the loss is not)
    --drill-fault nan:step=160,rank=2            one element of one gradient on rank 2 is NaN in step 160
    --drill-fault inf:step=160,rank=2,param=7    Inf, in the gradient of that model chunk's parameter 7 (0: its first)
    --drill-fault nan:step=9,rank=1,chunk=1      on that virtual pipeline chunk only; else on each chunk of the rank
    --drill-fault wrong:step=9,rank=1,factor=1.01  one gradient on rank 1 is finite, but 1.01 times what it should be
    --drill-fault nan-loss:step=50,rank=3        the loss itself is NaN on rank 3 (a rank that owns one); inf-loss too
    --drill-fault page:step=9                    every row of step 9 is one phrase of 16 tokens, again and again
    --drill-fault noise:step=9                   its targets are random tokens

A fault repeats when Megatron's rerun machine runs its step again, as a bad batch would. Hooks sit on the instances
that a model builder hands over; nothing of Megatron is replaced.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_stability.errors import UsageError

KINDS = ("scale", "nan", "inf", "wrong", "page", "noise", "nan-loss", "inf-loss")
VALUES = {"nan": math.nan, "inf": math.inf, "nan-loss": math.nan, "inf-loss": math.inf}
SHAPE = "KIND:step=N[,rank=R][,factor=F][,param=I][,chunk=C]"


@dataclass(frozen=True)
class Fault:
    """One fault at one 1-based step; `rank` None means every rank, `chunk` None every model chunk of a rank.

    `param` counts a chunk's trainable parameters, and on from the first one after the last.
    """

    kind: str
    step: int
    rank: int | None = None
    factor: float = 50.0
    param: int = 0
    chunk: int | None = None

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From the flag's text; argparse turns the error into its own sentence."""
        kind, _, rest = text.partition(":")
        try:
            fields = dict(part.split("=") for part in rest.split(",") if part)
            numbers = {name: int(fields.pop(name)) for name in ("step", "rank", "param", "chunk") if name in fields}
            factor = float(fields.pop("factor", 50.0))
            if kind not in KINDS or fields or "step" not in numbers or min(numbers.values()) < 0:
                raise ValueError
            return cls(kind, factor=factor, **numbers)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not {SHAPE} with KIND one of {', '.join(KINDS)}") from None

    def strikes(self, args: Namespace) -> bool:
        """Whether it strikes this rank in the step that runs now."""
        return args.curr_iteration + 1 == self.step and self.rank in (None, dist.get_rank())


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--drill-fault`, which may be given more than once."""
    group = parser.add_argument_group("drills")
    group.add_argument("--drill-fault", action="append", default=[], metavar=SHAPE)
    return parser


def faults(args: Namespace) -> list[Fault]:
    """The faults asked for; text on `args`, since checkpoints keep args and load primitives only."""
    return [Fault.parse(text) for text in args.drill_fault]


def refuse_unreadable(texts: Sequence[str]) -> None:
    """Raise for a fault that can't be read.

    Raises:
        UsageError: names the flag and the kinds.
    """
    try:
        for text in texts:
            Fault.parse(text)
    except ArgumentTypeError as error:
        raise UsageError(f"--drill-fault {error}") from None


def hook_gradients(model: torch.nn.Module, args: Namespace, chunk: int | None = None) -> None:
    """Let NaN and Inf write to the first element of a gradient, and a factor to all of it.

    Args:
        model: one model chunk, before Megatron wraps it.
        args: Megatron's.
        chunk: its number, None without virtual pipeline (then it is chunk 0).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for fault in faults(args) if parameters else ():
        if fault.kind in ("nan", "inf", "wrong") and fault.chunk in (None, chunk or 0):
            parameters[fault.param % len(parameters)].register_hook(partial(_strike, fault, args))


def _strike(fault: Fault, args: Namespace, grad: torch.Tensor) -> torch.Tensor:
    if fault.strikes(args):
        if fault.kind == "wrong":
            return grad * fault.factor
        grad = grad.clone()
        grad.view(-1)[0] = VALUES[fault.kind]
    return grad


def corrupt(batch: dict[str, torch.Tensor], args: Namespace) -> dict[str, torch.Tensor]:
    """The same micro-batch, or one with bad rows where a fault strikes; of a pipeline, first and last stage alike.

    Args:
        batch: `tokens` and `labels` [b, s], and more.
        args: Megatron's.
    """
    for fault in faults(args) if torch.is_grad_enabled() and "tokens" in batch else ():
        if fault.strikes(args) and fault.kind == "page":
            phrase = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device) % 16
            batch = batch | {name: batch[name][:, phrase] for name in ("tokens", "labels")}
        elif fault.strikes(args) and fault.kind == "noise":
            draw = torch.Generator().manual_seed(fault.step)
            labels = torch.randint(int(batch["labels"].max()) + 1, batch["labels"].shape, generator=draw)
            batch = batch | {"labels": labels.to(batch["labels"])}
    return batch


def scale_gradient(loss: torch.Tensor, args: Namespace) -> torch.Tensor:
    """The same loss with a scaled gradient, or a NaN or Inf loss, where a fault strikes; elsewhere the very tensor."""
    for fault in faults(args) if torch.is_grad_enabled() else ():
        if fault.strikes(args):
            loss = loss * VALUES[fault.kind] if fault.kind in ("nan-loss", "inf-loss") else loss
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
