"""Tier-1 FP8 telemetry under Transformer Engine: how many of its GEMM modules run FP8, and delayed scaling's amaxes.

Read-only, no synchronisation, no collective. At the gate TE has reduced and rolled this step's amaxes already, so the
newest reduced one is read (`adapter.delayed`); recipes without state give the counts alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_stability.observe.fp8 import SIGNALS, AmaxHistory, worst
from megatron_stability.observe.reduction import Combine
from megatron_stability.records import StepRecord
from megatron_stability.sites import Site
from megatron_stability.transformer_engine import adapter


class TransformerEngineHook:
    """A `WeightHook`: the signals of `observe.fp8` from TE's own state."""

    signals: Mapping[str, Combine] = SIGNALS

    def __init__(self, model: Sequence[Any], device: torch.device, margin: int = 0) -> None:
        """Nothing is read before the first step.

        Args:
            model: Megatron's model chunks.
            device: of the signals.
            margin: --fp8-margin.

        Raises:
            UsageError: this TE's internals were not checked.
        """
        adapter.version()
        self._model, self._device, self._margin = model, device, margin
        self._past: AmaxHistory | None = None
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def train_begins(self) -> None:
        """Nothing to prepare."""

    def step_begins(self, step: int) -> None:
        """Nothing to prepare: modules say whether they ran in FP8 once they have."""

    def observe(self) -> Mapping[str, torch.Tensor]:
        """This rank's counts and worst amaxes."""
        sites, states, gemms, in_fp8 = [], [], 0, 0
        for chunk in self._model:
            numbers = {name: m.layer_number for name, m in chunk.named_modules() if hasattr(m, "layer_number")}
            gemms += len(adapter.gemm_modules(chunk))
            for name, module in adapter.fp8_modules(chunk):
                in_fp8 += 1
                at = Site.of(name, numbers)
                for state in adapter.delayed(module, self._margin):
                    sites.append(Site(at.layer, at.module, state.tensor, at.expert))
                    states.append(state)
        signals = {"fp8/gemms": torch.tensor(float(gemms)), "fp8/fallbacks": torch.tensor(float(gemms - in_fp8))}
        if not states:
            return signals
        amax, scale = torch.stack([s.amax for s in states]), torch.stack([s.scale for s in states])
        orders = torch.tensor([site.order for site in sites], dtype=torch.float64, device=amax.device)
        self._past = self._past or AmaxHistory(len(states), amax.device)
        self._seen = amax.clone(), scale.clone()
        rise = self._past.rise(amax)
        return (
            signals
            | worst("fp8/amax_rise", rise, orders)
            | worst("fp8/amax_fall", rise.reciprocal(), orders)
            | worst("fp8/scale_age", self._past.age(amax, scale), orders)
        )

    def update_done(self, record: StepRecord, updated: bool) -> None:
        """Learn from accepted steps only."""
        if updated and self._past is not None and self._seen is not None:
            self._past.learn(*self._seen)
