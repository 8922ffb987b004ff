"""Stands for an unmodified pretraining script: it knows nothing of the plugin, and has a flag of its own.

Like `pretrain_gpt.py` it brings its own `extra_args_provider`, resolves `--spec` by Megatron's `import_module`, and
takes what that gives as the release at hand does: a ModuleSpec as it is, a callable called with the configuration.
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from tests.dist import small_gpt


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--tied", action="store_true")
    return parser


def layer_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    if args.spec is None:
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
        )
    spec = import_module(args.spec)
    return spec if isinstance(spec, ModuleSpec) or not callable(spec) else spec(config, vp_stage=vp_stage)


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(args, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=args.tied,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


if __name__ == "__main__":
    arguments = parse_and_validate_args(extra_args_provider=add_flags)
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(arguments),
        train_valid_test_dataset_provider=small_gpt.datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=partial(small_gpt.forward_step, []),
        model_provider=model_provider,
    )
