"""A training command as the checks see it: Megatron's arguments by name, our settings, and where it would run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_stability.config import StabilityConfig

BYTES_A_WEIGHT = 14  # bf16 weight, fp32 master and two fp32 moments: what a checkpoint holds of each
MUON = ("muon", "dist_muon", "adaptive_muon")


@dataclass(frozen=True)
class Plan:
    """What a command asks for.

    Attributes:
        args: Megatron's arguments by name; what is not given has Megatron's default.
        config: the plugin's settings.
        environment: of the process that would train.
        free_bytes: of the file system that `save` is on; None: unknown.
    """

    args: Mapping[str, Any]
    config: StabilityConfig
    environment: Mapping[str, str]
    free_bytes: int | None = None

    def __getitem__(self, name: str) -> Any:
        """An argument, None where nobody knows it."""
        return self.args.get(name)

    def number(self, name: str) -> float:
        """An argument that is a number; 0 where it isn't given."""
        value = self.args.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    @property
    def acts(self) -> bool:
        """The plugin decides and does."""
        return self.config.mode == "act"

    @property
    def muon(self) -> bool:
        """The optimizer orthogonalises its updates."""
        return self["optimizer"] in MUON

    @property
    def moe(self) -> bool:
        """There are experts."""
        return bool(self["num_experts"])

    @property
    def fp8(self) -> bool:
        """Linear layers run in FP8, or as if."""
        return bool(self["fp8"]) or self.config.fp8.emulate != "none"

    @cached_property
    def qk_bounded(self) -> str:
        """What keeps attention logits from growing; empty: nothing."""
        model = self.config.model
        ways = {
            "a QK-norm": bool(self["qk_layernorm"]) or (model.qk_norm != "none" and self.config.mode != "off"),
            "QK-clip": bool(self["qk_clip"]) or (self.config.qk_clip.enabled and self.acts),
            "an attention softcap": model.attention_softcap is not None and self.config.mode != "off",
        }
        return " and ".join(way for way, on in ways.items() if on)

    @cached_property
    def steps(self) -> float:
        """Training steps; 0: unknown."""
        if self.number("train_iters"):
            return self.number("train_iters")
        batch = self.number("global_batch_size")
        return self.number("train_samples") / batch if batch else 0.0

    @cached_property
    def warmup_steps(self) -> float:
        """Steps in which the learning rate rises."""
        batch = self.number("global_batch_size")
        by_samples = self.number("lr_warmup_samples") / batch if batch else 0.0
        return self.number("lr_warmup_iters") or by_samples or self.number("lr_warmup_fraction") * self.steps

    @cached_property
    def weights(self) -> float:
        """Trainable weights, by the sizes of a GPT; 0 where a size is not known."""
        h, layers, heads = self.number("hidden_size"), self.number("num_layers"), self.number("num_attention_heads")
        vocabulary = self.number("padded_vocab_size") or self.number("vocab_size")
        if not (h and layers and heads and vocabulary):
            return 0.0
        width = self.number("kv_channels") or h / heads
        groups = self.number("num_query_groups") if self["group_query_attention"] else heads
        attention = h * width * (2 * heads + 2 * groups)
        linears = 3 if self["swiglu"] else 2
        experts = self.number("num_experts") or 1
        ffn = self.number("ffn_hidden_size") or 4 * h
        ffn = (self.number("moe_ffn_hidden_size") or ffn) if self.moe else ffn
        heads_of_words = 2 if self["untie_embeddings_and_output_weights"] else 1
        return layers * (attention + experts * linears * h * ffn) + heads_of_words * vocabulary * h

    @property
    def checkpoint_bytes(self) -> float:
        """Of one checkpoint with optimizer state; 0: unknown."""
        return BYTES_A_WEIGHT * self.weights


def free_bytes(folder: str | None) -> int | None:
    """Free space where a folder is or would be; None where there is no such place."""
    if not folder:
        return None
    place = Path(folder).absolute()
    there = next((path for path in (place, *place.parents) if path.is_dir()), None)
    return None if there is None else shutil.disk_usage(there).free
