"""Megatron's argument names over a Bridge ConfigContainer, so that one runtime serves both loops.

The sections of the container carry Megatron's own names (`train.train_iters`, `optimizer.lr`, `checkpoint.save`), so a
name is looked up in one section after the other. What moves during training is read from Bridge's train state, which a
load replaces; what has another name, or none, is a property here.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from megatron.bridge.models.gpt_provider import local_layer_spec
from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig, MockGPTDatasetConfig
from megatron.bridge.training.state import GlobalState
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

# Mixed precision first: Bridge copies it over the model's fields before anything is built.
SECTIONS = (
    *("mixed_precision", "model", "train", "validation", "optimizer", "scheduler", "ddp", "dist", "rng", "checkpoint"),
    *("rerun_state_machine", "tokenizer", "dataset"),
)
_OWN = frozenset({"container", "state", "drill_fault", "iteration"})


class BridgeArgs(Namespace):
    """What the runtime reads and writes as Megatron's `args`.

    Attributes:
        container: Bridge's configuration.
        state: Bridge's global state, once there is one.
        drill_fault: faults on purpose, as `--drill-fault` takes them.
        iteration: the step at which training began.
    """

    # Of Megatron's flags, and alike for every run under Bridge.
    spec = ("megatron_stability",)
    stability_own_model = True  # MTP layers come from the model's own layer spec
    create_attention_mask_in_dataloader = False

    def __init__(self, container: ConfigContainer, drill_fault: Sequence[str] = ()) -> None:
        """Takes the container, with its mixed precision resolved."""
        super().__init__()
        self.container = container
        self.state: GlobalState | None = None
        self.drill_fault = list(drill_fault)
        self.iteration = 0

    def __getattr__(self, name: str) -> Any:
        """What is no property: the first section that has the name."""
        section = None if name.startswith("_") or name in _OWN else self.section_of(name)
        if section is None:
            raise AttributeError(f"Megatron-Bridge's configuration has no {name}")
        return getattr(getattr(self.container, section), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Into the section that has the name."""
        own = name in _OWN or isinstance(getattr(type(self), name, None), property)
        section = None if own else self.section_of(name)
        if section is None:
            super().__setattr__(name, value)
        else:
            setattr(getattr(self.container, section), name, value)

    def section_of(self, name: str) -> str | None:
        """The name of the first section that has a setting of this name."""
        return next((each for each in SECTIONS if hasattr(getattr(self.container, each, None), name)), None)

    # --- what moves -----------------------------------------------------------------------------------------------

    @property
    def _train(self) -> Any:
        assert self.state is not None, "Bridge's state is not there before a load or the first step"
        return self.state.train_state

    @property
    def curr_iteration(self) -> int:
        """Steps done."""
        return int(self._train.step)

    @property
    def consumed_train_samples(self) -> int:
        """The data cursor."""
        return int(self._train.consumed_train_samples)

    @property
    def skipped_train_samples(self) -> int:
        """Of these, samples that were passed over."""
        return int(self._train.skipped_train_samples)

    @skipped_train_samples.setter
    def skipped_train_samples(self, value: int) -> None:
        self._train.skipped_train_samples = value

    @property
    def do_valid(self) -> bool:
        """Whether there is a validation set."""
        return bool(self._train.do_valid)

    # --- ranks ----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return int(self.container.get_data_parallel_size(self.world_size))

    # --- other names ----------------------------------------------------------------------------------------------

    @property
    def transformer_impl(self) -> str:
        """What runs the layers: a local spec decides it, whatever the model's field of this name says."""
        model = self.container.model
        local = model.transformer_layer_spec is local_layer_spec or find_spec("transformer_engine") is None
        return "local" if local else str(model.transformer_impl)

    @property
    def num_experts(self) -> int | None:
        """Experts of an MoE layer."""
        experts: int | None = self.container.model.num_moe_experts
        return experts

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, as `GPTModelProvider.provide` pads them."""
        model = self.container.model
        if not model.should_pad_vocab:
            return int(model.vocab_size)
        padded = calculate_padded_vocab_size(
            model.vocab_size, model.make_vocab_size_divisible_by, model.tensor_model_parallel_size
        )
        return int(padded)

    @property
    def use_megatron_fsdp(self) -> bool:
        """FSDP, which either of two sections turns on."""
        return bool(self.container.ddp.use_megatron_fsdp or self.container.dist.use_megatron_fsdp)

    @property
    def no_load_rng(self) -> bool:
        """Bridge says what is loaded."""
        return not self.container.checkpoint.load_rng

    @property
    def no_load_optim(self) -> bool:
        """Bridge says what is loaded."""
        return not self.container.checkpoint.load_optim

    @property
    def mock_data(self) -> bool:
        """Whether the samples are Megatron's mock data."""
        return isinstance(self.container.dataset, MockGPTDatasetConfig)

    @property
    def data_path(self) -> list[str] | None:
        """The blend of all splits, as Megatron's flag takes it; Bridge makes it of `dataset.data_path` late."""
        dataset = self.container.dataset
        paths = dataset.data_path if isinstance(dataset, GPTDatasetConfig) and not dataset.blend else None
        if not paths:
            return _words(getattr(dataset, "blend", None))
        return paths.split() if isinstance(paths, str) else [str(path) for path in paths]

    @property
    def train_data_path(self) -> list[str] | None:
        """The blend of the training split, where splits have blends of their own."""
        return self._blend_of(0)

    @property
    def valid_data_path(self) -> list[str] | None:
        """As `train_data_path`, of validation."""
        return self._blend_of(1)

    @property
    def test_data_path(self) -> list[str] | None:
        """As `train_data_path`, of the test split."""
        return self._blend_of(2)

    def _blend_of(self, split: int) -> list[str] | None:
        blends = getattr(self.container.dataset, "blend_per_split", None)
        return _words(blends[split]) if blends else None


def _words(blend: Any) -> list[str] | None:
    """Prefixes, each behind its weight where there are weights."""
    if not blend:
        return None
    prefixes, weights = [str(prefix) for prefix in blend[0]], blend[1]
    if weights is None:
        return prefixes
    return [word for weight, prefix in zip(weights, prefixes, strict=True) for word in (str(weight), prefix)]
