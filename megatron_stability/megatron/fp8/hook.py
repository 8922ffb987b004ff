"""Emulated FP8 in a training step: scale updates, telemetry, and the scaling state of checkpoints and skips.

Delayed scaling, as TE does it (`FP8GlobalStateManager`): after each micro-batch's forward the amaxes of inputs and
weights, after its backward those of gradients, are reduced with MAX over TP x DP x CP of the pipeline stage (TP x CP
with the model's `tp_only_amax_red`; `core/parallel_state.py get_amax_reduction_group`), then histories roll and scales
follow.
Current scaling needs no collective here (see `fp8_linear`), block and MXFP8 none at all: TE reduces none either.
"""

from __future__ import annotations

import base64
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_stability.echo import say
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.collectives import gather_json
from megatron_stability.megatron.fp8.linear import GRAD, Backward, Fp8ColumnParallelLinear, Fp8RowParallelLinear, State
from megatron_stability.numerics.fp8 import stats
from megatron_stability.numerics.fp8.config import Fp8
from megatron_stability.numerics.fp8.recipes import Recipe, delayed_update
from megatron_stability.observe.fp8 import samples as fp8_samples
from megatron_stability.observe.fp8.guard import ScalingGuard
from megatron_stability.observe.fp8.telemetry import SIGNALS, AmaxHistory, binades, worst
from megatron_stability.observe.hook import Hook
from megatron_stability.records import StepRecord
from megatron_stability.sites import TENSORS, Site

KEY = "fp8"  # in the runtime's checkpoint state
FORWARD, BACKWARD = slice(0, GRAD), slice(GRAD, 3)
_STALE = 2.0  # an amax beyond this multiple of what the scale was made for is no rounding


def states(model: Sequence[Any]) -> list[tuple[Site, State]]:
    """Every emulated linear of this rank, with its site (tensor "input"), in the model's order."""
    found = []
    for chunk in model:
        numbers = {
            name: module.layer_number for name, module in chunk.named_modules() if hasattr(module, "layer_number")
        }
        for name, module in chunk.named_modules():
            if isinstance(module, Fp8ColumnParallelLinear | Fp8RowParallelLinear) and module.fp8 is not None:
                found.append((Site.of(name, numbers), module.fp8))
    return found


class Fp8Hook(Hook):
    """A `Hook` for emulated FP8. All state stands in arenas, [.., n, 3] for n linears of this rank."""

    checkpoint_key = KEY
    signals = SIGNALS

    def __init__(self, fp8: Fp8, model: Sequence[Any], device: torch.device, folder: Path, args: Namespace) -> None:
        """Gather the layers' states into arenas; no collective.

        Raises:
            UsageError: this rank has no emulated linear.
        """
        found = states(model)
        if not found:
            raise UsageError(
                "--stability-fp8-emulate: this rank has no linear of the local spec to emulate; use --transformer-impl "
                "local with --spec megatron_stability, and fewer layers in BF16"
            )
        self._fp8, self._folder, self._args, self._device = fp8, folder, args, device
        self.states = [state for _, state in found]
        self.sites = [Site(site.layer, site.module, tensor, site.expert) for site, _ in found for tensor in TENSORS]
        self._orders = torch.tensor([site.order for site in self.sites], dtype=torch.float64, device=device)
        self.recipe: Recipe = self.states[0].recipe
        n = len(self.states)
        self.scale = torch.ones(n, 3, device=device)
        self.history = torch.zeros(self.recipe.history, n, 3, device=device)
        self.step_amax = torch.zeros(n, 3, device=device)
        limits = [fmt.max for fmt in self.states[0].formats]
        self._limits = torch.tensor(limits, device=device)
        self._least_normal = torch.tensor([fmt.least_normal for fmt in self.states[0].formats] * n, device=device)
        for i, state in enumerate(self.states):
            state.scale, state.staged, state.step_amax = self.scale[i], self.history[0, i], self.step_amax[i]
        self._amax_past = AmaxHistory(3 * n, device)
        self._kept = self.scale.clone(), self.history.clone()
        self._guard, self._step = ScalingGuard(fp8, device, dist.get_rank() == 0), 0
        self._all_linears = _linears(model)
        if self.recipe.name == "delayed":
            only_tensor = bool(get_model_config(model[0]).tp_only_amax_red)  # Megatron has no flag for it, Bridge has
            if only_tensor and parallel_state.get_data_parallel_world_size() > 1:
                raise UsageError(
                    f"--stability-fp8-emulate {fp8.emulate} with tp_only_amax_red: scales then differ over "
                    "data-parallel ranks, and a checkpoint holds one of them; set it to false"
                )
            self._group = parallel_state.get_amax_reduction_group(
                with_context_parallel=True, tp_only_amax_red=only_tensor
            )
            self._update_with(model)

    # --- delayed scaling --------------------------------------------------------------------------------------

    def _update_with(self, model: Sequence[Any]) -> None:
        begin = 0
        for chunk in model:
            own = len(states([chunk]))
            part = slice(begin, begin + own)
            begin += own
            chunk.register_forward_hook(partial(self._forward_done, part))
            shared = Backward(partial(self.update, part, BACKWARD))
            for state in self.states[part]:
                state.chunk = shared

    def _forward_done(self, part: slice, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.update(part, FORWARD)

    @torch.no_grad()
    def update(self, part: slice, tensors: slice) -> None:
        """Collective over the amax group: reduce what was staged, roll, rescale, for linears `part`."""
        staged = self.history[0, part, tensors].contiguous()
        dist.all_reduce(staged, op=dist.ReduceOp.MAX, group=self._group)
        history = self.history[:, part, tensors].reshape(self.recipe.history, -1).clone()
        history[0] = staged.view(-1)
        scale = self.scale[part, tensors].reshape(-1).clone()
        limits = self._limits[tensors].expand(staged.shape).reshape(-1)
        delayed_update(history, scale, limits, algorithm=self.recipe.algorithm, margin=self.recipe.margin)
        self.history[:, part, tensors] = history.view(-1, *staged.shape)
        self.scale[part, tensors] = scale.view(staged.shape)

    # --- the step ---------------------------------------------------------------------------------------------

    def train_begins(self) -> None:
        """Say what this run is; refuse a resume whose scales are lost."""
        say(
            f"FP8 is EMULATED ({self.recipe.name}): a dry run of its numerics; speed and memory say nothing about FP8 "
            "hardware",
            dist.get_rank() == 0,
        )

    def step_begins(self, step: int) -> None:
        """Before the forward of `step`."""
        self._step = step
        self._kept[0].copy_(self.scale)
        self._kept[1].copy_(self.history)
        self.step_amax.zero_()
        sampled = step % self._fp8.sample_every == 0
        calibrating = step <= self._guard.recalibrates_until
        for state in self.states:
            state.samples = (
                torch.zeros(3, len(stats.COLUMNS), dtype=torch.float64, device=self._device) if sampled else None
            )
            state.first_microbatch, state.calibrating, state.runs, state.fallbacks = True, calibrating, 0, 0

    def observe(self) -> Mapping[str, torch.Tensor]:
        """Collective on sampled steps, over the pipeline stage: worst sites of this rank."""
        amax, scale = self.step_amax.view(-1), self._scales().view(-1)
        rise = self._amax_past.rise(amax)
        signals = worst("fp8/amax_rise", rise, self._orders) | worst("fp8/amax_fall", rise.reciprocal(), self._orders)
        if self.recipe.name == "delayed":
            signals |= worst("fp8/scale_age", self._amax_past.age(amax, scale), self._orders)
            used = self._kept[0].view(-1)  # by the step's first micro-batch
            signals |= binades(amax, used, self._least_normal, self._orders)
        runs = sum(state.runs for state in self.states)
        quantized = runs - sum(state.fallbacks for state in self.states)
        share = len(self.states) / max(1, self._all_linears)
        signals["fp8/gemms"] = torch.tensor(runs / share)
        signals["fp8/fallbacks"] = torch.tensor(runs / share - quantized)
        if self._step % self._fp8.sample_every == 0 and self._step > self._guard.recalibrates_until:
            signals |= self._sampled(amax, scale)
        return signals

    def update_done(self, record: StepRecord, updated: bool) -> None:
        """A withheld step leaves no trace, unless stale scales are why steps are withheld again and again."""
        if updated:
            self._amax_past.learn(self.step_amax.view(-1), self._scales().view(-1))
            self._guard.applied()
            return
        stale = self.recipe.name == "delayed" and bool((self.step_amax * self._kept[0] > self._limits * _STALE).any())
        if self._guard.puts_back(record.step, stale):
            self.scale.copy_(self._kept[0])
            self.history.copy_(self._kept[1])

    def _scales(self) -> torch.Tensor:
        """[n, 3]: the scales of delayed scaling, what the amax implies for current, NaN for blocks (they have many)."""
        if self.recipe.name == "delayed":
            return self.scale
        if self.recipe.name == "current":
            return self._limits / self.step_amax
        return torch.full_like(self.step_amax, math.nan)

    # --- tier 2 -----------------------------------------------------------------------------------------------

    def _sampled(self, amax: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """Collective: one gather over the stage, one copy to the host, one table of the stage in its own file."""
        samples = torch.cat([state.samples for state in self.states if state.samples is not None])
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        found = fp8_samples.gather(samples, amax, scale, group)
        if dist.get_rank(group) == 0:
            facts = {
                "recipe": self.recipe.name,
                "emulated": True,
                "accumulation": "float32",
                "reduction": "float32",
                "fallbacks": sum(state.fallbacks for state in self.states),
                "kernel": f"torch {torch.__version__}",
            }
            stage = parallel_state.get_pipeline_model_parallel_rank()
            found.write(self._folder, self._step, stage, self.sites, facts)
        return found.signals(self._orders.cpu())

    # --- checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Collective over the pipeline group: scales and histories of every stage, exact, as JSON primitives."""
        own = {}
        if self.recipe.name == "delayed":
            for i, site in enumerate(self.sites[:: len(TENSORS)]):
                key = f"{site.layer}/{site.expert}/{site.module}"
                own[key] = {"scale": _text(self.scale[i]), "history": _text(self.history[:, i])}
        stages = gather_json(own, parallel_state.get_pipeline_model_parallel_group(), self._device)
        merged = {key: value for stage in stages for key, value in stage.items()}
        return {"recipe": self.recipe.name, "history": self.recipe.history, "linears": merged}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of `state_dict`, for any tensor- and pipeline-parallel layout of the same model.

        Raises:
            UsageError: delayed scaling without its state, whole and of this history's length, and no recalibration.
        """
        if self.recipe.name != "delayed":
            return  # nothing to restore: these recipes keep no state
        complaint = self._complaint(state)
        if complaint is None:
            assert state is not None
            for i, site in enumerate(self.sites[:: len(TENSORS)]):
                saved = state["linears"][f"{site.layer}/{site.expert}/{site.module}"]
                self.scale[i] = _tensor(saved["scale"]).to(self._device)
                self.history[:, i] = _tensor(saved["history"]).view(-1, 3).to(self._device)
            return
        self._guard.lacking(
            complaint,
            self._args.iteration,
            "give --stability-fp8-recalibrate STEPS to set the scales anew, or resume from a checkpoint of an emulated "
            "delayed-scaling run",
            "steps up to {until} run without quantization and set the FP8 scales",
        )

    def _complaint(self, state: Mapping[str, Any] | None) -> str | None:
        if state is None or state["recipe"] != "delayed":
            return "has no FP8 scaling state for delayed scaling"
        if state["history"] != self.recipe.history:
            return (
                f"has FP8 amax histories of {state['history']} steps, not --fp8-amax-history-len {self.recipe.history}"
            )
        for site in self.sites[:: len(TENSORS)]:
            saved = state["linears"].get(f"{site.layer}/{site.expert}/{site.module}")
            linear = str(site).removesuffix(f" {site.tensor}")
            if saved is None:
                return f"lacks the FP8 scaling state of {linear}"
            scale = _tensor(saved["scale"])
            if not bool((scale.isfinite() & (scale > 0)).all()):
                return f"has an impossible FP8 scale for {linear}"
        return None


def _linears(model: Sequence[Any]) -> int:
    """Column- and row-parallel linears of decoder and MTP layers, emulated or not."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    kinds = ColumnParallelLinear, RowParallelLinear
    names = (name for chunk in model for name, module in chunk.named_modules() if isinstance(module, kinds))
    return sum(not name.endswith("output_layer") for name in names)


def _text(x: torch.Tensor) -> str:
    return base64.b64encode(x.detach().float().cpu().contiguous().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)
