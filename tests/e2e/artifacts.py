"""What a run left behind, as tensors: its checkpoint, and the scalars that Megatron wrote for each step."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

# Not part of "the same state": the rerun machine counts its own calls, and the plugin's state is its own.
EXCLUDED = ("rerun_state_machine_state", "rerun_state_machine", "megatron_stability")


def checkpoint(save: Path, step: int, excluded: tuple[str, ...] = EXCLUDED) -> dict[str, Any]:
    """Every entry of a torch_dist checkpoint by name: tensors whole, the rest flattened to leaves.

    Args:
        save: Megatron's `--save` folder.
        step: the iteration.
        excluded: how names begin that are left out.

    Returns:
        Name to tensor or plain value, without `excluded`.
    """
    return read_folder(save / f"iter_{step:07d}", excluded)


def read_folder(folder: Path, excluded: tuple[str, ...] = EXCLUDED) -> dict[str, Any]:
    """As `checkpoint`, of the folder itself."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {}
    for name, entry in metadata.items():
        if name.startswith(excluded):
            continue
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        elif isinstance(entry, BytesStorageMetadata):
            state[name] = io.BytesIO()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    common = folder / "common.pt"  # 0.18; from 0.19 on it is the entry common_state
    if common.is_file():
        state |= torch.load(common, map_location="cpu", weights_only=False)
    return dict(
        leaf for name, value in state.items() for leaf in _leaves(name.partition("/shard_0_1")[0], value, excluded)
    )


def _leaves(name: str, value: Any, excluded: tuple[str, ...]) -> list[tuple[str, Any]]:
    if isinstance(value, io.BytesIO):
        value.seek(0)
        value = torch.load(value, weights_only=False)
    name = name.removeprefix("common_state[0].")
    if name in excluded:
        return []
    if name == "args":  # paths and the plugin's own flags are there; of what it counts, this must agree
        return [("consumed_train_samples", value.consumed_train_samples)]
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(f"{name}.{key}", item, excluded)]
    if isinstance(value, list | tuple) and not all(isinstance(item, int) for item in value):
        return [leaf for i, item in enumerate(value) for leaf in _leaves(f"{name}[{i}]", item, excluded)]
    if hasattr(value, "__array__"):
        return [(name, torch.as_tensor(value))]
    return [(name, value if isinstance(value, int | float | str | list | tuple | None) else repr(value))]


def pack(value: Any) -> bytes:
    """For the way back from a rank, where pickles of tensors name Megatron's own loader, which knows no uint32."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """The inverse of `pack`."""
    return torch.load(io.BytesIO(packed), weights_only=False)


def same(one: Any, other: Any) -> bool:
    """Bit equality; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
    return bool(type(one) is type(other) and one == other)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differences(one: dict[str, Any], other: dict[str, Any], excluded: tuple[str, ...] = ()) -> list[str]:
    """Names that one of two states lacks, or holds with another value; a name is excluded by its last part."""
    names = {name for name in one.keys() | other.keys() if name.rpartition(".")[2] not in excluded}
    return sorted(name for name in names if name not in one or name not in other or not same(one[name], other[name]))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag from TensorBoard's files; float32, so that equal means equal bits."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
