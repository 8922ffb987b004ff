"""A fixed micro-batch and the weights, compared over the data-parallel replicas of a real model on gloo ranks."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron

SEQUENCE, WIDTH = 32, 32


def small_model(tp: int, overlap: bool) -> Any:
    """One GPT chunk in Megatron's DDP, bf16 with dropout; equal on data-parallel ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.1,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 128, SEQUENCE, position_embedding_type="rope").bfloat16()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    return DistributedDataParallel(config, ddp, Float16Module(config, model))


def checked(context: Context, tp: int, overlap: bool) -> list[tuple[tuple[int, ...], dict[str, float]]]:
    """Four steps: all well; a gradient of the last rank is wrong; one bit of a weight of it is; all well again."""
    context.megatron(tp=tp)
    from megatron_stability.megatron.observers.replicas import ReplicaHook
    from megatron_stability.observe.config import Replicas
    from megatron_stability.observe.reduction import LocalSignals, Reduction

    chunk = small_model(tp, overlap)
    chunk.train()
    args = Namespace(
        deterministic_mode=False,
        seq_length=SEQUENCE,
        tensor_model_parallel_size=tp,
        sequence_parallel=False,
        hidden_size=WIDTH,
        params_dtype=torch.bfloat16,
        num_experts=None,
        expert_model_parallel_size=1,
        save="out",
        save_interval=1,  # so that weights are due on every step
        non_persistent_save_interval=None,
        exit_interval=None,
        train_iters=4,
    )
    settings = Replicas(weights_every=1000, compute_every=1)
    hook = ReplicaHook(settings, [chunk], torch.device("cpu"), args, vocab_size=100)
    hook.train_begins()
    reduction = Reduction(context.group, torch.device("cpu"), hook.signals)
    last, found = context.rank == context.world - 1, []
    weight = dict(chunk.named_parameters())["module.module.decoder.layers.0.mlp.linear_fc1.weight"]
    generator = torch.get_rng_state()
    for step in (1, 2, 3, 4):
        wrong = weight.register_hook(lambda grad: grad * 1.01) if last and step == 2 else None
        if last and step in (3, 4):
            weight.data.view(-1)[:1].view(torch.int16).bitwise_xor_(1 << 6)
        hook.step_begins(step)
        local = LocalSignals(
            step=step, first_sample=0, samples=1, loss_sums_n2=torch.ones(1, 2), grad_norm=1.0, extra=hook.observe()
        )
        record = reduction(local)
        found.append((record.disagreeing_ranks, dict(record.signals)))
        if wrong is not None:
            wrong.remove()
    assert chunk.training
    assert torch.equal(torch.get_rng_state(), generator), "dropout drew a number"
    return found


@pytest.mark.parametrize(
    ("tp", "overlap", "named", "reached"),
    [(1, True, (3,), 1.0), (2, False, (1, 3), 4.0)],  # tensor-parallel ranks add their outputs
    ids=["dp4-overlapped", "tp2-dp2"],
)
def test_the_rank_that_computes_wrong_and_the_one_with_a_flipped_bit_are_named(
    megatron_ranks: Pool, tp: int, overlap: bool, named: tuple[int, ...], reached: float
) -> None:
    answers = megatron_ranks.run(checked, tp, overlap, world=4, timeout=120)
    assert answers == [answers[0]] * 4
    well, wrong, flipped, again = answers[0]
    count = float(len(named))
    assert well == again == ((), {"ranks/weights": 0.0, "ranks/compute": 0.0})
    assert wrong == (named, {"ranks/weights": 0.0, "ranks/compute": count})
    assert flipped == (named, {"ranks/weights": count, "ranks/compute": reached})
