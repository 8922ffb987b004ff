"""A Megatron of a page: the functions in which the seams stand, with what stands around them, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.patches.patch_tools import write

SPECS = "megatron/core/transformer/spec_utils.py"
OPTIMIZER = "megatron/core/optimizer/optimizer.py"
LANGUAGE = "megatron/core/models/common/language_module/language_module.py"
GPT = "megatron/core/models/gpt/gpt_model.py"
ARGUMENTS = "megatron/training/arguments.py"
TRAINING = "megatron/training/training.py"
CHECKPOINTING = "megatron/training/checkpointing.py"

FILES = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 77\nPATCH = 0\nPRE_RELEASE = ''\n",
    SPECS: '''\
from typing import Any


def import_module(module_path):
    """Two names."""
    base_path, name = module_path
    return __import__(base_path, fromlist=[name])
''',
    ARGUMENTS: """\
import argparse

from megatron.core.enums import Thing


def parse_and_validate_args(defaults=None):
    args = parse_args()
    validate_args(args, defaults)

    # From here on every module sees them.
    set_global_variables(args)
    return args


def parse_args(provider=None):
    parser = argparse.ArgumentParser()
    parser = add_megatron_arguments(parser)
    return parser.parse_args()
""",
    OPTIMIZER: '''\
"""Optimizers; Größe in µm, for the offsets."""
from .. import parallel_state


class MixedPrecisionOptimizer:
    def step(self):
        grad_norm = self.clip()
        success = self.step_with_ready_grads()
        return success, grad_norm, None


class FP32Optimizer:
    def step(self):
        grad_norm = self.clip()  # µ
        success = self.step_with_ready_grads()
        return success, grad_norm, None


class ChainedOptimizer:
    def step(self):
        should_skip_update = self.too_large()
        grad_norm = self.clip()
        update_successful = False if should_skip_update else self.step_with_ready_grads()
        return update_successful, grad_norm, None
''',
    TRAINING: '''\
"""The loop."""
import sys
from contextlib import nullcontext

from megatron.core import tensor_parallel
from megatron.training import one_logger_utils
from megatron.training.global_vars import get_args, get_timers, get_num_microbatches


def train_step(forward, data_iterator, model, optimizer, iteration):
    args = get_args()
    timers = get_timers()
    rerun_state_machine = get_rerun_state_machine()
    while rerun_state_machine.should_run_forward_backward(data_iterator):
        losses_reduced = forward(data_iterator, model)
    should_checkpoint, should_exit, exit_code = rerun_state_machine.should_checkpoint_and_exit()
    if should_exit:
        return {}, True, should_checkpoint, should_exit, exit_code, None, None, 0

    # Update parameters.

    timers('optimizer', log_level=1).start(barrier=args.barrier_with_L1_time)
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()
    log_max_attention_logit = 0
    timers('optimizer').stop()
    skipped_iter = 0 if update_successful else 1
    return (
        {}, skipped_iter, should_checkpoint, should_exit, exit_code, grad_norm,
        num_zeros_in_grad, log_max_attention_logit
    )


def training_log(iteration, batch_size, total_loss_dict):
    args = get_args()
    if iteration % args.log_interval == 0:
        log_string = f" iteration {iteration}"
        log_string += f' global batch size: {batch_size:5d} |'
        for key in total_loss_dict:
            log_string += f' {key}'
        print_rank_last(log_string)


def train(forward, model, optimizer, opt_param_scheduler, train_data_iterator, total_loss_dict):
    args = get_args()
    iteration = args.iteration
    num_floating_point_operations_so_far = args.operations

    # Track the start.
    one_logger_utils.on_train_start(iteration=iteration)
    num_microbatches = get_num_microbatches()
    start_iteration = iteration
    pre_hook_enabled = True
    while iteration < args.train_iters:
        if args.skip_train:
            should_checkpoint, should_exit, exit_code = False, False, 0
        else:
            (
                loss_dict,
                skipped_iter,
                should_checkpoint,
                should_exit,
                exit_code,
                grad_norm,
                num_zeros_in_grad,
                max_attention_logit,
            ) = train_step(forward, train_data_iterator, model, optimizer, iteration)
            if args.fault:
                inject(args.fault)
        if should_checkpoint:
            save_checkpoint_and_time(iteration)
        if should_exit:
            break
        iteration += 1
        if args.eval_interval and iteration % args.eval_interval == 0:
            if should_disable_forward_pre_hook(args):
                disable_forward_pre_hook(model)
                pre_hook_enabled = False
            evaluate_and_print_results(iteration)
            if should_disable_forward_pre_hook(args):
                enable_forward_pre_hook(model)
                pre_hook_enabled = True
    return iteration, num_floating_point_operations_so_far


def evaluate_and_print_results(prefix):
    for index in range(2):
        suffix = f"-{index}"
        total_loss_dict, timelimit = evaluate(index)
        if timelimit:
            return
        string = f' validation{suffix} loss at {prefix} | '
        print_rank_last(string)


def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider):
    args = get_args()

    train_dataloader, valid_dataloaders, test_dataloader = build(build_train_valid_test_datasets_provider)
    train_data_iterator = iter(train_dataloader)
    valid_data_iterators = iter(valid_dataloaders)
    test_data_iterator = iter(test_dataloader)

    return train_data_iterator, valid_data_iterators, test_data_iterator
''',
    CHECKPOINTING: '''\
"""Checkpoints."""
import sys
from megatron.core import dist_checkpointing


def read_metadata(tracker_filename):
    if not tracker_filename:
        sys.exit()
    return tracker_filename


def save_checkpoint(iteration, model, release=False):
    args = get_args()
    save_dir = args.save
    ckpt_type = CheckpointType.GLOBAL
    ckpt_format = args.ckpt_format if ckpt_type == CheckpointType.GLOBAL else 'torch'
    state_dict, checkpoint_name = generate_state_dict(model), save_dir
    tracker_filename = get_checkpoint_tracker_filename(save_dir)
    async_save_request = None
    if rank() == 0 or ckpt_type != CheckpointType.LEGACY:
        if ckpt_type == CheckpointType.GLOBAL and ckpt_format == 'torch_dist':
            async_save_request = dist_checkpointing.save(
                state_dict,
                checkpoint_name,
                async_sharded_save=args.async_save,
            )
    if ckpt_type != CheckpointType.LOCAL:
        if not args.async_save:
            assert async_save_request is None
            barrier()

    # The tracker file.
    if rank() == 0:

        def iter_finalize_fn():
            with open_file(tracker_filename, 'w') as f:
                f.write('release' if release else str(iteration))
            print_rank_0(f'saved {iteration}')

        iter_finalize_fn()


def generate_state_dict(model):
    state_dict = {}
    state_dict['model'] = model

    return state_dict


def fix_query_key_value_ordering(model, checkpoint_version):
    if checkpoint_version > 3:
        sys.exit()


def _load_base_checkpoint(load_dir):
    if load_dir is None:
        sys.exit()
    return {}


def load_checkpoint(ddp_model, optimizer, strict=True):
    args = get_args()
    load_dir = args.load
    model = unwrap_model(ddp_model)

    state_dict = _load_base_checkpoint(load_dir)
    set_checkpoint_version(state_dict.get('checkpoint_version', 0))

    def load_model_state_dict(module, state_dict, strict: bool):
        try:
            module.load_state_dict(state_dict, strict=strict)
        except Exception as e:
            if strict:
                module.load_state_dict(state_dict, strict=False)

    load_model_state_dict(model, state_dict, strict)
    if 'iteration' not in state_dict:
        sys.exit()
''',
    LANGUAGE: '''\
from megatron.core import tensor_parallel


class LanguageModule:
    def compute_language_model_loss(self, labels, logits):
        """The loss.

        Args:
            labels: of the tokens.
        """
        # [b s] => [s b]
        labels = labels.transpose(0, 1)
        return tensor_parallel.loss(logits, labels)
''',
    GPT: """\
from megatron.core import tensor_parallel


class GPTModel:
    def _postprocess(self, hidden, labels):
        logits = self.output_layer(hidden)
        if labels is None:
            # [s b h] => [b s h]
            return logits.transpose(0, 1)
        return self.compute_language_model_loss(labels, logits)
""",
}


def small_megatron(root: Path, changes: dict[str, str] | None = None) -> Path:
    """Writes the tree, with other texts for some files; returns `root`."""
    write(root, {**FILES, **(changes or {})})
    return root
