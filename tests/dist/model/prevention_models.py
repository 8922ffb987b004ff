"""Small GPT models with prevention settings on a pool's ranks, from whole weights, and their whole gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_stability.numerics.config import Model
from tests.dist.pool import Context

HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, LAYERS, VOCAB, PADDED, SEQUENCE = 32, 4, 2, 8, 48, 4, 56, 64, 16


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Two micro-batches (tokens, labels, mask), unequally masked; a rank's rows may have no valid token."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for kept in (0.9, 0.4):
        tokens, labels = (torch.randint(0, VOCAB, (2, SEQUENCE), generator=generator) for _ in range(2))
        found.append((tokens, labels, (torch.rand(2, SEQUENCE, generator=generator) < kept).float()))
    return found


def layout(
    world: int,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    sp: bool = False,
    ep: int = 1,
    tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Arguments of `build` and `train_step`; `more` goes to the transformer configuration."""
    return {"world": world, "tp": tp, "pp": pp, "vpp": vpp, "sp": sp, "ep": ep, "tied": tied, "more": more}


def build(context: Context, where: dict[str, Any], model: Model, weights: dict[str, Tensor] | None) -> list[Any]:
    """This rank's chunks, fp32 on the CPU backend; `weights` are whole tensors by global name."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_stability.megatron.model import layer_specs
    from megatron_stability.megatron.model.loss import HeadLoss

    if not parallel_state.model_parallel_is_initialized():
        context.megatron(where["tp"], where["pp"], where["vpp"], where["ep"], etp=1)
    torch.manual_seed(1234)  # the same whole weights at each build
    config = TransformerConfig(**configuration(where, model))

    class ModelWithLoss(GPTModel):  # type: ignore[misc]
        """The loss patch's two calls, without the patch."""

        def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
            if not model.changes_loss:
                return super().compute_language_model_loss(labels, logits)
            return HeadLoss(model, VOCAB)(labels, logits, self.pg_collection.tp)

    chunks = []
    for stage in range(where["vpp"] or 1):
        vp_stage = stage if where["vpp"] else None
        first, last = (
            test(ignore_virtual=False, vp_stage=vp_stage)
            for test in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        )
        chunk = ModelWithLoss(
            config=config,
            transformer_layer_spec=layer_specs.block_spec(config, vp_stage, model),
            vocab_size=PADDED,
            max_sequence_length=SEQUENCE,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=where["tied"],
            position_embedding_type="rope",
            rotary_base=10000,
            mtp_block_spec=layer_specs.mtp_block_spec(config, vp_stage, model),
            vp_stage=vp_stage,
        )
        if weights is not None:
            load(chunk, weights)
        chunks.append(chunk)
    return chunks


def configuration(where: dict[str, Any], model: Model) -> dict[str, Any]:
    """Of the transformer; what the arguments' `settings.apply` does is done here."""
    return {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": HEAD_DIM,
        "ffn_hidden_size": FFN,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "qk_layernorm": model.qk_norm != "none",
        "transformer_impl": "local",
        "tensor_model_parallel_size": where["tp"],
        "pipeline_model_parallel_size": where["pp"],
        "virtual_pipeline_model_parallel_size": where["vpp"],
        "sequence_parallel": where["sp"],
        "expert_model_parallel_size": where["ep"],
        "expert_tensor_parallel_size": 1,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        **where["more"],
    }


def whole_name(chunk: Any, name: str) -> str:
    """With the layer's number in the model in place of its index in the chunk, and the expert's likewise."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        from megatron.core import parallel_state

        place = parts.index("local_experts") + 1
        here = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        parts[place] = str(int(parts[place]) + here * parallel_state.get_expert_model_parallel_rank())
    return ".".join(parts)


def sharding(name: str, parameter: Any) -> tuple[bool, int]:
    """(is cut over tensor-parallel ranks, along which dimension); experts are whole, a softmax offset is not marked."""
    if name.endswith("softmax_offset"):
        return True, 0
    if "local_experts" in name:
        return False, -1
    return bool(getattr(parameter, "tensor_model_parallel", False)), int(getattr(parameter, "partition_dim", -1))


def cut(name: str, whole: Tensor, parameter: Any, rank: int, world: int) -> Tensor:
    """A tensor-parallel rank's part; the first projection of a gated MLP holds gate and up, each cut."""
    sharded, dimension = sharding(name, parameter)
    if not sharded or world == 1:
        return whole
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(world)[rank] for half in whole.chunk(2)])
    return whole.chunk(world, dim=dimension)[rank]


def join(name: str, parts: list[Tensor], sharded: bool, dimension: int) -> Tensor:
    """The inverse of `cut`."""
    if not sharded or len(parts) == 1:
        return parts[0]
    if name.endswith("linear_fc1.weight"):
        return torch.cat([torch.cat([part.chunk(2)[half] for part in parts]) for half in (0, 1)])
    return torch.cat(parts, dim=dimension)


def load(chunk: Any, weights: dict[str, Tensor]) -> None:
    """Copy the whole weights' parts in; every parameter must be among them."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    world = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in chunk.named_parameters():
        name = whole_name(chunk, name)
        parameter.data.copy_(cut(name, weights[name], parameter, rank, world))


def logits(
    context: Context, where: dict[str, Any], model: Model, weights: dict[str, Tensor] | None, tokens: Tensor
) -> Tensor | None:
    """As `logits_of`, of a model made for it."""
    return logits_of(build(context, where, model, weights), model, tokens)


def logits_of(chunks: list[Any], model: Model, tokens: Tensor) -> Tensor | None:
    """[b, s, PADDED] on the last stage, gathered over tensor-parallel ranks; the final cap is the loss patch's."""
    from megatron.core import parallel_state

    from megatron_stability.megatron.model.loss import HeadLoss

    found: list[Tensor] = []

    def forward_step(iterator: Any, chunk: Any) -> Any:
        (tokens,) = next(iterator)
        return chunk(tokens, positions(tokens), None), kept

    def kept(output: Tensor) -> Any:
        found.append(HeadLoss(model, VOCAB).capped(output.detach()).contiguous())
        return output.sum(), {}

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    schedule(forward_step, chunks, [(tokens,)] * stages, forward_only=True)  # interleaved wants as many
    if not found:
        return None
    parts = [torch.empty_like(found[0]) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    torch.distributed.all_gather(parts, found[0], group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)


def positions(tokens: Tensor) -> Tensor:
    """[b, s] 0, 1, 2, …"""
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def train_step(
    context: Context,
    where: dict[str, Any],
    model: Model,
    weights: dict[str, Tensor],
    batches: list[tuple[Tensor, Tensor, Tensor]],
) -> tuple[list[Tensor], dict[str, tuple[bool, int, Tensor]]]:
    """One global batch through Megatron's schedule, DDP and finalize_model_grads.

    Returns:
        The [b, s] losses of each micro-batch of this rank where they are known, and by whole name (is sharded,
        dimension, gradient).
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    chunks = build(context, where, model, weights)
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    for one in wrapped:
        one.zero_grad_buffer()
    losses: list[Tensor] = []

    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens, labels, mask = next(iterator)
        output = chunk(tokens, positions(tokens), None, labels=labels, loss_mask=mask.clone())
        return output, partial(summed, mask)

    def summed(mask: Tensor, output: Tensor) -> Any:
        losses.append(output.detach())
        return (output * mask).sum(), mask.sum().int(), {}

    mine = batches[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    schedule(forward_step, wrapped, mine, forward_only=False)
    gradients = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            gradients[whole_name(chunk, name)] = (*sharding(name, parameter), parameter.main_grad.clone())
    return losses, gradients


def schedule(forward_step: Any, chunks: list[Any], batches: list[Any], *, forward_only: bool) -> None:
    """Megatron's schedule for this layout over micro-batches whose first tensor is [b, s]."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=SEQUENCE,
        micro_batch_size=batches[0][0].shape[0],
        forward_only=forward_only,
    )


def whole_gradients(where: dict[str, Any], results: list[Any]) -> dict[str, Tensor]:
    """By name, from what `train_step` returned on each rank; replicas must be equal to the bit."""
    found: dict[str, Tensor] = {}
    for first in range(0, where["world"], where["tp"]):
        ranks = [gradients for _, gradients in results[first : first + where["tp"]]]
        for rank in ranks:
            for name in set(rank) - set(ranks[0]):  # an expert that the first rank does not hold
                found[name] = rank[name][2]
        for name, (sharded, dimension, gradient) in ranks[0].items():
            parts = [rank[name][2] for rank in ranks if name in rank]
            if not sharded:
                assert all(torch.equal(part, gradient) for part in parts), name
            whole = join(name, parts, sharded, dimension)
            assert name not in found or torch.equal(found[name], whole), name
            found[name] = whole
    return found
