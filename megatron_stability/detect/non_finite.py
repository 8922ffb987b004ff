"""NaN or Inf in a loss, gradient or attention logit, and steps without a valid token: before anything is compared."""

from __future__ import annotations

from megatron_stability.detect.base import Stateless
from megatron_stability.detect.config import Early, Switch
from megatron_stability.records import StepRecord, Tier, Verdict


class NonFinite(Stateless):
    """Judges the record's counts, never its values: every comparison with a NaN is false (Megatron-LM issue 3460).

    A global batch without a valid target token has no mean loss, so it is a finding of the same tier.
    """

    name = "non_finite"

    def __init__(self, config: Switch, early: Early) -> None:
        del config, early  # counts have no threshold

    def inspect(self, record: StepRecord) -> Verdict | None:
        """A NON_FINITE verdict; its value is the number of non-finite losses, norms and heads (0: no valid token)."""
        heads = int(record.signals.get("attention/nonfinite_heads", 0))
        if record.finite and record.tokens > 0 and not heads:
            return None
        found = []
        if record.nonfinite_losses:
            found.append(f"{record.nonfinite_losses} non-finite micro-batch losses")
        if record.nonfinite_grads:
            found.append(f"a non-finite gradient norm on {record.nonfinite_grads} ranks")
        if heads:
            found.append(f"a non-finite largest attention logit in {heads} heads")
        if record.overflow:
            found.append("overflow reported by the loss scaler")
        if not record.tokens > 0:
            found.append(f"{record.tokens:g} valid tokens in the global batch")
        reason = ", ".join(found)
        if record.culprit_ranks:
            reason += f" (first seen on ranks {', '.join(map(str, record.culprit_ranks))})"
        return Verdict(
            detector=self.name,
            tier=Tier.NON_FINITE,
            step=record.step,
            value=float(record.nonfinite_losses + record.nonfinite_grads + heads),
            threshold=0.0,
            reason=reason,
        )
