"""Bridge's loop as the runtime sees it: what it asks of a host, and the callbacks that tell it where training is."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from megatron.bridge.training.callbacks import Callback, CallbackContext

from megatron_stability import config as tree
from megatron_stability.megatron import seams
from megatron_stability.megatron.access import handle
from megatron_stability.megatron.access.host import Host
from megatron_stability.nemo.bridge_args import BridgeArgs

_KEYS = MappingProxyType(
    {tree.flag(path): ".".join(("stability", *path)) for path, _ in tree.leaves()}
    | {f"--{split}-data-path": "dataset.blend_per_split" for split in ("train", "valid", "test")}
    | {"--data-path": "dataset.data_path", "--split": "dataset.split", "--vocab-size": "tokenizer.vocab_size"}
    | {"--fp8-format": "mixed_precision (fp8)", "--num-experts": "model.num_moe_experts"}
)


class Manager(Protocol):
    """Bridge's checkpoint manager: `checkpoint_manager.StabilityCheckpointManager`.

    Attributes:
        loaded: whether Bridge asked it for a checkpoint.
    """

    loaded: bool

    def finalize_async_saves(self, state: Any, blocking: bool = False) -> None:
        """Collective: complete what is written."""

    def written(self) -> None:
        """All bytes of the oldest save under way are on disk."""


class BridgeHost(Host):
    """State that Megatron keeps in globals, from Bridge's own state.

    Attributes:
        args: the run's.
        manager: Bridge's checkpoint manager, from its set-up on.
    """

    def __init__(self, args: BridgeArgs) -> None:
        """Takes the run's arguments."""
        self.args = args
        self.manager: Manager | None = None

    def writers(self) -> tuple[Any, Any]:
        """Bridge makes them on the last rank only."""
        state = self.args.state
        assert state is not None
        return state.tensorboard_logger, state.wandb_logger

    def vocab_size(self) -> int:
        """The tokenizer's, which Bridge hands to the data set; else the model's."""
        tokenizer = getattr(self.args.container.dataset, "tokenizer", None)
        return int(tokenizer.vocab_size if tokenizer is not None else self.args.container.model.vocab_size)

    def finish_saves(self) -> None:
        """Collective: wait for asynchronous saves and complete them."""
        if self.manager is not None and self.args.state is not None:
            self.manager.finalize_async_saves(self.args.state, blocking=True)

    def arguments(self, args: Namespace) -> Mapping[str, Any]:
        """The container, section by section."""
        sections: Mapping[str, Any] = self.args.container.to_dict()
        return {
            f"{section}.{name}": value
            for section, values in sections.items()
            if isinstance(values, Mapping)
            for name, value in values.items()
        }

    def in_its_words(self, sentence: str) -> str:
        """Megatron's flags and ours as keys of the recipe."""
        return re.sub(r"--[a-z0-9]+(?:-[a-z0-9]+)*", lambda found: self._key(found[0]), sentence)

    def _key(self, flag: str) -> str:
        if flag in _KEYS:
            return _KEYS[flag]
        name = flag.lstrip("-").replace("-", "_")
        section = self.args.section_of(name)
        return flag if section is None else f"{section}.{name}"


class StabilityCallback(Callback):
    """Tells the runtime; Bridge calls it on every rank."""

    def __init__(self, args: BridgeArgs, before_training: Callable[[], None]) -> None:
        """`before_training`: called once everything is built."""
        self._args, self._before_training = args, before_training

    def on_train_start(self, context: CallbackContext) -> None:
        """Everything is built and loaded, and no step was done. Collective."""
        args = self._args
        args.state, args.iteration = context.state, context.state.train_state.step
        checkpoint = context.state.cfg.checkpoint
        if checkpoint.load is not None and checkpoint.pretrained_checkpoint is None and not args.iteration:
            # Bridge asks its manager for nothing where the folder holds no checkpoint, and trains from random weights.
            manager = _manager()
            if manager is not None and not manager.loaded:
                seams.load_begins(checkpoint.load, context.optimizer)
        self._before_training()
        seams.train_begins(context.model, context.optimizer, context.scheduler)

    def on_eval_end(self, context: CallbackContext) -> None:
        """A validation set's losses."""
        seams.evaluated("", dict(context.total_loss_dict or {}))

    def on_test_end(self, context: CallbackContext) -> None:
        """The test set's losses."""
        seams.evaluated("", dict(context.total_loss_dict or {}))

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Every byte of the oldest save under way is written, on all ranks."""
        manager = _manager()
        if manager is not None:
            manager.written()


class DataCallback(Callback):
    """Judges the data; one of its own, for Bridge refuses it beside `train.num_epochs`, which no blend goes with."""

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Before any data set is built. Collective."""
        seams.data_begins()


def _manager() -> Manager | None:
    runtime = handle.installed()
    return runtime.host.manager if runtime is not None and isinstance(runtime.host, BridgeHost) else None
