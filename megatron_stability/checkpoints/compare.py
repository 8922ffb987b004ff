"""Two checkpoints of the same step, tensor by tensor, whatever number of ranks wrote them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_stability import files
from megatron_stability.checkpoints import dcp_metadata, manifest

TOLERANCE = 0.05  # of a tensor's largest magnitude; after a few steps the order of sums alone moves bf16 weights by 1 %


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a `torch_dist` checkpoint, whole, by its key."""
    reader = dcp_metadata.reader(folder)
    state: dict[str, torch.Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(dict(state), storage_reader=reader, no_dist=True)
    return state


class _Raw(DefaultLoadPlanner):
    """Keeps objects as the bytes they were saved as: torch's own planner would unpickle them without limits."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


def rank_states(folder: Path) -> dict[str, Any]:
    """What each rank kept for itself (its generators): tensors and primitives, by key and rank."""
    reader = dcp_metadata.reader(folder)
    state: dict[str, Any] = {
        key: io.BytesIO()
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata) and key.startswith(manifest.RANK_STATE)
    }
    planner = _Raw()
    load(state, storage_reader=reader, planner=planner, no_dist=True)
    return {key: torch.load(io.BytesIO(planner.state_dict[key]), weights_only=True) for key in state}


def fingerprints(folder: Path) -> dict[str, bytes]:
    """What each rank wrote of its tensors, by file name."""
    return {path.name: files.read_bytes(path) for path in folder.glob(manifest.fingerprints_name("*"))}


def compare(one: Path, other: Path, *, bitwise: bool) -> tuple[str, bool]:
    """Compare two folders.

    Args:
        one: a complete checkpoint.
        other: likewise, of the same step.
        bitwise: demand equal bits of all tensors and of every rank's generators; else equal samples, and model weights
            within `TOLERANCE` of the tensor's largest magnitude.

    Returns:
        What was found, in words, and whether it is as demanded.
    """
    was, now = manifest.read(one), manifest.read(other)
    if was.samples != now.samples:
        return f"{now.samples} samples consumed, not {was.samples}", False
    first, second = tensors(one), tensors(other)
    if bitwise:
        if first.keys() != second.keys():
            return f"other tensors: {sorted(first.keys() ^ second.keys())[0]}", False
        # A distributed optimizer's buckets have padding that nobody wrote; what is in them has fingerprints.
        unequal = [k for k, value in first.items() if ".bucket_idx_" not in k and not _same_bits(value, second[k])]
        if unequal:
            return f"{len(unequal)} of {len(first)} tensors differ, first {unequal[0]}", False
        ranks = rank_states(one), rank_states(other)
        if text(ranks[0]) != text(ranks[1]) or fingerprints(one) != fingerprints(other):
            return "random generators or local tensors of a rank differ", False
        return f"equal to the bit: {len(first)} tensors, generators of {len(ranks[0])} ranks", True
    weights = [key for key in first if not key.startswith("optimizer") and key in second]
    worst = max((_distance(first[key], second[key]), key) for key in weights)
    said = f"{was.samples} samples both; {len(weights)} weights within {worst[0]:.2g} ({worst[1]})"
    return said, worst[0] <= TOLERANCE


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max() / one.double().abs().max().clamp_min(1e-30))


def text(value: object) -> str:
    """A nest of tensors and primitives in full, for comparison."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, dict):
        return str({key: text(item) for key, item in sorted(value.items())})
    if isinstance(value, list | tuple):
        return str([text(item) for item in value])
    return repr(value)
