"""GPT pretraining on Megatron's own loop, from the pip wheel alone (the wheel has the loop, but no `pretrain_gpt.py`).

Our model builder, batch and loss, for dense and MoE models, local and Transformer Engine; everything else is
`megatron.training.pretrain`. What this script does not carry is refused by name; `megatron-stability run
pretrain_gpt.py` does.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain, print_rank_0
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_stability.errors import UsageError
from megatron_stability.megatron import arguments, seams
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.megatron.model import layer_specs
from megatron_stability.megatron.start import faults

# Flags of pretrain_gpt.py that this script does not carry.
NOT_CARRIED = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "logits_load_dir",
    "logits_save_dir",
    "modelopt_enabled",
    "perform_rl_step",
    "heterogeneous_layers_config_path",
    "experimental_attention_variant",
    "overlap_moe_expert_parallel_comm",
    "per_dataset_sequences_path",
    "dataloader_fast_cache_load",
    "dataloader_defer_npy_index_mmap",
)


# `stability_own_model`: MTP layers come from our spec here, which an unmodified pretrain_gpt.py takes from Megatron's.
DEFAULTS = {"tokenizer_type": "NullTokenizer", "spec": ["megatron_stability"], "stability_own_model": True}
SPIKY_LOSS_FACTOR = 10  # as in pretrain_gpt.py: times the largest of the first losses


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """The plugin's flags and the drill's, for Megatron's `extra_args_provider`."""
    return faults.add_arguments(arguments.add_arguments(parser))


def refuse_what_is_not_carried(args: Any) -> None:
    """Raise for a flag that would otherwise be ignored.

    Args:
        args: Megatron's validated arguments.

    Raises:
        UsageError: names the flag.
    """
    named = {name: "--" + name.replace("_", "-") for name in NOT_CARRIED}
    if args.dataloader_type == "external":
        named["dataloader_type"] = "--dataloader-type external"
    for name, flag in named.items():
        if argument(args, name):
            raise UsageError(
                f"{flag} is not carried by `megatron-stability pretrain`; use `run pretrain_gpt.py` for it"
            )


# --- model ----------------------------------------------------------------------------------------------------------


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """One pipeline stage (and chunk) of the GPT that the arguments describe; called by Megatron's `get_model`."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    print_rank_0("building GPT model ...")
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(args.spec, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=layer_specs.mtp_block_spec(config, vp_stage),
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    faults.hook_gradients(model, args, vp_stage)
    return model


def _layer_spec(spec: Sequence[str] | None, config: Any, vp_stage: int | None) -> Any:
    # In 0.18 the named form is a layer's, which can't carry the final norm.
    if spec is None or (path := seams.spec_path(spec)) == seams.SPEC:
        return layer_specs.block_spec(config, vp_stage)
    named = import_module(path)
    if named is None:
        raise UsageError(f"--spec {' '.join(spec)}: {path[0]} can't be imported; check the module path")
    return named if isinstance(named, ModuleSpec) or not callable(named) else named(config, vp_stage=vp_stage)


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The pipeline ranks that hold the word embedding: the first, the last where it is tied, and those with MTP."""
    args = get_args()
    ranks = {pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    return sorted(ranks)


# --- one micro-batch ------------------------------------------------------------------------------------------------


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: the model's per-token losses [b, s], or activations, and the loss function."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch = _batch(data_iterator, vp_stage)
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, partial(loss_func, batch.get("loss_mask"))


def loss_func(loss_mask: Any, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Summed cross-entropy of the valid tokens, their number, and both for the log.

    Args:
        loss_mask: [b, s], 1 where the target counts.
        losses: [b, s] nats.

    Returns:
        The micro-batch's loss sum (nats), its valid tokens, and {"lm loss": [2] of both}.
    """
    args, rerun = get_args(), get_rerun_state_machine()
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    loss = faults.scale_gradient(loss, args)
    tokens = mask.sum().detach().to(torch.int)
    if args.check_for_nan_in_loss_and_grad:
        for name, reject in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            rerun.validate_result(
                result=loss, rejection_func=reject, message=f"{name} in the local loss", tolerance=0.0, fatal=True
            )
    if args.check_for_spiky_loss:
        high = partial(rerun.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss")
        rerun.validate_result(result=loss, rejection_func=high, message="spiky loss", tolerance=0.0, fatal=False)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def _batch(data_iterator: Any, vp_stage: int | None) -> dict[str, torch.Tensor]:
    """This rank's micro-batch: read on tensor rank 0, broadcast over TP, cut for CP; empty on middle stages."""
    args = get_args()
    if not _needs_data(vp_stage):
        return {}
    data = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    batch = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], data, torch.int64)
    batch |= tensor_parallel.broadcast_data(["loss_mask"], data, torch.float32)
    if args.create_attention_mask_in_dataloader:
        batch |= tensor_parallel.broadcast_data(["attention_mask"], data, torch.bool)
    if args.context_parallel_size > 1:
        cp_group = mpu.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    return faults.corrupt(batch, args)


def _needs_data(vp_stage: int | None) -> bool:
    config = core_transformer_config_from_args(get_args())
    return is_first_or_last_pipeline_stage(vp_stage) or mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


# --- data -----------------------------------------------------------------------------------------------------------


def datasets_provider(num_samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test sets from `--data-path` and its relatives, or Megatron's mock data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and _needs_data(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return tuple(BlendedMegatronDatasetBuilder(kind, num_samples, built_here, config).build())


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron: every rank calls it


def main(
    model_provider: Callable[..., torch.nn.Module] = model_provider, on_arguments: Callable[[Any], None] | None = None
) -> None:
    """Parse Megatron's command line and train; `sys.argv` holds it.

    Args:
        model_provider: builds one stage; benchmarks and tests wrap ours to see the model.
        on_arguments: called with the validated arguments before anything is built.
    """
    args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults=DEFAULTS)
    refuse_what_is_not_carried(args)
    if on_arguments is not None:
        on_arguments(args)
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_dataset_provider=datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=model_provider,
        get_embedding_ranks=embedding_ranks,
    )
