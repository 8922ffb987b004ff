"""Ranks that disagree on what must be equal: where the run is, what was decided, weights, or what they compute."""

from __future__ import annotations

from megatron_stability.detect.base import Stateless
from megatron_stability.detect.config import Early, Switch
from megatron_stability.records import StepRecord, Tier, Verdict

#: Signals that count ranks outvoted by their replicas (`observe.wide.Replicas`), causes first, and what each says.
REPLICAS = {
    "ranks/weights": "the weights of {} differ in their bits from its data-parallel replicas'",
    "ranks/expert_weights": "the expert weights of {} differ in their bits from its replicas'",
    "ranks/compute": "what {} makes of a fixed micro-batch differs in its bits from its replicas': wrong but finite",
}


class RankAgreement(Stateless):
    """A rank that differs from the others where they must be equal: no later collective means what it says.

    Step, sample cursor and the digest of past decisions are compared with rank 0's on every step, weights and the
    result of a fixed micro-batch with those of data-parallel replicas on the steps that measure them. Of two replicas
    that differ both are named.
    """

    name = "rank_agreement"

    def __init__(self, config: Switch, early: Early) -> None:
        del config, early  # counts have no threshold

    def inspect(self, record: StepRecord) -> Verdict | None:
        """A SYSTEM verdict; its value is the number of disagreeing ranks."""
        ranks = record.disagreeing_ranks
        if not ranks:
            return None
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        found = [what.format(who) for name, what in REPLICAS.items() if record.signals.get(name)]
        return Verdict(
            detector=self.name,
            tier=Tier.SYSTEM,
            step=record.step,
            value=float(len(ranks)),
            threshold=0.0,
            reason=found[0] if found else f"step, sample cursor or past decisions of {who} differ from rank 0's",
        )
