"""What a step that was not applied had read and drawn, for its incident bundle: every token and every generator."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_stability.megatron.access.data_iterators import DataIterators
from megatron_stability.records import StepRecord

# Exit codes of megatron/core/rerun_state_machine.py, whose verdicts are otherwise in the log only.
RERUN_VERDICTS = {
    16: "Megatron's rerun state machine met an unexpected result and has to run the step again from a checkpoint",
    17: "Megatron's rerun state machine met an unexpected result that did not stand when the step was run again",
}


def evidence(data: DataIterators, record: StepRecord) -> dict[str, torch.Tensor]:
    """Collective; both come from Megatron's rerun machine, which keeps them for a step unless `--rerun-mode disabled`.

    Args:
        data: this rank's iterators.
        record: the step.

    Returns:
        On rank 0, elsewhere nothing: `tokens` [samples, s] int32 in the global order of consumption, `sample_ids`
        [samples] int64, and for each rank the generators' states before the forward, `rng.RANK.NAME` uint8. What the
        rerun machine did not keep is not there.
    """
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((parallel_state.get_data_parallel_rank(), _tokens(data), _generators()), everyone, dst=0)
    if everyone is None:
        return {}
    found = {f"rng.{rank}.{name}": state for rank, (_, _, states) in enumerate(everyone) for name, state in states}
    # Megatron deals micro-batches out in turn: the first to every data-parallel rank, then the second.
    parts = sorted(
        ((number, replica, part) for replica, tokens, _ in everyone for number, part in enumerate(tokens)),
        key=lambda each: each[:2],
    )
    if parts:
        found["tokens"] = torch.cat([part for _, _, part in parts])
        if len(found["tokens"]) == record.samples:
            found["sample_ids"] = torch.arange(record.first_sample, record.last_sample)
    return found


def _tokens(data: DataIterators) -> list[torch.Tensor]:
    """[b, s] int32 of each micro-batch, on one rank of each replica."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    if not first or parallel_state.get_context_parallel_rank() or parallel_state.get_tensor_model_parallel_rank():
        return []
    batches = getattr(data.first, "saved_microbatches", [])
    return [batch["tokens"].to("cpu", torch.int32) for batch in batches if "tokens" in batch]


def _generators() -> list[tuple[str, torch.Tensor]]:
    saved = getattr(get_rerun_state_machine(), "saved_state", None)
    if not saved:
        return []
    states = saved["rng_state"]
    found = [("torch", states["torch_rng_state"]), ("device", states["cuda_rng_state"])]
    tracker = (saved["other_state"] or {}).get("rng_tracker_states", {})
    found += [(f"tracker.{name}", state) for name, state in tracker.items()]
    return [(name, state.cpu()) for name, state in found if isinstance(state, torch.Tensor)]
