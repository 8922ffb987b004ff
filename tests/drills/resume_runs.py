"""Runs for drills on resuming: a small model on real or mock data, and what each rank saw of its samples.

A run is `pretrain.main()` on a pool's ranks (`tests/e2e/jobs.py`). A hook on the first stage's model keeps the hash of
every sequence that it is given, by step: that is the identity of the sample, whatever index led to it.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from tests.dist import small_gpt
from tests.dist.pool import Context
from tests.e2e import jobs

DATA = {"mock": (), "documents": (1.0,), "blend": (0.3, 0.7)}
DOCUMENTS = 24  # in each data set: about ten sequences, so that a few steps are an epoch
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


@dataclass(frozen=True)
class Seen:
    """What a rank saw: its exit code, and (step, hash of a sequence) in the order of its forwards."""

    code: int
    samples: list[tuple[int, str]]


def make_data(context: Context, folder: str) -> None:
    """Two data sets of random documents, as Megatron's own writer makes them."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    for number in range(2):
        chosen = random.Random(number)
        prefix = str(Path(folder) / f"text{number}")
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
        for _ in range(DOCUMENTS):
            tokens = torch.tensor([chosen.randrange(127) for _ in range(chosen.randrange(5, 50))])
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(get_idx_path(prefix))


def data_flags(kind: str, folder: Path) -> tuple[str, ...]:
    """Flags of a kind of `DATA`; `folder` is `make_data`'s."""
    blend = DATA[kind]
    if not blend:
        return ()
    paths = [str(folder / f"text{number}") for number in range(len(blend))]
    words = paths if len(blend) == 1 else [word for pair in zip(map(str, blend), paths, strict=True) for word in pair]
    return ("--data-path", *words, "--split", "100,0,0", "--data-cache-path", str(folder / "cache"))


def train(context: Context, flags: tuple[str, ...]) -> Seen:
    """Train on this rank; flags win over `jobs.MODEL`."""
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.start import pretrain_gpt

    sys.argv = ["megatron-stability pretrain", *jobs.command_line(flags)]
    samples: list[tuple[int, str]] = []
    if "--async-save" in flags:
        small_gpt.fork_checkpoint_writer()
    try:
        pretrain_gpt.main(model_provider=partial(_watched_model, samples))
        code = 0
    except SystemExit as ending:
        code = int(ending.code or 0)
    finally:
        handle.uninstall()
    return Seen(code, samples)


def _watched_model(samples: list[tuple[int, str]], *args: Any, **kwargs: Any) -> torch.nn.Module:
    from megatron.training import get_args

    from megatron_stability.megatron.start import pretrain_gpt

    def look(module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training and given[0] is not None:
            step = get_args().curr_iteration + 1
            samples.extend((step, xxhash.xxh3_64_hexdigest(row.numpy().tobytes())) for row in given[0])

    model: torch.nn.Module = pretrain_gpt.model_provider(*args, **kwargs)
    if model.pre_process:
        model.register_forward_pre_hook(look, with_kwargs=True)
    return model


def by_step(seen: list[Seen]) -> dict[int, list[str]]:
    """The samples of every step over all ranks; each rank of a tensor or pipeline group that sees one counts it."""
    steps: dict[int, set[str]] = {}
    for one in seen:
        for step, sample in one.samples:
            steps.setdefault(step, set()).add(sample)
    return {step: sorted(found) for step, found in sorted(steps.items())}
