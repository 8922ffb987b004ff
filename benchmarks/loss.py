"""The fused loss against Megatron's `vocab_parallel_cross_entropy` and against cross-entropy + logsumexp z-loss.

    python -m benchmarks.loss [--tokens 2048] [--vocab 32000]

Forward and backward of a head's logits; each candidate starts from the same logits, as an output layer leaves them
(made inside the call, and freed as soon as the candidate lets go). Megatron's has no z-loss and no cap, so its row
stands against ours without them; the naive rows do what ours does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from benchmarks.measure import DEVICE, measure, table
from megatron_stability.numerics.softcap import softcap
from megatron_stability.numerics.z_loss import LossSettings, vocab_parallel_loss


def naive(logits: Tensor, target: Tensor, beta: float, cap: float | None) -> Tensor:
    """Cross-entropy, softcap and z-loss as separate torch operators."""
    logits = logits.float()
    if cap is not None:
        logits = softcap(logits, cap)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), reduction="none")
    return loss + beta * torch.logsumexp(logits, -1).square().view(-1)


class OutputLayer(torch.autograd.Function):
    """Stands for the layer before: makes the logits, and drops their gradient when it gets it."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, stored: Tensor) -> Tensor:
        return stored.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def step(loss: Callable[[Tensor], Tensor], stored: Tensor) -> Callable[[], None]:
    """Forward and backward from a fresh, non-leaf copy of the logits."""
    source = torch.zeros((), requires_grad=True)

    def run() -> None:
        logits = OutputLayer.apply(source, stored)
        value = loss(logits).mean()
        del logits
        value.backward()

    return run


def main() -> None:
    """Print one table a dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; more than are free measure the scheduler")
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29531")}
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", rank=0, world_size=1)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    target = torch.randint(0, options.vocab, (options.tokens, 1), device=DEVICE)
    for dtype in (torch.bfloat16, torch.float32):
        stored = torch.randn(options.tokens, 1, options.vocab, device=DEVICE).to(dtype)

        def ours(beta: float, cap: float | None, logits: Tensor) -> Tensor:
            settings = LossSettings(vocab_size=options.vocab, beta=beta, cap=cap)
            return vocab_parallel_loss(logits, target, settings, group=dist.group.WORLD, overwrite=True)

        losses: dict[str, Callable[[Tensor], Tensor]] = {
            "Megatron vocab_parallel_cross_entropy": lambda x: vocab_parallel_cross_entropy(
                x, target, tp_group=dist.group.WORLD
            ),
            "ours: cross-entropy": lambda x: ours(0.0, None, x),
            "ours: cross-entropy + z-loss": lambda x: ours(1e-4, None, x),
            "naive: cross-entropy + logsumexp z-loss": lambda x: naive(x, target, 1e-4, None),
            "ours: cross-entropy + z-loss + softcap": lambda x: ours(1e-4, 30.0, x),
            "naive: cross-entropy + z-loss + softcap": lambda x: naive(x, target, 1e-4, 30.0),
        }
        costs = measure({name: step(loss, stored) for name, loss in losses.items()}, options.rounds)
        print(table(f"loss, {options.tokens} tokens × {options.vocab} rows, {dtype}", costs), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
