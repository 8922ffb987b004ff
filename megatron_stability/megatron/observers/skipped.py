"""How many targets of a step the skip list has taken out of the loss."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from megatron_stability.megatron.access.skipped import SkippedDocuments
from megatron_stability.observe.hook import Hook
from megatron_stability.signals import ways


class SkipHook(Hook):
    """The signal `data/masked`; ranks that have the data set count the whole global batch, and so agree."""

    signals = ways(("data/masked",))

    def __init__(self, skipped: SkippedDocuments, args: Namespace) -> None:
        """Reads Megatron's cursor at each step.

        Args:
            skipped: of this rank.
            args: Megatron's.
        """
        self._skipped, self._args = skipped, args

    def observe(self) -> Mapping[str, float]:
        """Of the step that runs; nothing on ranks without the data set."""
        if self._skipped.masks is None:
            return {}
        first = self._args.consumed_train_samples
        return {"data/masked": float(self._skipped.masks.targets(first, first + get_current_global_batch_size()))}
