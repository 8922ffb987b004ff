"""Softcapped local attention and QK-norm against Megatron's own, forward and backward of a core attention or a norm.

python -m benchmarks.attention [--sequence 256] [--heads 8]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import DEVICE, measure, table
from megatron_stability.megatron import cpu
from megatron_stability.numerics.qk_norm import QKNorm, Variant


def step(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], None]:
    """Forward and backward from leaves."""

    def run() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        function(*leaves).float().square().mean().backward()

    return run


def attentions(heads: int, width: int) -> dict[str, Callable[..., Tensor]]:
    """Megatron's local core attention without and with the cap."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_stability.megatron.attention.core_attention import CoreAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=heads * width, num_attention_heads=heads, attention_dropout=0.0, bf16=True
    )
    common = {"config": config, "layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    plain, capped = DotProductAttention(**common), CoreAttention(**common, cap=50.0)
    return {
        "Megatron DotProductAttention": lambda q, k, v: plain(q, k, v, None),
        "ours: softcap 50": lambda q, k, v: capped(q, k, v, None),
    }


def norms(heads: int, width: int) -> dict[str, Callable[..., Tensor]]:
    """torch's RMSNorm per head, which Megatron's local spec has, and ours."""
    stock = torch.nn.RMSNorm(width, eps=1e-6, device=DEVICE, dtype=torch.bfloat16)
    ours = {v: QKNorm(v, heads, width).to(device=DEVICE, dtype=torch.bfloat16) for v in Variant}
    return {"torch.nn.RMSNorm per head": stock} | {f"ours: {variant}": norm for variant, norm in ours.items()}


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; more than are free measure the scheduler")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if DEVICE.type == "cpu":
        cpu.install()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29532")}
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    heads, width = options.heads, 64
    shape = (options.sequence, 2, heads, width)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    costs = measure({name: step(run, q, k, v) for name, run in attentions(heads, width).items()}, options.rounds)
    print(table(f"core attention, bf16, {list(shape)}", costs), flush=True)
    costs = measure({name: step(run, q) for name, run in norms(heads, width).items()}, options.rounds)
    print(table(f"norm of queries, bf16, {list(shape)}", costs), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
