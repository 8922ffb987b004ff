"""What Megatron knows of a step beside loss and gradient norm: clipping, wall time, norms of layers and weights.

Norms are made of the reduced gradients and of the master weights as they stand at the gate, each element counted once
over all ranks; the parts of ranks are put together in the step's one collective. Nothing is copied to the host here.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_stability.megatron import master_weights
from megatron_stability.observe.config import Norms
from megatron_stability.observe.reduction import How
from megatron_stability.observe.wide import Layers
from megatron_stability.records import StepRecord

LAYER = re.compile(r"(?:^|\.)decoder\.layers\.\d+$")
LAYERS = "grad_norm/layer"


class StepHook:
    """The clip threshold, and the seconds from the step's begin to its gate: forward, backward and gradient norm.

    Every rank waits for the slowest in its gradient reduction, so that a slow one shows in all. Evaluation, checkpoints
    and the log are not in it.
    """

    def __init__(self, clip_grad: float) -> None:
        """`clip_grad`: Megatron's; 0 is off."""
        self._clip_grad, self._began = clip_grad, time.perf_counter()

    @property
    def signals(self) -> Mapping[str, How]:
        """See `WeightHook`."""
        clip: dict[str, How] = {"clip_grad": "max"} if self._clip_grad > 0 else {}
        return clip | {"step_seconds": "max"}

    def train_begins(self) -> None:
        """Nothing."""

    def step_begins(self, step: int) -> None:
        """Start the clock."""
        del step
        self._began = time.perf_counter()

    def observe(self) -> Mapping[str, float]:
        """Read the clock. Megatron copied the gradient norm to the host just before, so device work is in it."""
        return {"clip_grad": self._clip_grad, "step_seconds": time.perf_counter() - self._began}

    def update_done(self, record: StepRecord, updated: bool) -> None:
        """Nothing."""


class NormsHook:
    """L2 norms of each decoder layer's gradient, of all trainable weights, and of the word embedding, now and then."""

    def __init__(self, config: Norms, model: Sequence[Any], optimizer: Any, args: Namespace) -> None:
        """Finds what this rank counts.

        Args:
            config: the `observe.norms` section.
            model: Megatron's list of model chunks.
            optimizer: Megatron's, chained or not.
            args: Megatron's arguments.
        """
        self._config, self._optimizer, self._step = config, optimizer, 0
        self._layers = int(args.num_layers)
        self._counted = [
            (name, parameter)
            for name, parameter in once(model, optimizer, int(getattr(args, "num_distributed_optimizer_instances", 1)))
        ]
        layers = layer_of(model)
        self._layer_index = {name: layers[name] - 1 for name, _ in self._counted if name in layers}

    @property
    def signals(self) -> Mapping[str, How]:
        """See `WeightHook`."""
        found: dict[str, How] = {LAYERS: Layers(self._layers)} if self._config.layers_every else {}
        return found | ({"param_norm": "norm", "embedding_norm": "norm"} if self._config.params_every else {})

    def train_begins(self) -> None:
        """Nothing."""

    def step_begins(self, step: int) -> None:
        """Remember the step."""
        self._step = step

    @torch.no_grad()
    def observe(self) -> Mapping[str, torch.Tensor]:
        """This rank's parts, on the steps that measure."""
        found: dict[str, torch.Tensor] = {}
        if self._config.layers_every and self._step % self._config.layers_every == 0:
            found[LAYERS] = self._layer_squares()
        if self._config.params_every and self._step % self._config.params_every == 0:
            masters = {name: master_weights.own_master(p, self._optimizer).flat for name, p in self._counted}
            embedding = [flat for name, flat in masters.items() if name.endswith("embedding.word_embeddings.weight")]
            for name, parts in (("param_norm", list(masters.values())), ("embedding_norm", embedding)):
                if parts:
                    found[name] = _squares(parts).sum().sqrt()
        return found

    def update_done(self, record: StepRecord, updated: bool) -> None:
        """Nothing."""

    def _layer_squares(self) -> torch.Tensor:
        """[L] fp64: squares that this rank counts; an infinite one where a gradient is not finite."""
        parts, places = [], []
        for name, parameter in self._counted:
            main_grad: torch.Tensor | None = getattr(parameter, "main_grad", None)  # where Megatron's DDP sums up
            grad = parameter.grad if main_grad is None else main_grad
            if name not in self._layer_index or grad is None:
                continue
            owner = master_weights.sharded_by(parameter, self._optimizer)
            flat = grad.view(-1)
            parts.append(flat if owner is None else flat[master_weights.own_range(parameter, owner)])
            places.append(self._layer_index[name])
        if not parts:
            return torch.full((self._layers,), torch.nan, dtype=torch.float64)
        squares = _squares(parts).nan_to_num(nan=torch.inf, posinf=torch.inf)
        into = torch.tensor(places).to(squares.device, non_blocking=True)
        return squares.new_zeros(self._layers).index_add_(0, into, squares)


def _squares(parts: list[torch.Tensor]) -> torch.Tensor:
    """[n] fp64 sums of squares; 0 for an empty part."""
    return torch.stack(list(torch._foreach_norm(parts, 2, dtype=torch.float32))).double().square()


def layer_of(model: Sequence[Any]) -> dict[str, int]:
    """The 1-based global number of the decoder layer that a parameter of this rank belongs to, by its name."""
    found: dict[str, int] = {}
    for number, chunk in enumerate(model):
        for path, module in chunk.named_modules():
            if LAYER.search(path):
                found |= {f"{number}.{path}.{name}": int(module.layer_number) for name, _ in module.named_parameters()}
    return found


def once(model: Sequence[Any], optimizer: Any, instances: int) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's share of the trainable parameters, such that over all ranks each element is counted once.

    Args:
        model: Megatron's list of model chunks.
        optimizer: Megatron's, chained or not.
        instances: --num-distributed-optimizer-instances.

    Yields:
        "CHUNK.NAME" and the parameter, of which `master_weights.own_range` counts where its optimizer cuts it.
    """
    first_instance = (
        instances < 2 or dist.get_rank(parallel_state.get_inter_distributed_optimizer_instance_group()) == 0
    )
    for number, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            expert = not getattr(parameter, "allreduce", True)  # Megatron marks expert parameters so
            tensor_group = parallel_state.get_expert_tensor_parallel_group() if expert else None
            if not (
                parameter.requires_grad
                and param_is_not_shared(parameter)
                and param_is_not_tensor_parallel_duplicate(parameter, tensor_group)
            ):
                continue
            replica = (
                parallel_state.get_expert_data_parallel_rank()
                if expert
                else parallel_state.get_data_parallel_rank(with_context_parallel=True)
            )
            sharded = master_weights.sharded_by(parameter, optimizer) is not None
            if first_instance if sharded else replica == 0:
                yield f"{number}.{name}", parameter
