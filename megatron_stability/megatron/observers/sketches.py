"""Sketches of every layer's master weights and gradient at chosen steps, for `megatron-stability compare`.

One line a chosen step in `sketch.jsonl` beside the ledger: steps 1 and 2 and every `observe.sketch.every`th. The
weights are those with which the step's gradient was computed, so the first line holds the initial ones. Rows: what is
in no decoder layer (embedding, output layer), then the decoder layers.
"""

from __future__ import annotations

import base64
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stability import files
from megatron_stability.ledger.sketches import FILE
from megatron_stability.megatron.access import master_weights
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.megatron.access.parameters import layer_of, once
from megatron_stability.observe.hook import Hook
from megatron_stability.observe.sketch import K, seed_of, sketch


class SketchHook(Hook):
    """Each element is counted once over all ranks; the parts are added in one all-reduce, on chosen steps only."""

    def __init__(
        self, every: int, model: Sequence[Any], optimizer: Any, device: torch.device, folder: Path, args: Namespace
    ) -> None:
        """Finds what this rank counts.

        Args:
            every: steps between two sketches.
            model: Megatron's list of model chunks.
            optimizer: Megatron's, chained or not.
            device: of the model.
            folder: of the ledger.
            args: Megatron's arguments.
        """
        self._every, self._optimizer, self._device, self._folder = every, optimizer, device, folder
        self._layers, self._step = int(args.num_layers), 0
        instances = int(argument(args, "num_distributed_optimizer_instances"))
        self._counted = list(once(model, optimizer, instances))
        self._row = layer_of(model)

    def step_begins(self, step: int) -> None:
        """Remember the step."""
        self._step = step

    @torch.no_grad()
    def observe(self) -> Mapping[str, torch.Tensor]:
        """Collective on chosen steps."""
        if self._step > 2 and self._step % self._every:
            return {}
        table = torch.zeros(2, 1 + self._layers, K + 1, dtype=torch.float64, device=self._device)
        for name, parameter in self._counted:
            row = self._row.get(name, 0)
            master = master_weights.own_master(parameter, self._optimizer)
            part = slice(master.start, master.start + master.flat.numel())
            seed = seed_of(name, part.start, master.flat.numel(), dist.get_rank())
            table[:, row, K] += seed  # an integer sum that tells whether two runs cut their weights alike
            table[0, row, :K] += sketch(master.flat, seed)
            main_grad = getattr(parameter, "main_grad", None)  # where Megatron's DDP sums up
            gradient = parameter.grad if main_grad is None else main_grad
            if gradient is not None:
                table[1, row, :K] += sketch(gradient.view(-1)[part], seed)
        dist.all_reduce(table)
        if dist.get_rank() == 0:
            self._write(table.cpu())
        return {}

    def _write(self, table: torch.Tensor) -> None:
        weights, gradients = (base64.b64encode(part[:, :K].numpy().tobytes()).decode("ascii") for part in table)
        cut = [str(int(value)) for value in table[0, :, K]]
        line = {"step": self._step, "k": K, "cut": cut, "weights": weights, "gradients": gradients}
        files.append_line(self._folder / FILE, json.dumps(line, allow_nan=False))
