"""Balance of the experts, read from Megatron's routers in the step's own forward.

Loads and drops are those of a rank's own tokens, over the step's micro-batches; router logits are computed once more
from the router's input, without its jitter. A forward that is run again for its activations counts once, evaluation
nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import Router

from megatron_stability.observe.hook import Hook
from megatron_stability.signals import ways

SIGNALS = ("moe/max_load", "moe/dropped", "moe/router_z")


class _Counts:
    """One router's step so far: assignments of each expert [E], tokens, and the sum of logsumexp² of their logits."""

    def __init__(self, router: Any) -> None:
        self.topk = int(router.topk)
        self.clear()
        router.register_forward_hook(self._read)
        self.active = False

    def clear(self) -> None:
        self.assigned_e: torch.Tensor | None = None
        self.tokens = 0
        self.z = torch.zeros(())

    @torch.no_grad()
    def _read(self, router: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Forward hook of a router: (hidden [s, b, h], …) to (probabilities, map [tokens, E])."""
        if not (self.active and router.training and inputs[0].requires_grad):
            return
        assigned_e = output[1].sum(dim=0, dtype=torch.float64)
        logits = router.gating(inputs[0].detach()).float()
        z = torch.logsumexp(logits, dim=-1).square().sum().double()
        self.assigned_e = assigned_e if self.assigned_e is None else self.assigned_e + assigned_e
        self.z = z + self.z.to(z.device)
        self.tokens += output[1].shape[0]

    def worst(self) -> torch.Tensor | None:
        """[3] fp64 in the order of `SIGNALS`; None where nothing was counted."""
        if self.assigned_e is None:
            return None
        total = self.assigned_e.sum()
        load = self.assigned_e.max() * len(self.assigned_e) / total.clamp(min=1.0)
        dropped = (1.0 - total / (self.tokens * self.topk)).clamp(min=0.0)  # padding to capacity assigns more
        return torch.stack([load, dropped, self.z / self.tokens])


class MoeHook(Hook):
    """The routers of this rank; see the module."""

    signals = ways(SIGNALS)

    def __init__(self, every: int, model: Sequence[Any]) -> None:
        """Installs the hooks. `every`: steps between two measurements; `model`: Megatron's list of model chunks."""
        self._every, self._due = every, False
        self._routers = [_Counts(module) for chunk in model for module in chunk.modules() if isinstance(module, Router)]

    def step_begins(self, step: int) -> None:
        """Forget the step before; count where this one is due."""
        self._due = step % self._every == 0
        for router in self._routers:
            router.clear()
            router.active = self._due

    def observe(self) -> Mapping[str, torch.Tensor]:
        """The worst layer of this rank."""
        found = [worst for router in self._routers if (worst := router.worst()) is not None] if self._due else []
        return dict(zip(SIGNALS, torch.stack(found).amax(dim=0), strict=True)) if found else {}
