"""A small GPT through Megatron's own `pretrain()` on a pool's ranks (prepared by `megatron_on_cpu`)."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_stability.megatron import cpu
from tests.dist.pool import Context

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "20"),
    *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine", "--bf16", "--seed", "1234", "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--make-vocab-size-divisible-by", "64"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1", "--num-workers", "0"),
)


class Run(NamedTuple):
    """What a rank saw: the loss of each micro-batch (last pipeline stage) and (is sharded over TP, weight) by name."""

    losses: list[float]
    weights: dict[str, tuple[bool, torch.Tensor]]


def fork_checkpoint_writer() -> None:
    """Let the writer of `--async-save` be a fork of this rank, not of a fork server that imports everything again.

    The rank's process ends with its job, and the replacement with it.
    """
    from megatron.training import async_utils, initialize

    def forked(rank: int, mp_mode: str) -> None:
        async_utils.init_persistent_async_worker(rank, "fork")

    initialize.init_persistent_async_worker = forked


def train(context: Context, *flags: str) -> Run:
    """Run `megatron.training.pretrain` with `FLAGS` and `flags`, later flags winning."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    if "--async-save" in flags:
        fork_checkpoint_writer()
    sys.argv = ["pretrain", *FLAGS, *cpu.FLAGS, *flags]
    losses: list[float] = []
    chunks: list[torch.nn.Module] = []
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(parse_and_validate_args()),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=partial(forward_step, losses),
        model_provider=partial(_model, chunks),
    )
    weights = {
        f"{chunk}.{name}": (bool(getattr(weight, "tensor_model_parallel", False)), weight.detach().clone())
        for chunk, module in enumerate(chunks)
        for name, weight in module.named_parameters()
    }
    return Run(losses, weights)


def _model(
    chunks: list[torch.nn.Module],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    chunks.append(model)
    return model


def datasets(samples: Any, vp_stage: int | None = None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="1,0,0",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )

    def first_of_tensor_group() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0

    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, first_of_tensor_group, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron asks for it: every rank calls the provider


def forward_step(losses: list[float], data_iterator: Any, model: torch.nn.Module) -> Any:
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    if data_iterator is not None:
        sample = next(data_iterator)
        batch = torch.stack([sample[key].to(torch.int64) for key in ("tokens", "labels", "loss_mask", "position_ids")])
    else:
        batch = torch.empty(4, args.micro_batch_size, args.seq_length, dtype=torch.int64)
    dist.broadcast(
        batch,
        src=parallel_state.get_tensor_model_parallel_src_rank(),
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    tokens, labels, mask, positions = batch.unbind()
    return model(tokens, positions, None, labels=labels), partial(_loss, losses, mask)


def _loss(losses: list[float], mask: torch.Tensor, token_losses: torch.Tensor) -> Any:
    total = (token_losses.float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    losses.append(total.item() / tokens.item())
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}
