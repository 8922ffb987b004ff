"""A small, real checkpoint in Megatron's torch_dist format, written by torch's own distributed checkpoint writer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from megatron_stability.checkpoints import generations, manifest
from megatron_stability.checkpoints.manifest import Manifest


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}.weight": torch.randn(8, 16, generator=generator) for i in range(4)}


def save(root: Path, step: int) -> Path:
    """Files only: neither manifest nor marker."""
    folder = generations.folder_of(root, step)
    folder.mkdir(parents=True)
    writer = dcp.FileSystemWriter(folder, thread_count=2, single_file_per_rank=False)
    dcp.save(weights(step), storage_writer=writer, no_dist=True)
    torch.save({"iteration": step}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


def draft(step: int) -> Manifest:
    return Manifest(step=step, samples=step * 8, tokens=step * 256, layout={"world_size": 1}, states=("optimizer",))


def complete(root: Path, step: int) -> Path:
    """A whole generation."""
    folder = save(root, step)
    files = manifest.hash_files(folder, manifest.file_names(folder), sync=True)
    manifest.write(folder, draft(step).model_copy(update={"files": files}))
    return folder
