"""What the runtime asks of the loop around it, beside the seams: Megatron's own here; `nemo` has Megatron-Bridge's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron.training import get_tensorboard_writer, get_tokenizer, get_wandb_writer
from megatron.training.async_utils import maybe_finalize_async_save


class Host:
    """Megatron's own training loop, whose state is in globals."""

    def writers(self) -> tuple[Any, Any]:
        """TensorBoard's writer and W&B's, each None where this rank has none."""
        return get_tensorboard_writer(), get_wandb_writer()

    def vocab_size(self) -> int:
        """Tokens of the tokenizer: the model's vocabulary without padding."""
        return int(get_tokenizer().vocab_size)

    def finish_saves(self) -> None:
        """Collective: wait for asynchronous saves and complete them."""
        maybe_finalize_async_save(blocking=True)

    def arguments(self, args: Namespace) -> Mapping[str, Any]:
        """The run's settings, for an incident bundle."""
        return vars(args)

    def in_its_words(self, sentence: str) -> str:
        """A sentence for the user, with settings named as this loop names them."""
        return sentence
