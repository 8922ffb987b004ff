"""Norms of layers and weights.

They are made of the reduced gradients and of the master weights as they stand at the gate, each element counted once
over all ranks; the parts of ranks are put together in the step's one collective. Nothing is copied to the host here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_stability.megatron.access import master_weights
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.megatron.access.parameters import layer_of, once
from megatron_stability.observe.config import Norms
from megatron_stability.observe.hook import Hook
from megatron_stability.observe.reduction import How
from megatron_stability.observe.wide import Layers
from megatron_stability.signals import ways

LAYERS = "grad_norm/layer"


class NormsHook(Hook):
    """L2 norms of each decoder layer's gradient, of all trainable weights, and of the word embedding, now and then."""

    def __init__(self, config: Norms, model: Sequence[Any], optimizer: Any, args: Namespace, vocab_size: int) -> None:
        """Finds what this rank counts.

        Args:
            config: the `observe.norms` section.
            model: Megatron's list of model chunks.
            optimizer: Megatron's, chained or not.
            args: Megatron's arguments.
            vocab_size: real rows of the vocabulary; those that pad it up are no tokens' and are not counted.
        """
        self._config, self._optimizer, self._step = config, optimizer, 0
        self._layers, self._vocab_size = int(args.num_layers), vocab_size
        self._counted = [
            (name, parameter)
            for name, parameter in once(model, optimizer, int(argument(args, "num_distributed_optimizer_instances")))
        ]
        layers = layer_of(model)
        self._layer_index = {name: layers[name] - 1 for name, _ in self._counted if name in layers}

    @property
    def signals(self) -> Mapping[str, How]:
        """See `Hook`."""
        found: dict[str, How] = {LAYERS: Layers(self._layers)} if self._config.layers_every else {}
        return found | dict(ways(("param_norm", "embedding_norm")) if self._config.params_every else {})

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
            masters = [(name, p, master_weights.own_master(p, self._optimizer)) for name, p in self._counted]
            embedding = [
                copy.flat[: max(0, self._real_rows(p) * p.shape[1] - copy.start)]
                for name, p, copy in masters
                if name.endswith("embedding.word_embeddings.weight")
            ]
            for name, parts in (("param_norm", [copy.flat for *_, copy in masters]), ("embedding_norm", embedding)):
                if parts:
                    found[name] = _squares(parts).sum().sqrt()
        return found

    def _real_rows(self, embedding: torch.nn.Parameter) -> int:
        """Rows of this rank's part of the vocabulary that are tokens."""
        rows = embedding.shape[0]
        return min(rows, max(0, self._vocab_size - parallel_state.get_tensor_model_parallel_rank() * rows))

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
