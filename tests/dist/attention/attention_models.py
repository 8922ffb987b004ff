"""Small GPT models of every attention, layout and optimizer, whose weights follow from their global index alone."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from megatron_stability.config import StabilityConfig
from tests.dist.pool import Context

HIDDEN, HEADS, HEAD, SEQ, VOCAB = 48, 8, 6, 16, 64
GROUPS = {"mha": 8, "gqa": 2, "mqa": 1, "mla": 8}


def config(kind: str, tp: int = 1, pp: int = 1, layers: int = 1, **options: Any) -> Any:
    """A TransformerConfig; `options` win."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    common: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "pipeline_dtype": torch.float32,
        "add_bias_linear": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "transformer_impl": "local",
    }
    if kind == "mla":
        sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}
        return MLATransformerConfig(**common | sizes | {"rope_type": "rope"} | options)
    sizes = {"num_query_groups": GROUPS[kind], "kv_channels": HEAD}
    return TransformerConfig(**common | sizes | options)


def model(
    config: Any,
    cap: float | None = None,
    pre: bool = True,
    post: bool = True,
    tied: bool = False,
    qk_norm: str = "none",
) -> Any:
    """A GPTModel with our core attention."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_stability.megatron.attention.core_attention import CoreAttention
    from megatron_stability.megatron.model.norms import QKNormBuilder
    from megatron_stability.numerics.config import Model

    mla = config.multi_latent_attention
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm and not mla, multi_latent_attention=mla)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=CoreAttention, params={"cap": cap})
    if qk_norm != "none":
        settings = Model(qk_norm=qk_norm)
        attention.q_layernorm = QKNormBuilder(settings, query=True)
        attention.k_layernorm = QKNormBuilder(settings, query=False)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=pre,
        post_process=post,
        position_embedding_type="rope",
        rotary_percent=0.5,
        share_embeddings_and_output_weights=tied,
    )


def chunks(config: Any, **settings: Any) -> list[Any]:
    """This rank's GPTModel chunks by our own layer spec, MTP block too; `settings` are of the `model` section."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from megatron_stability.megatron.model import layer_specs
    from megatron_stability.numerics.config import Model

    virtual, made = config.virtual_pipeline_model_parallel_size, []
    for vp_stage in range(virtual) if virtual else (None,):
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        made.append(
            GPTModel(
                config,
                layer_specs.block_spec(config, vp_stage, Model(**settings)),
                vocab_size=VOCAB,
                max_sequence_length=SEQ,
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                mtp_block_spec=layer_specs.mtp_block_spec(config, vp_stage, Model(**settings)),
                vp_stage=vp_stage,
            )
        )
    return made


def hybrid(config: Any, pattern: str) -> list[Any]:
    """This rank's HybridModel: `*` a layer of attention alone, `-` of an MLP alone, `|` where the next stage begins."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from megatron_stability.megatron.model import layer_specs
    from megatron_stability.numerics.config import Model

    layer = layer_specs.layer_specs(config, Model())[0].submodules

    def part(module: Any, *names: str) -> Any:
        return ModuleSpec(
            module, submodules=TransformerLayerSubmodules(**{name: getattr(layer, name) for name in names})
        )

    stack = ModuleSpec(
        HybridStack,
        params={"post_layer_norm": False},
        submodules=HybridStackSubmodules(
            attention_layer=part(TransformerLayer, "input_layernorm", "self_attention", "self_attn_bda"),
            mlp_layer=part(MLPLayer, "pre_mlp_layernorm", "mlp", "mlp_bda"),
        ),
    )
    return [
        HybridModel(
            config,
            stack,
            vocab_size=VOCAB,
            max_sequence_length=SEQ,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
        )
    ]


def scheduled_forward(model: list[Any], microbatches: int = 2) -> None:
    """One step's forwards by Megatron's own pipeline schedule, in training mode; each data-parallel rank its own."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(iterator: Any, chunk: Any) -> Any:
        tokens, positions = next(iterator)
        return chunk(tokens, positions, None, labels=tokens), lambda loss: (loss.mean(), {})

    rank = parallel_state.get_data_parallel_rank()
    batches = [batch(rows=1, seed=microbatches * rank + at) for at in range(microbatches)]
    iterators = [iter(batches) for _ in model]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=microbatches,
        seq_length=SEQ,
        micro_batch_size=1,
        forward_only=True,
    )


def fill(module: torch.nn.Module, scale: float = 0.6) -> None:
    """Weights that depend on name and global index alone: tensor-parallel shards are cuts of one whole."""
    from megatron.core import parallel_state

    rank, world = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    for name, parameter in module.named_parameters():
        cut = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        shape = list(parameter.shape)
        if cut is not None:
            shape[cut] *= world
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) * scale
        if "norm" in name and name.endswith("weight"):
            whole = 1 + 0.1 * whole
        part = whole if cut is None else whole.chunk(world, dim=cut)[rank]
        parameter.data.copy_(part)


def batch(rows: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions [b, s]."""
    tokens = torch.randint(0, VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.arange(SEQ).expand(rows, -1)


def forward(gpt: Any, rows: int = 2, seed: int = 0) -> Any:
    """One training forward."""
    tokens, positions = batch(rows, seed)
    return gpt(tokens, positions, None, labels=tokens)


def wrapped(gpt: Any, optimizer: str, **options: Any) -> tuple[Any, Any]:
    """`wrapped_chunks` of one."""
    (ddp,), made = wrapped_chunks([gpt], optimizer, **options)
    return ddp, made


def wrapped_chunks(model: list[Any], optimizer: str, **options: Any) -> tuple[list[Any], Any]:
    """Megatron's bf16 or fp32 wrappers, one of its optimizers: fp32, float16, distributed, overlap, muon, dist-muon."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.training.training import wrap_model_chunks_with_ddp

    bf16 = "fp32" not in optimizer
    distributed = any(word in optimizer for word in ("distributed", "overlap", "dist-"))
    overlap = "overlap" in optimizer
    muon = "muon" in optimizer
    config = model[0].config
    if bf16:
        config.bf16, config.params_dtype, config.pipeline_dtype = True, torch.bfloat16, torch.bfloat16
        model = [Float16Module(config, chunk) for chunk in model]
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_param_gather=overlap, overlap_grad_reduce=overlap
    )
    ddp = wrap_model_chunks_with_ddp(
        model, config, ddp_config, use_layer_wise_distributed_optimizer=muon and distributed
    )
    settings = {
        "optimizer": "muon" if muon else "adam",
        "lr": 0.0,
        "weight_decay": 0.0,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "use_distributed_optimizer": distributed and not muon,
        "overlap_param_gather": overlap,
        "clip_grad": 1.0,
    }
    if muon and distributed:
        settings["use_layer_wise_distributed_optimizer"] = True
    return ddp, get_megatron_optimizer(OptimizerConfig(**settings | options), ddp)


def hook(chunks: list[Any], optimizer: Any = None, **qk_clip: Any) -> Any:
    """The AttentionHook of a rank, ready for the first step."""
    from megatron_stability.megatron.attention.qk_clip import AttentionHook

    tree = {"qk_clip": {"enabled": True} | qk_clip, "observe": {"attention": {"every": 1}}}
    made = AttentionHook(StabilityConfig.model_validate(tree), chunks, optimizer, torch.device("cpu"))
    made.train_begins()
    return made


def gather(context: Context, value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    found: list[Any] = [None] * context.world
    dist.all_gather_object(found, value, group=context.group)
    return found
