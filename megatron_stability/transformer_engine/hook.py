"""FP8 telemetry under Transformer Engine, and whether delayed scaling's state came back with a checkpoint.

Tier 1, every step: how many of TE's GEMMs run in FP8, and delayed scaling's amaxes; no synchronisation, no collective.
At the gate TE has reduced and rolled this step's amaxes already, so the newest reduced one is read
(`adapter.delayed`); recipes without state give the counts alone. Tier 2, in sampled steps: `sampled`.

TE restores scales and histories from a module's `_extra_state`, and where that is gone it silently starts at scale 1.
So a checkpoint also carries a digest of each linear's state, and a load is compared with it. TE's state is only read,
but that a withheld step's is put back to what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from megatron_stability.echo import say
from megatron_stability.numerics.fp8.config import Fp8
from megatron_stability.observe.fp8 import samples as fp8_samples
from megatron_stability.observe.fp8.guard import ScalingGuard
from megatron_stability.observe.fp8.telemetry import SIGNALS, AmaxHistory, binades, worst
from megatron_stability.observe.hook import Hook
from megatron_stability.records import StepRecord
from megatron_stability.sites import TENSORS, Site
from megatron_stability.transformer_engine import adapter, extra_state, sampled

KEY = "fp8_transformer_engine"  # in the runtime's checkpoint state
_STALE = 2.0  # a scale beyond this multiple of what the step's amax asks for was made for another tensor


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the hook has to know of the run.

    Attributes:
        recipe: --fp8-recipe.
        margin: --fp8-margin.
        fp8: the section of the settings.
        iteration: the one that was loaded last.
        loaded: `extra_state.survey` of that checkpoint.
        stage: pipeline-parallel rank.
        stage_group: the stage's ranks: tensor x data x context parallel.
        gather: collective over the pipeline group: everyone's dictionary, in rank order.
        folder: of `fp8.stage<N>.jsonl`.
        speaks: whether this rank prints.
    """

    recipe: str
    margin: int
    fp8: Fp8
    iteration: Callable[[], int]
    loaded: Callable[[], Mapping[str, extra_state.Kind]]
    stage: int
    stage_group: Any
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]]
    folder: Path
    speaks: bool


class TransformerEngineHook(Hook):
    """A `Hook` with state: the signals of `observe.fp8` from TE's own state."""

    checkpoint_key = KEY
    signals = SIGNALS

    def __init__(self, model: Sequence[Any], device: torch.device, run: Run) -> None:
        """Name TE's modules as Megatron's checkpoints do; nothing else is changed.

        Args:
            model: Megatron's model chunks.
            device: of the signals.
            run: what the hook has to know.

        Raises:
            UsageError: this TE's internals were not checked.
        """
        adapter.version()
        self._model, self._device, self._run = model, device, run
        self._past: AmaxHistory | None = None
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        self._step, self._guard = 0, ScalingGuard(run.fp8, device, run.speaks)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._held: list[int] = []  # identities of the tensors that the slots are in, which the slots keep alive
        self._slots: adapter.Slots | None = None
        self._orders = torch.zeros(0, dtype=torch.float64)
        self._samples = sampled.running()
        self._linears = list(_linears(model))
        self._sites: list[Site] = []
        self._sampled_at: list[tuple[str, str]] = []  # the names under which nvdlfw-inspect knows the sites
        for linear in self._linears:
            linear.module.name = linear.key
            adapter.runs_in_fp8(linear.module)  # raises here, rather than in a step, where this TE has it no more
            for gemm, suffix in enumerate(adapter.gemm_suffixes(linear.module)):
                self._sites += [linear.site(gemm, tensor) for tensor in TENSORS]
                self._sampled_at += [(linear.key + suffix, tensor) for tensor in TENSORS]

    # --- the step ---------------------------------------------------------------------------------------------

    def train_begins(self) -> None:
        """Say what can't be read back."""
        if self._run.recipe == "delayed" and extra_state.needs_permission():
            say(
                "this Transformer Engine refuses to load the FP8 scaling state of its own checkpoints, which is a "
                f"pickle, unless {extra_state.ALLOW}=1 is set; set it when you resume from a checkpoint that you trust",
                self._run.speaks,
            )

    def step_begins(self, step: int) -> None:
        """Before the forward of `step`."""
        self._step = step
        self._keep()
        if self._samples is not None:
            sampled.at_step(step)
            self._samples.begin()

    def observe(self) -> Mapping[str, torch.Tensor]:
        """This rank's counts and worst amaxes; collective over the stage in sampled steps."""
        running = [linear for linear in self._linears if adapter.runs_in_fp8(linear.module)]
        gemms, fallbacks = len(self._linears), len(self._linears) - len(running)
        signals = {"fp8/gemms": torch.tensor(float(gemms)), "fp8/fallbacks": torch.tensor(float(fallbacks))}
        if self._samples is not None and sampled.wanted(self._step, self._run.fp8.sample_every)[0] and self._sites:
            signals |= self._sampled(self._samples, fallbacks)
        if (slots := self._slots_of(running)) is None:
            return signals
        amax, scale, orders = slots.amax(), slots.scale(), self._orders
        used = slots.scale({id(now): was for now, was in self._kept})  # 1 in a module's first forward, which makes it
        self._past = self._past or AmaxHistory(len(amax), amax.device)
        self._seen = amax.clone(), scale.clone()
        rise = self._past.rise(amax)
        return (
            signals
            | worst("fp8/amax_rise", rise, orders)
            | worst("fp8/amax_fall", rise.reciprocal(), orders)
            | worst("fp8/scale_age", self._past.age(amax, scale), orders)
            | binades(amax, used, slots.least_normal, orders)
        )

    def _slots_of(self, running: Sequence[_Linear]) -> adapter.Slots | None:
        """Delayed scaling's state of all modules that run in FP8; None where they keep none. Places are found once."""
        held = [id(tensor) for linear in running for tensor in adapter.state_tensors(linear.module)]
        if held != self._held:
            states = [(each, state) for each in running for state in adapter.delayed(each.module, self._run.margin)]
            self._held, self._slots = held, adapter.Slots([state for _, state in states]) if states else None
            places = [each.site(state.gemm, state.tensor).order for each, state in states]
            self._orders = torch.tensor(places, dtype=torch.float64, device=self._device)
        return self._slots

    def update_done(self, record: StepRecord, updated: bool) -> None:
        """Learn from accepted steps only. A withheld one's state goes back, unless its scales are why it is withheld.

        Collective in a withheld step, which every rank is in.
        """
        if updated:
            self._guard.applied()
            if self._past is not None and self._seen is not None:
                self._past.learn(*self._seen)
            return
        if self._run.recipe != "delayed":
            return
        scales = [(now, before) for now, before in self._kept if now.dim() == 1]
        stale = any(bool((before > _STALE * now).any()) for now, before in scales)
        if self._guard.puts_back(record.step, stale):
            with torch.no_grad():
                for now, before in self._kept:
                    now.copy_(before)

    @torch.no_grad()
    def _keep(self) -> None:
        if self._run.recipe != "delayed":
            return
        live = [each for linear in self._linears for each in adapter.state_tensors(linear.module)]
        if [id(now) for now, _ in self._kept] != [id(each) for each in live]:
            self._kept = [(each, each.clone()) for each in live]  # TE makes them in a module's first forward
        elif live:
            torch._foreach_copy_([before for _, before in self._kept], live)

    def _sampled(self, samples: sampled.Samples, fallbacks: int) -> dict[str, torch.Tensor]:
        """Collective over the pipeline stage."""
        counts, scales = samples.table(self._sampled_at, self._device)
        found = fp8_samples.gather(counts, counts[:, fp8_samples.AMAX], scales, self._run.stage_group)
        if dist.get_rank(self._run.stage_group) == 0:
            facts = {
                "recipe": self._run.recipe,
                "emulated": False,
                "accumulation": "Transformer Engine's",
                "reduction": "Transformer Engine's",
                "fallbacks": fallbacks,
                "kernel": f"transformer_engine {adapter.version()}",
                "recalibrating": self._step <= self._guard.recalibrates_until,
            }
            found.write(self._run.folder, self._step, self._run.stage, self._sites, facts)
        orders = torch.tensor([site.order for site in self._sites], dtype=torch.float64)
        return found.signals(orders)

    # --- checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Collective over the pipeline group: a digest of every linear's scales and histories."""
        stages = self._run.gather(dict(self._digests()))
        return {"recipe": self._run.recipe, "linears": {key: value for stage in stages for key, value in stage.items()}}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Compare TE's modules, as the checkpoint left them, with what was saved.

        Raises:
            UsageError: delayed scaling's state did not come back whole, and no recalibration is asked for.
        """
        if self._run.recipe != "delayed":
            return  # nothing to restore: an empty `_extra_state` is right
        complaint = self._complaint(None if state is None else state["linears"])
        if complaint is None:
            return
        self._guard.lacking(
            complaint,
            self._run.iteration(),
            "load one that has it, or give --stability-fp8-recalibrate STEPS to go on with Transformer Engine's "
            "initial scales, which follow each step's amax from the first on",
            "FP8 scales begin at 1 and find their place in the steps up to {until}",
        )

    def _complaint(self, saved: Mapping[str, str] | None) -> str | None:
        own, loaded = dict(self._digests()), self._run.loaded()
        for linear in self._linears:
            key = linear.key
            if saved and key in saved and own.get(key) != saved[key]:
                if key in own:
                    return f"gave {key} another FP8 scaling state than it had when it was saved"
                kind = loaded.get(linear.place, "missing")
                return f"gave {key} no FP8 scaling state (its {extra_state.SUFFIX} in the checkpoint: {kind})"
        if saved or own or not self._linears:
            return None  # without digests (saved without this plugin), what TE restored is all that can be asked for
        kinds = ", ".join(sorted({loaded.get(linear.place, "missing") for linear in self._linears}))
        return f"has no FP8 scaling state for delayed scaling (its modules' {extra_state.SUFFIX}: {kinds})"

    def _digests(self) -> Iterator[tuple[str, str]]:
        """Of the linears that have a state which is not the initial one."""
        for linear in self._linears:
            parts = adapter.settled(linear.module)
            if parts and not adapter.is_initial(parts):
                yield linear.key, xxhash.xxh64(json.dumps([part.tolist() for part in parts]).encode()).hexdigest()


@dataclass(frozen=True)
class _Linear:
    """One of TE's GEMM modules: its name in the whole model, in its chunk, and in a loaded state dict."""

    key: str
    name: str
    place: str
    numbers: Mapping[str, int]
    module: Any

    def site(self, gemm: int, tensor: str) -> Site:
        return adapter.site(self.name, self.module, gemm, tensor, self.numbers)


def _linears(model: Sequence[Any]) -> Iterator[_Linear]:
    for chunk_number, chunk in enumerate(model):
        modules = list(chunk.named_modules())
        numbers = {name: m.layer_number for name, m in modules if getattr(m, "layer_number", None) is not None}
        part = "model" if len(model) == 1 else f"model{chunk_number}"
        for name, module in adapter.gemm_modules(chunk):
            place = f"{part}.{_unwrapped(name)}.{extra_state.SUFFIX}"
            yield _Linear(whole_name(name, numbers), name, place, numbers, module)


def whole_name(name: str, layer_numbers: Mapping[str, int]) -> str:
    """A module's name in the whole model, as checkpoints have it: `decoder.layers.7.mlp.linear_fc1`, 0-based.

    Args:
        name: its qualified name in its chunk, with the wrappers of DDP and Float16Module.
        layer_numbers: 1-based number of each transformer layer in the whole model, by its qualified name.
    """
    for prefix, number in layer_numbers.items():
        block, _, index = prefix.rpartition(".")
        if index.isdigit() and name.startswith(f"{prefix}."):
            return _unwrapped(f"{block}.{number - 1}{name.removeprefix(prefix)}")
    return _unwrapped(name)


def _unwrapped(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
