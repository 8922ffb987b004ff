"""What a patched Megatron calls. Each function asks the one installed runtime, and does nothing without one.

Importing this module costs nothing: no torch, no megatron. The calls stand in `patches/`; their order in a step:

    step_begins, (forward with language_model_loss, backward), losses_ready,
    update_allowed, (optimizer), update_done, exit_after_step, rewound

or, for a step whose samples are passed over, passes_over alone.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_stability.megatron.access.flags.argument_table import OWN_SPEC
from megatron_stability.megatron.access.handle import SLOT, Slot
from megatron_stability.megatron.access.speaks import one_sentence

if TYPE_CHECKING:
    from megatron_stability.megatron.runtime import Runtime

_slot: Slot[Runtime] = SLOT

SPEC = OWN_SPEC


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """`training/arguments.py parse_args`: the plugin's flags, unless a caller added them already."""
    from megatron_stability.megatron import arguments

    return arguments.add_arguments(parser)


def arguments_ready(args: Namespace) -> None:
    """`training/arguments.py parse_and_validate_args`, before anything is built: install the runtime asked for."""
    from megatron_stability.megatron import arguments

    with one_sentence(args.rank):
        arguments.install_runtime(args)


def spec_path(module_path: Sequence[str]) -> tuple[str, str]:
    """`core/transformer/spec_utils.py import_module`: `--spec megatron_stability` alone names our layer spec."""
    if tuple(module_path) == ("megatron_stability",):
        return SPEC
    base_path, name = module_path
    return base_path, name


def language_model_loss(module: Any, labels: Any, logits: Any) -> Any:
    """`core/models/common/language_module compute_language_model_loss`: our per-token loss [b, s], or None for stock.

    Collective over the module's tensor-parallel group where it is ours.
    """
    return None if _slot.runtime is None else _slot.runtime.language_model_loss(module, labels, logits)


def final_logits(logits: Any) -> Any:
    """`core/models/gpt/gpt_model.py`, where logits are returned as such: the final softcap on them, if there is one."""
    return logits if _slot.runtime is None else _slot.runtime.final_logits(logits)


def train_begins(model: list[Any], optimizer: Any, opt_param_scheduler: Any) -> None:
    """`training/training.py train`, after the checkpoint was loaded and before the first step. Collective."""
    if _slot.runtime is not None:
        with one_sentence(_slot.runtime.rank):
            _slot.runtime.train_begins(model, optimizer, opt_param_scheduler)


def data_begins() -> None:
    """`build_train_valid_test_data_iterators`, at its beginning: before any data set is built. Collective."""
    if _slot.runtime is not None:
        with one_sentence(_slot.runtime.rank):
            _slot.runtime.files.judge(_slot.runtime.host.vocab_size())


def data_ready(provider: Any, loaders: tuple[Any, Any, Any], train: Any, valid: Any) -> None:
    """`build_train_valid_test_data_iterators`, at its end, once for each model chunk."""
    if _slot.runtime is not None:
        _slot.runtime.rewinds.data.ready(provider, loaders, train, valid)


def passes_over(data_iterator: Any) -> bool:
    """`train_step`, before anything: whether the step's samples were drawn and dropped. The same on every rank."""
    return _slot.runtime is not None and _slot.runtime.passes_over(data_iterator)


def step_begins() -> None:
    """`train_step`, before forward and backward."""
    if _slot.runtime is not None:
        _slot.runtime.step_begins()


def losses_ready(losses_reduced: Sequence[dict[str, Any]]) -> None:
    """`train_step`, after the last forward and backward: this rank's micro-batch losses."""
    if _slot.runtime is not None:
        _slot.runtime.losses_ready(losses_reduced)


def update_allowed(optimizer: Any, grad_norm: Any) -> bool:
    """`core/optimizer/optimizer.py step`, between the norm and `step_with_ready_grads`: the gate. Collective."""
    if _slot.runtime is None:
        return True
    with one_sentence(_slot.runtime.rank):
        return _slot.runtime.update_allowed(optimizer, grad_norm)


def update_done(update_successful: bool) -> None:
    """`train_step`, right after `optimizer.step()`."""
    if _slot.runtime is not None:
        _slot.runtime.update_done(update_successful)


def exit_after_step(should_checkpoint: bool, should_exit: bool, exit_code: int) -> tuple[bool, bool, int]:
    """`train`, after `train_step`: what Megatron wants, or our own halt."""
    if _slot.runtime is None:
        return should_checkpoint, should_exit, exit_code
    with one_sentence(_slot.runtime.rank):
        return _slot.runtime.exit_after_step(should_checkpoint, should_exit, exit_code)


def rewound(operations: int) -> tuple[int, int] | None:
    """`train`, right after: the iteration, and its floating-point operations so far, at which the loop goes on."""
    return None if _slot.runtime is None else _slot.runtime.rewinds.go_on(operations)


def evaluated(suffix: str, total_loss_dict: dict[str, Any]) -> None:
    """`evaluate_and_print_results`, after each validation set: its losses, empty but on the last pipeline stage."""
    if _slot.runtime is not None:
        with one_sentence(_slot.runtime.rank):
            _slot.runtime.evaluated(suffix, total_loss_dict)


def log_string(total_loss_dict: dict[str, Any]) -> str:
    """`training_log`, before the losses: what is added to Megatron's log line; losses of no step are taken out."""
    return "" if _slot.runtime is None else _slot.runtime.log_string(total_loss_dict)


def add_checkpoint_state(state_dict: dict[str, Any]) -> None:
    """`training/checkpointing.py generate_state_dict`: our state, as one JSON string."""
    if _slot.runtime is not None:
        _slot.runtime.add_checkpoint_state(state_dict)


def load_checkpoint_state(state_dict: dict[str, Any]) -> None:
    """`training/checkpointing.py load_checkpoint`: the inverse."""
    if _slot.runtime is not None:
        _slot.runtime.load_checkpoint_state(state_dict)


def save_begins(save_dir: str, iteration: int) -> None:
    """`training/checkpointing.py save_checkpoint`, before anything is written. Collective."""
    if _slot.runtime is not None:
        with one_sentence(_slot.runtime.rank):
            _slot.runtime.checkpoints.save_begins(save_dir, iteration)


def checkpoint_write[**P, T](write: Callable[P, T]) -> Callable[P, T | None]:
    """`save_checkpoint`: what writes the files, such that a full disk does not end the run."""
    return write if _slot.runtime is None else _slot.runtime.checkpoints.survives_a_full_disk(write)


def checkpoint_saved(save_dir: str, iteration: int, async_save_request: Any) -> None:
    """`training/checkpointing.py save_checkpoint`, after the last rank has written, or the request to. Collective."""
    if _slot.runtime is not None:
        _slot.runtime.checkpoints.saved(save_dir, iteration, async_save_request)


def moves_tracker() -> bool:
    """`save_checkpoint`: whether the tracker file is the plugin's to move."""
    return _slot.runtime is not None and _slot.runtime.checkpoints.moves_tracker()


def load_begins(load_dir: str | None, optimizer: Any) -> None:
    """`training/checkpointing.py load_checkpoint`, before anything is read. Collective."""
    if _slot.runtime is not None:
        with one_sentence(_slot.runtime.rank):
            _slot.runtime.checkpoints.load_begins(load_dir, optimizer)


def strict_load_failed(error: Exception) -> None:
    """`load_checkpoint`, where Megatron is about to repeat a failed strict load with strict=False."""
    if _slot.runtime is not None:
        with one_sentence(0):  # a rank fails alone here, so each says why
            _slot.runtime.checkpoints.strict_load_failed(error)


def failed_load_code() -> int | None:
    """`load_checkpoint` and what it calls: the exit code of a load that failed; Megatron's own is None, so 0."""
    return None if _slot.runtime is None else 1
