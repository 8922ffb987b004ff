"""Ranks that disagree with rank 0 on where the run is."""

from __future__ import annotations

from megatron_stability.detect.base import Stateless
from megatron_stability.detect.config import Early, Switch
from megatron_stability.records import StepRecord, Tier, Verdict


class RankAgreement(Stateless):
    """A rank with another step or sample cursor than rank 0: no later collective means what it says."""

    name = "rank_agreement"

    def __init__(self, config: Switch, early: Early) -> None:
        del config, early  # counts have no threshold

    def inspect(self, record: StepRecord) -> Verdict | None:
        """A SYSTEM verdict; its value is the number of disagreeing ranks."""
        ranks = record.disagreeing_ranks
        if not ranks:
            return None
        return Verdict(
            detector=self.name,
            tier=Tier.SYSTEM,
            step=record.step,
            value=float(len(ranks)),
            threshold=0.0,
            reason=f"step or sample cursor of ranks {', '.join(map(str, ranks))} differs from rank 0's",
        )
