"""Puts the plugin around a run of Megatron-Bridge: `attach` before `pretrain`, `close` after it.

What Bridge lets a plugin give it is given: layer spec, checkpoint manager, callbacks, tensor inspection, NaN checks.
The update gate, the loss of the head and the way out of the loop are seams (`opening`), as under Megatron's own loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from megatron.bridge.models.gpt_provider import (
    GPTModelProvider,
    default_layer_spec,
    local_layer_spec,
    transformer_engine_layer_spec,
)
from megatron.bridge.training import train
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import ConfigContainer, TensorInspectConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.training import print_rank_0

from megatron_stability.config import StabilityConfig
from megatron_stability.echo import said
from megatron_stability.errors import UsageError
from megatron_stability.megatron import arguments, cpu
from megatron_stability.megatron.access import handle
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.megatron.fp8.flags import refuse_inactive_fp8
from megatron_stability.megatron.model import layer_specs, settings
from megatron_stability.megatron.observers import hooks
from megatron_stability.megatron.runtime import Runtime
from megatron_stability.megatron.start import faults
from megatron_stability.megatron.start.input_checks import check_data
from megatron_stability.nemo import describe, injection
from megatron_stability.nemo.bridge_args import BridgeArgs
from megatron_stability.nemo.loop import BridgeHost, DataCallback, StabilityCallback
from megatron_stability.records import Action

MANAGER = "megatron_stability.nemo.checkpoint_manager.StabilityCheckpointManager"
_STOCK_SPECS = (default_layer_spec, transformer_engine_layer_spec, local_layer_spec)
FP8_STATISTICS = ("underflows%", "scale_inv_min", "scale_inv_max", "mse")


@dataclass(frozen=True)
class Attached:
    """What goes into Bridge's `pretrain(container, forward_step, callbacks)`."""

    callbacks: list[Callback]
    forward_step: Callable[..., Any]
    lines: tuple[str, ...]

    def describe(self) -> list[str]:
        """What is active, what is not and why; one line each."""
        return list(self.lines)

    def close(self) -> None:
        """After `pretrain`, however it ended: complete the last checkpoint, close the ledger, forget the runtime."""
        handle.uninstall()


def attach(container: ConfigContainer, stability: StabilityConfig, drill_fault: Sequence[str] = ()) -> Attached:
    """Install the runtime, and set in the container what the plugin needs.

    Args:
        container: the merged recipe, before `pretrain`; changed in place.
        stability: the validated tree, mode `observe` or `act`.
        drill_fault: faults on purpose, as `--drill-fault` takes them.

    Returns:
        What `pretrain` is to be called with.

    Raises:
        UsageError: the tree and the recipe can't both be had; names both keys and the way out.
    """
    refuse_inactive(container, stability)
    args = BridgeArgs(container, drill_fault)
    host = BridgeHost(args)
    decide = stability.decide.model_copy(update={"rewind": "restart"})
    stability = stability.model_copy(update={"decide": decide})
    with in_its_words(host):
        _refuse_what_cannot_work(stability, args)
        faults.refuse_unreadable(drill_fault)
    lines = _set(stability, args)
    put_back = _lend(container, stability)
    handle.install(Runtime(stability, args, host))

    def before_training() -> None:
        for line in lines:
            print_rank_0(said(f"> megatron-stability: {line}"))
        put_back()

    step = injection.inject(args) if drill_fault else forward_step
    callbacks: list[Callback] = [StabilityCallback(args, before_training)]
    if container.train.num_epochs is None:
        callbacks.append(DataCallback())
    return Attached(callbacks, step, (*describe.active(stability, args), *lines))


@contextlib.contextmanager
def in_its_words(host: BridgeHost) -> Iterator[None]:
    """Errors name keys of the recipe instead of flags."""
    try:
        yield
    except UsageError as error:
        raise UsageError(host.in_its_words(str(error))) from None


def refuse_inactive(container: ConfigContainer, stability: StabilityConfig) -> None:
    """Raise for what Bridge would accept and not do; for every run, the plugin on or off.

    Args:
        container: the merged recipe; a mixed precision that is named by a string is resolved in it.
        stability: the validated tree.

    Raises:
        UsageError: names the key and the way out.
    """
    if isinstance(container.mixed_precision, str):
        container.mixed_precision = get_mixed_precision_config(container.mixed_precision)
    args = BridgeArgs(container)
    no_engine = find_spec("transformer_engine") is None
    why = "Transformer Engine is not installed" if no_engine else "the layer spec is the local one"
    for name in ("fp8", "fp4"):
        if argument(args, name) and args.transformer_impl == "local":
            raise UsageError(
                f"mixed_precision with {name} {getattr(args, name)} would train in BF16: {why}; use a GPU with "
                "Transformer Engine and its layer spec, or bf16_mixed with stability.fp8.emulate for a dry run"
            )
    if getattr(container.model, "qk_clip", False) and args.transformer_impl == "local":
        raise UsageError(
            f"model.qk_clip needs the attention of Transformer Engine, and {why}; use stability.qk_clip.enabled instead"
        )
    if container.checkpoint.async_save and cpu.installed():
        raise UsageError(
            "checkpoint.async_save on the CPU backend: Bridge spawns its writer without the backend, and the run would "
            "wait for it for ever; set it to false"
        )
    with in_its_words(BridgeHost(args)):
        settings.refuse_what_cannot_work(stability, args)
        refuse_inactive_fp8(stability.fp8, stability.mode, args)
        check_data(args)


def _refuse_what_cannot_work(stability: StabilityConfig, args: BridgeArgs) -> None:
    container = args.container
    if not hasattr(train, "seams"):
        raise UsageError("the seams are closed: call megatron_stability.nemo.opening.install() before importing Bridge")
    if not isinstance(container.model, GPTModelProvider):
        raise UsageError(
            f"model is a {type(container.model).__name__}: the plugin trains what a GPTModelProvider builds; use a "
            "recipe of a GPT, or stability.mode off"
        )
    spec = container.model.transformer_layer_spec
    if needs_spec(stability) and spec not in _STOCK_SPECS:
        raise UsageError(
            f"model.transformer_layer_spec {getattr(spec, '__qualname__', spec)}: stability.model and stability.fp8 "
            "act through a layer spec of their own; use a recipe with a stock spec, or drop the settings"
        )
    if stability.data.skip_list is not None:
        raise UsageError("stability.data.skip_list: Bridge does not say where its iterator begins; leave the list out")
    if stability.decide.snapshot_steps:
        raise UsageError("stability.decide.snapshot_steps: Bridge has no rewind within the process; set it to 0")
    if stability.checkpoint.manifest:
        _refuse_unproven_checkpoints(container)
    if container.inprocess_restart is not None and container.inprocess_restart.enabled:
        raise UsageError("inprocess_restart with stability: the runtime is of one start; leave the section out")
    if container.peft is not None:
        raise UsageError("peft with stability: adapters are not covered; leave the section out, or stability.mode off")
    arguments.refuse_what_cannot_work(stability, args)
    hooks.refuse_what_cannot_work(stability, args)


def _refuse_unproven_checkpoints(container: ConfigContainer) -> None:
    checkpoint = container.checkpoint
    off = "or give stability.checkpoint.manifest=false"
    if checkpoint.ckpt_format != "torch_dist":
        form = checkpoint.ckpt_format
        raise UsageError(f"checkpoint.ckpt_format {form}: no manifest covers it; use torch_dist, {off}")
    if (checkpoint.most_recent_k or -1) > -1:
        raise UsageError(
            f"checkpoint.most_recent_k {checkpoint.most_recent_k}: deletes checkpoints whether or not a newer one is "
            f"good; use stability.checkpoint.keep, {off}"
        )
    if checkpoint.custom_manager_class not in (None, MANAGER):
        raise UsageError(f"checkpoint.custom_manager_class: the plugin's manager takes its place; leave it out, {off}")


def _set(stability: StabilityConfig, args: BridgeArgs) -> list[str]:
    """Change the container; what stays changed for the whole run."""
    container, lines = args.container, []
    settings.apply(stability.model, args)
    if any(rule.action is Action.REWIND for rule in stability.decide.rules):
        lines.append("a rewind ends the run with code 19: `megatron-stability nemo --supervise` starts it again")
    if stability.mode == "act":
        container.rerun_state_machine.check_for_nan_in_loss = False
        container.ddp.check_for_nan_in_grad = False
        lines.append(
            "rerun_state_machine.check_for_nan_in_loss and ddp.check_for_nan_in_grad are false: Bridge's checks would "
            "end the run before a non-finite step can be skipped; the same values are judged at the gate"
        )
    if container.rerun_state_machine.rerun_mode == "disabled" and stability.record.batch:
        lines.append("rerun_state_machine.rerun_mode is disabled: incident bundles hold neither tokens nor generators")
    lost = arguments.lost_by_a_signal(args)
    if lost:
        lines.append(BridgeHost(args).in_its_words(lost))
    return lines + _inspect_tensors(stability, args)


def _inspect_tensors(stability: StabilityConfig, args: BridgeArgs) -> list[str]:
    """Sampled FP8 statistics of Transformer Engine's own, unless the recipe has a section for them."""
    container = args.container
    if stability.fp8.inspect and container.tensor_inspect is not None and container.tensor_inspect.enabled:
        raise UsageError("stability.fp8.inspect with tensor_inspect: both would start nvdlfw-inspect; keep one")
    if not argument(args, "fp8") or container.tensor_inspect is not None or stability.fp8.inspect:
        return []
    if find_spec("nvdlfw_inspect") is None:
        return ["FP8 statistics of Transformer Engine are not logged: nvdlfw-inspect is not installed"]
    stats = [*FP8_STATISTICS, *(["overflows%"] if args.fp8_recipe == "delayed" else [])]
    log = {"enabled": True, "tensors": ["activation", "gradient", "weight"], "stats": stats, "freq": 100}
    container.tensor_inspect = TensorInspectConfig(
        enabled=True,
        features={
            "stability_fp8": {
                "enabled": True,
                "layers": {"layer_name_regex_pattern": ".*"},
                "transformer_engine": {"LogFp8TensorStats": log},
            }
        },
    )
    return ["FP8 statistics of Transformer Engine are logged every 100 steps (tensor_inspect)"]


def _lend(container: ConfigContainer, stability: StabilityConfig) -> Callable[[], None]:
    """What is there while Bridge builds, and is not embedded in checkpoints: stock Bridge loads them as its own.

    Returns:
        Puts the container's own values back.
    """
    register_allowed_target_prefix("megatron_stability.")
    model, checkpoint = container.model, container.checkpoint
    spec, impl = model.transformer_layer_spec, model.transformer_impl
    checkpoint.custom_manager_class = MANAGER
    if needs_spec(stability):
        model.transformer_impl = BridgeArgs(container).transformer_impl
        model.transformer_layer_spec = layer_specs.block_spec

    def restore() -> None:
        model.transformer_layer_spec, model.transformer_impl = spec, impl
        checkpoint.custom_manager_class = None

    return restore


def needs_spec(stability: StabilityConfig) -> bool:
    """Whether a setting acts through our layer spec."""
    return stability.model.needs_spec or stability.fp8.emulate != "none"
