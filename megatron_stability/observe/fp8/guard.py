"""What a withheld step and a load do to FP8 scaling state, whoever keeps it: emulation, or Transformer Engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_stability.echo import say
from megatron_stability.errors import UsageError
from megatron_stability.numerics.fp8.config import Fp8


class ScalingGuard:
    """One a rank; its state is of this process.

    Attributes:
        recalibrates_until: the last step in which scales may find their place anew; 0: none.
    """

    def __init__(self, fp8: Fp8, device: torch.device, speaks: bool) -> None:
        """Nothing was withheld yet.

        Args:
            fp8: the section; `keep_amax_after_skips` and `recalibrate` are read.
            device: where the collective's backend wants its tensors.
            speaks: whether this rank says what is done.
        """
        self._fp8, self._device, self._speaks = fp8, device, speaks
        self._stale_skips = 0
        self.recalibrates_until = 0

    def applied(self) -> None:
        """A step changed the weights."""
        self._stale_skips = 0

    def puts_back(self, step: int, stale: bool) -> bool:
        """Whether a withheld step's state goes back; collective over all ranks, each of which is in that step.

        Args:
            step: 1-based.
            stale: a scale of this rank was made for another tensor than the step had.

        Returns:
            False where stale scales are why steps are withheld again and again: the new amax is kept.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor(float(stale), device=self._device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            stale = bool(flag)
        self._stale_skips = self._stale_skips + 1 if stale else 0
        if self._stale_skips < self._fp8.keep_amax_after_skips:
            return True
        say(
            f"step {step} withheld with stale FP8 scales for the {self._stale_skips}. time in a row: the new amax is "
            "kept",
            self._speaks,
        )
        return False

    def lacking(self, complaint: str, iteration: int, way_out: str, then: str) -> None:
        """A load without its scaling state: refused, or recalibrated where that is asked for.

        Args:
            complaint: of the checkpoint, as "lacks ...".
            iteration: that was loaded.
            way_out: what the user may do.
            then: what the steps of a recalibration do; `{until}` is the last one.

        Raises:
            UsageError: no recalibration is asked for.
        """
        if self._fp8.recalibrate == 0:
            raise UsageError(f"the checkpoint of iteration {iteration} {complaint}; {way_out}")
        self.recalibrates_until = iteration + self._fp8.recalibrate
        say(f"the checkpoint {complaint}; {then.format(until=self.recalibrates_until)}", self._speaks)
