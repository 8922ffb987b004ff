"""Every seam in Megatron, in the order of the text within a function; the diffs in `patches/` are made from this table.

A change here is followed by `bash ci/make_patches.sh`, which writes the diffs of the supported releases anew.
"""

from __future__ import annotations

from megatron_stability.megatron.patching.anchor.anchors import Seam, Where

NEW_FILE = "megatron/core/stability.py"
NEW_TEXT = '''\
"""The seam for the megatron_stability plugin: `seams` is None where the plugin is not installed."""

from importlib.util import find_spec

if find_spec("megatron_stability") is None:
    seams = None
else:
    from megatron_stability.megatron import seams

__all__ = ["seams"]
'''
IMPORT_TEXT = "from megatron.core.stability import seams\n"

_SPECS = "megatron/core/transformer/spec_utils.py"
_OPTIMIZER = "megatron/core/optimizer/optimizer.py"
_LANGUAGE = "megatron/core/models/common/language_module/language_module.py"
_GPT = "megatron/core/models/gpt/gpt_model.py"
_ARGUMENTS = "megatron/training/arguments.py"
_TRAINING = "megatron/training/training.py"
_CHECKPOINTING = "megatron/training/checkpointing.py"


def _call(text: str) -> str:
    """A call that is made where the plugin is there."""
    return f"if seams is not None:\n    {text}\n"


def _import(patch: int, path: str) -> Seam:
    return Seam(f"import in {path.rsplit('/', 1)[1]}", patch, path, "", Where.IMPORT, "", IMPORT_TEXT)


def _gate(owner: str) -> Seam:
    return Seam(
        f"update_allowed in {owner}",
        4,
        _OPTIMIZER,
        f"{owner}.step",
        Where.BEFORE,
        "self.step_with_ready_grads()",
        "stability_allows = seams is None or seams.update_allowed(self, grad_norm)\n",
    )


def _gated(owner: str) -> Seam:
    return Seam(
        f"step_with_ready_grads in {owner}",
        4,
        _OPTIMIZER,
        f"{owner}.step",
        Where.AROUND,
        "self.step_with_ready_grads()",
        "stability_allows and ",
        expression="self.step_with_ready_grads()",
    )


def _exit_code(function: str) -> Seam:
    return Seam(
        f"failed_load_code in {function}",
        12,
        _CHECKPOINTING,
        function,
        Where.INTO,
        "",
        "None if seams is None else seams.failed_load_code()",
        expression="sys.exit()",
    )


def _pre_hook(call: str) -> Seam:
    return Seam(
        f"{call} around an evaluation",
        13,
        _TRAINING,
        "train",
        Where.AROUND,
        "if should_disable_forward_pre_hook(args): ...",
        "",
        " and (seams is None or start_iteration < iteration)",
        expression="should_disable_forward_pre_hook(args)",
        holds=f"{call}(model, ...)",
        context=("while __", "if __"),
        beside="evaluate_and_print_results(...)",
    )


_TRAIN_STEP = "train_step(...)"
_STEP_CONTEXT = ("while __", "else args.skip_train")
_RETURNS = (
    "return {}, skipped_iter, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros_in_grad, "
    "log_max_attention_logit"
)

SEAMS: tuple[Seam, ...] = (
    _import(2, _SPECS),
    Seam(
        "spec_path",
        2,
        _SPECS,
        "import_module",
        Where.AROUND,
        "base_path, name = module_path",
        "",
        " if seams is None else seams.spec_path(module_path)",
        expression="module_path",
    ),
    _import(3, _ARGUMENTS),
    Seam(
        "arguments_ready",
        3,
        _ARGUMENTS,
        "parse_and_validate_args",
        Where.BEFORE,
        "set_global_variables(args, ...)",
        _call("seams.arguments_ready(args)"),
    ),
    Seam(
        "add_arguments",
        3,
        _ARGUMENTS,
        "parse_args",
        Where.AFTER,
        "parser = add_megatron_arguments(parser)",
        _call("seams.add_arguments(parser)"),
    ),
    _import(4, _OPTIMIZER),
    *(
        seam
        for owner in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
        for seam in (_gate(owner), _gated(owner))
    ),
    _import(5, _TRAINING),
    Seam(
        "passes_over",
        13,
        _TRAINING,
        "train_step",
        Where.BEFORE,
        "while rerun_state_machine.should_run_forward_backward(data_iterator): ...",
        "if seams is not None and seams.passes_over(data_iterator):\n"
        "    return {}, 1, False, False, 0, None, None, 0\n",
        beside=_RETURNS,
    ),
    Seam(
        "step_begins",
        5,
        _TRAINING,
        "train_step",
        Where.BEFORE,
        "while rerun_state_machine.should_run_forward_backward(data_iterator): ...",
        _call("seams.step_begins()"),
    ),
    Seam(
        "losses_ready",
        5,
        _TRAINING,
        "train_step",
        Where.BEFORE,
        "timers('optimizer', log_level=1).start(...)",
        _call("seams.losses_ready(losses_reduced)"),
        by_loops=("losses_reduced",),
    ),
    Seam(
        "update_done",
        5,
        _TRAINING,
        "train_step",
        Where.AFTER,
        "optimizer.step()",
        _call("seams.update_done(update_successful)"),
    ),
    Seam(
        "log_string",
        7,
        _TRAINING,
        "training_log",
        Where.AFTER,
        "log_string += f' global batch size: {batch_size:5d} |'",
        _call("log_string += seams.log_string(total_loss_dict)"),
        context=("if __",),
    ),
    Seam(
        "train_begins",
        6,
        _TRAINING,
        "train",
        Where.BEFORE,
        "one_logger_utils.on_train_start(...)",
        _call("seams.train_begins(model, optimizer, opt_param_scheduler)"),
    ),
    Seam(
        "exit_after_step",
        6,
        _TRAINING,
        "train",
        Where.LAST,
        _TRAIN_STEP,
        "if seams is not None:\n"
        "    should_checkpoint, should_exit, exit_code = seams.exit_after_step(\n"
        "        should_checkpoint, should_exit, exit_code\n"
        "    )\n",
        context=_STEP_CONTEXT,
    ),
    Seam(
        "rewound",
        15,
        _TRAINING,
        "train",
        Where.LAST,
        _TRAIN_STEP,
        "rewound = None if seams is None else seams.rewound(num_floating_point_operations_so_far)\n"
        "if rewound is not None:\n"
        "    iteration, num_floating_point_operations_so_far = rewound\n"
        "    start_iteration, num_microbatches = iteration, get_num_microbatches()\n"
        "    pre_hook_enabled = False\n"
        "    total_loss_dict.clear()\n"
        "    continue\n",
        context=_STEP_CONTEXT,
    ),
    _pre_hook("disable_forward_pre_hook"),
    _pre_hook("enable_forward_pre_hook"),
    Seam(
        "evaluated",
        16,
        _TRAINING,
        "evaluate_and_print_results",
        Where.BEFORE,
        "string = f' validation{suffix} loss at {prefix} | '",
        _call("seams.evaluated(suffix, total_loss_dict)"),
        context=("for __ in __",),
    ),
    Seam(
        "data_begins",
        14,
        _TRAINING,
        "build_train_valid_test_data_iterators",
        Where.AFTER,
        "args = get_args()",
        _call("seams.data_begins()"),
    ),
    Seam(
        "data_ready",
        14,
        _TRAINING,
        "build_train_valid_test_data_iterators",
        Where.BEFORE,
        "return train_data_iterator, valid_data_iterators, test_data_iterator",
        "if seams is not None:\n"
        "    loaders = train_dataloader, valid_dataloaders, test_dataloader\n"
        "    seams.data_ready(\n"
        "        build_train_valid_test_datasets_provider, loaders, train_data_iterator, valid_data_iterators\n"
        "    )\n",
    ),
    _import(8, _CHECKPOINTING),
    _exit_code("read_metadata"),
    Seam(
        "save_begins",
        10,
        _CHECKPOINTING,
        "save_checkpoint",
        Where.AFTER,
        "ckpt_format = args.ckpt_format if ckpt_type == CheckpointType.GLOBAL else 'torch'",
        "if seams is not None and not release:\n    seams.save_begins(save_dir, iteration)\n",
    ),
    Seam(
        "checkpoint_write",
        10,
        _CHECKPOINTING,
        "save_checkpoint",
        Where.AROUND,
        "async_save_request = dist_checkpointing.save(state_dict, checkpoint_name, ...)",
        "(",
        " if seams is None else seams.checkpoint_write(dist_checkpointing.save))",
        expression="dist_checkpointing.save",
        context=("if __", "if ckpt_type == CheckpointType.GLOBAL and ckpt_format == 'torch_dist'"),
    ),
    Seam(
        "checkpoint_saved",
        10,
        _CHECKPOINTING,
        "save_checkpoint",
        Where.AFTER,
        "if not args.async_save: ...",
        "if seams is not None and not release:\n    seams.checkpoint_saved(save_dir, iteration, async_save_request)\n",
        holds="assert async_save_request is None",
        context=("if ckpt_type != CheckpointType.LOCAL",),
    ),
    Seam(
        "moves_tracker",
        10,
        _CHECKPOINTING,
        "save_checkpoint.iter_finalize_fn",
        Where.UNDER,
        "with __ as f: ...",
        "if seams is None or release or not seams.moves_tracker():\n",
        holds="f.write('release' if release else str(iteration))",
    ),
    Seam(
        "add_checkpoint_state",
        8,
        _CHECKPOINTING,
        "generate_state_dict",
        Where.BEFORE,
        "return state_dict",
        _call("seams.add_checkpoint_state(state_dict)"),
    ),
    _exit_code("fix_query_key_value_ordering"),
    _exit_code("_load_base_checkpoint"),
    Seam(
        "load_begins",
        11,
        _CHECKPOINTING,
        "load_checkpoint",
        Where.AFTER,
        "model = unwrap_model(ddp_model)",
        _call("seams.load_begins(load_dir, optimizer)"),
    ),
    Seam(
        "load_checkpoint_state",
        8,
        _CHECKPOINTING,
        "load_checkpoint",
        Where.AFTER,
        "set_checkpoint_version(state_dict.get('checkpoint_version', 0))",
        _call("seams.load_checkpoint_state(state_dict)"),
    ),
    Seam(
        "strict_load_failed",
        11,
        _CHECKPOINTING,
        "load_checkpoint.load_model_state_dict",
        Where.BEFORE,
        "if strict: ...",
        _call("seams.strict_load_failed(e)"),
        context=("except",),
    ),
    _exit_code("load_checkpoint"),
    _import(9, _LANGUAGE),
    Seam(
        "language_model_loss",
        9,
        _LANGUAGE,
        "LanguageModule.compute_language_model_loss",
        Where.FIRST,
        "",
        "if seams is not None:\n"
        "    own_loss = seams.language_model_loss(self, labels, logits)\n"
        "    if own_loss is not None:\n"
        "        return own_loss\n",
    ),
    _import(9, _GPT),
    Seam(
        "final_logits",
        9,
        _GPT,
        "GPTModel._postprocess",
        Where.FIRST,
        "if labels is None: ...",
        _call("logits = seams.final_logits(logits)"),
    ),
)
