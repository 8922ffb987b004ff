"""The loss seam: Megatron's logits and labels through the fused loss, and log-Z for the step's record."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_stability.errors import UsageError
from megatron_stability.numerics.config import Model
from megatron_stability.numerics.softcap import softcap
from megatron_stability.numerics.z_loss import LogZ, LossSettings, vocab_parallel_loss


def real_vocab_size(size: int, padded_vocab_size: int) -> int:
    """Rows of the vocabulary that are tokens: the tokenizer's `size`, for Megatron's arguments keep the padded number.

    Raises:
        UsageError: the tokenizer has more tokens than the model has rows.
    """
    if size > padded_vocab_size:
        raise UsageError(
            f"the tokenizer has {size} tokens, and the model {padded_vocab_size} vocabulary rows; give --vocab-size at "
            "least as many as the tokenizer has"
        )
    return size


class HeadLoss:
    """Cross-entropy, final softcap and z-loss of the language-model head and of MTP heads.

    Attributes:
        log_z: of the tokens that took part in this step's backward so far, over all heads.
    """

    def __init__(self, model: Model, vocab_size: int) -> None:
        """Args: model: the settings; vocab_size: real rows, without padding."""
        self._settings = LossSettings(vocab_size=vocab_size, cap=model.final_softcap, beta=model.z_loss)
        self.log_z = LogZ()

    def __call__(self, labels: Tensor, logits: Tensor, group: Any) -> Tensor:
        """Per-token cross-entropy of the capped logits, [b, s] fp32 nats.

        Args:
            labels: [b, s] int64.
            logits: [s, b, V/T]; used up: backward writes their gradient over them.
            group: tensor-parallel group.
        """
        loss = vocab_parallel_loss(
            logits,
            labels.transpose(0, 1).contiguous(),
            self._settings,
            group=group if group.size() > 1 else None,
            stats=self.log_z,
            overwrite=True,
        )
        return loss.transpose(0, 1).contiguous()

    def capped(self, logits: Tensor) -> Tensor:
        """Logits for those who ask for no loss, [..., V/T], |logit| ≤ cap."""
        return logits if self._settings.cap is None else softcap(logits.float(), self._settings.cap).to(logits.dtype)
