"""QK-clip and attention telemetry on Megatron's step: measure, reduce, clip, tell.

    step_begins    hooks measure where the step is due                          attention_monitor
    observe        one all-reduce; scalars go into the StepRecord               before the gate
    update_done    the clip, if the step updated the weights and a head is hot  after the optimizer

`measure: forward` follows Kimi K2: S_max is of the step's own forward, and what is scaled are the weights that came out
of the step; so the next forward shows at most the limit and what one update and another batch add (`headroom` is for
that). `measure: probe` measures the updated weights in update_done, before the clip; what it saw goes into the next
step's record.
Every rank scales its own copies of a weight (`master_weights`), by factors that follow from the reduced maxima alone,
so there is no second collective and copies can't drift apart. bf16 copies are scaled as they are: until the next step
they may lie one rounding from the master's cast, on all data-parallel ranks alike. Where the weight's bits are half of
the master (the precision-aware optimizer's remainders), the owners' are sent to all: one collective a clipped weight.

All or nothing: a NaN or Inf in any head of any stage withholds the clip everywhere (and the step: `detect.non_finite`);
everything that can fail happens before the first write, and the writes are multiplications in place by finite factors.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import master_weights
from megatron_stability.megatron.access.flags import cuda_graphs
from megatron_stability.megatron.access.flags.argument_table import is_set
from megatron_stability.megatron.attention import attention_layers
from megatron_stability.megatron.attention.attention_layers import AttentionLayer
from megatron_stability.megatron.attention.monitor import AttentionMonitor, Maxima
from megatron_stability.numerics import qk_clip
from megatron_stability.observe.config import QKClip
from megatron_stability.observe.hook import Hook
from megatron_stability.observe.logit_growth import LogitGrowth
from megatron_stability.records import AttentionTable, StepRecord
from megatron_stability.signals import Combine, ways

#: What is added to the StepRecord; `signals.py` says what each is.
SIGNALS = ways(
    (
        *("attention/max_logit", "attention/min_entropy", "attention/nonfinite_heads", "attention/nonpositive_heads"),
        *("qk_norm/max_gain", "qk_clip/heads", "qk_clip/min_factor"),
    )
)


def refuse_what_cannot_work(config: StabilityConfig, args: Namespace) -> None:
    """Raise for Megatron's flags with which a clip or a measurement would be wrong.

    Raises:
        UsageError: names the flag and the way out.
    """
    if not wanted(config):
        return
    if (graphs := cuda_graphs.flag(args)) is not None:
        feature = "qk_clip" if config.qk_clip.enabled else "observe.attention"
        raise UsageError(
            f"{feature}.enabled with {graphs}: a replayed graph runs no Python, so that no logit would be seen"
            f"{' and no head clipped' * config.qk_clip.enabled}, by the probe as little; drop the flag, or set "
            f"{feature}.enabled to false"
        )
    if config.qk_clip.measure == "probe" and args.context_parallel_size > 1:
        raise UsageError(
            "qk_clip.measure probe with --context-parallel-size above 1: a rank has no keys of the other ranks; "
            "use forward"
        )
    if config.qk_clip.measure == "probe" and is_set(args, "overlap_param_gather"):
        raise UsageError(
            "qk_clip.measure probe with --overlap-param-gather: after a step the weights of other ranks are not here "
            "yet; use forward, or drop the flag"
        )
    if not config.qk_clip.enabled:
        return
    if is_set(args, "qk_clip"):
        raise UsageError("--qk-clip and qk_clip.enabled: weights would be clipped twice; drop Megatron's --qk-clip")
    if is_set(args, "qk_l2_norm"):
        raise UsageError(
            "--qk-l2-norm with qk_clip.enabled: that norm has no gain, so there is nothing to clip; turn qk_clip off"
        )
    master_weights.refuse_what_has_no_plain_copies(args, "qk_clip")


def wanted(config: StabilityConfig) -> bool:
    """Whether attention is measured at all."""
    return config.qk_clip.enabled or config.observe.attention.enabled


class Clip:
    """Scales the weights of hot layers. Equal factors on every rank of a stage."""

    def __init__(self, layers: Sequence[AttentionLayer], optimizer: Any, settings: QKClip) -> None:
        """Refuses, by name, a layer that can't be clipped."""
        self._layers, self._optimizer, self._settings = layers, optimizer, settings
        for layer in layers:
            layer.refuse_what_cannot_be_clipped()
        forms = [layer.form for layer in layers]  # factors of layers that are alike are computed at once
        self._alike = [[at for at, other in enumerate(forms) if other == form] for form in dict.fromkeys(forms)]
        self._frozen = [at for at, layer in enumerate(layers) if layer.frozen]

    def gamma(self, maxima: Maxima) -> torch.Tensor:
        """γ [L, H], 1 for layers that are frozen on this rank's stage."""
        gamma_lh = qk_clip.gamma(maxima.max_lh, self._settings.tau, self._settings.headroom)
        gamma_lh[self._frozen] = 1.0
        return gamma_lh

    @torch.no_grad()
    def __call__(self, gamma_lh: torch.Tensor) -> None:
        """Apply γ to this rank's copies of the weights: all of them, or none where something raises."""
        hot_l = (gamma_lh < 1).any(dim=1).tolist()  # the one host synchronisation of a step that clips
        plan: list[qk_clip.Piece] = []
        stores: list[Callable[[], None]] = []
        for alike in self._alike:
            hot = [at for at in alike if hot_l[at]]
            first = self._layers[alike[0]]
            for scaled in first.scaled(gamma_lh[hot, : first.heads], self._settings.alpha) if hot else ():
                for at, rows in zip(hot, scaled.rows, strict=True):
                    parameter = scaled.of(self._layers[at])
                    columns = parameter.numel() // len(rows)
                    for copy in master_weights.copies(parameter, self._optimizer):
                        plan += qk_clip.pieces(copy.flat, copy.start, rows, columns, scaled.zero_centred)
                        stores += [] if copy.store is None else [copy.store]
        for piece in plan:
            piece.apply()
        for store in stores:
            store()


class AttentionHook(Hook):
    """The `Hook` of attention; see the module."""

    def __init__(self, config: StabilityConfig, model: Sequence[Any], optimizer: Any, device: torch.device) -> None:
        """Finds the layers and installs the hooks.

        Args:
            config: the validated tree, with qk_clip or observe.attention enabled.
            model: Megatron's list of model chunks.
            optimizer: Megatron's optimizer.
            device: where the collective's backend wants its tensors.

        Raises:
            UsageError: a layer can't be measured or clipped; names it.
        """
        self._config, self._device = config, device
        self._layers = attention_layers.find(model)
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        self._speaks = dist.get_rank(stage) == 0  # for its stage, where stages are summed
        self._monitor = AttentionMonitor(self._layers, config.qk_clip.measure, stage)
        self._clip: Clip | None = None
        if config.qk_clip.enabled:
            self._clip = Clip(self._layers, optimizer, config.qk_clip)
        shape = (len(self._layers), self._monitor.heads)
        self._clips_lh, self._least_gamma_lh = torch.zeros(shape, device=device), torch.ones(shape, device=device)
        self._growth = LogitGrowth()
        self._gamma_lh = torch.ones(shape, dtype=torch.float64, device=device)
        self._maxima: Maxima | None = None
        self._found: Mapping[str, torch.Tensor] = {}
        self._counts: Mapping[str, torch.Tensor] = {}
        self._step = 0
        self._stages: _Stages | None = None

    def train_begins(self) -> None:
        """Collective: pipeline stages agree on the shape of the tables that they exchange."""
        self._stages = _Stages(self._layers, self._monitor.heads, self._device)

    @property
    def signals(self) -> Mapping[str, Combine]:
        """What `observe` returns, and how it is combined."""
        return SIGNALS

    def step_begins(self, step: int) -> None:
        """Measure this step, or not."""
        self._step, self._maxima = step, None
        self._monitor.begin(active=self._due, entropy=self._table_due)

    @property
    def _due(self) -> bool:
        return self._step % self._config.qk_clip.every == 0 or self._table_due

    @property
    def _table_due(self) -> bool:
        return self._step % self._config.observe.attention.every == 0

    def observe(self) -> Mapping[str, torch.Tensor]:
        """Collective on the steps that are due, which are the same on every rank: one all-reduce over the stage."""
        if self._config.qk_clip.measure == "probe":
            found, self._found = self._found, {}
            return found
        return self._measure() if self._due else {}

    def _measure(self) -> Mapping[str, torch.Tensor]:
        self._maxima = maxima = self._monitor.reduce(self._device)
        if not self._layers:
            return {}
        seen_lh = maxima.max_lh != -torch.inf
        found = {
            "attention/max_logit": torch.where(seen_lh.any(), maxima.max_lh.amax(), torch.nan),
            "attention/min_entropy": _least(maxima.entropy_lh),
            "qk_norm/max_gain": -_least(-maxima.gain_l),
        }
        counts = {
            "attention/nonfinite_heads": maxima.max_lh == torch.inf,
            "attention/nonpositive_heads": seen_lh & (maxima.max_lh <= 0),
        }
        if self._clip is not None:
            self._gamma_lh = self._clip.gamma(maxima)
            counts["qk_clip/heads"] = self._gamma_lh < 1
            found["qk_clip/min_factor"] = self._gamma_lh.amin()
        self._counts = {name: heads.sum() for name, heads in counts.items()}
        return found | (self._counts if self._speaks else {})

    def update_done(self, record: StepRecord, updated: bool) -> AttentionTable | None:
        """Clip, if weights were updated, a head is hot and every head is finite; then the table, where one is due.

        Args:
            record: of the step, equal on every rank.
            updated: the optimizer ran and did not withhold the update.

        Returns:
            On the steps that are due, collectively, a table of all stages' layers.
        """
        signals = record.signals
        if self._config.qk_clip.measure == "probe" and self._due and updated:
            signals = self._probe()
        maxima = self._maxima
        if maxima is None:
            return None
        may_clip = self._clip is not None and self._config.mode == "act" and updated
        clips = may_clip and not signals.get("attention/nonfinite_heads") and bool(signals.get("qk_clip/heads"))
        if clips and self._layers:
            assert self._clip is not None
            self._clip(self._gamma_lh)
            self._clips_lh += self._gamma_lh < 1
            self._least_gamma_lh = torch.minimum(self._least_gamma_lh, self._gamma_lh.float())
        return self._table(maxima) if self._table_due else None

    def _table(self, maxima: Maxima) -> AttentionTable:
        """Collective over the pipeline stages."""
        assert self._stages is not None, "train_begins was not called"
        growth_lh = self._growth.add(self._step, maxima.max_lh)
        gain_lh = maxima.gain_l[:, None].expand_as(growth_lh)
        values = [maxima.max_lh, maxima.entropy_lh, self._least_gamma_lh, self._clips_lh, growth_lh, gain_lh]
        self._least_gamma_lh = torch.ones_like(self._least_gamma_lh)
        return self._stages.table(self._step, torch.stack(values))

    def _probe(self) -> Mapping[str, float]:
        """Collective over the model-parallel ranks: measure now; the two counts that decide, over all stages."""
        self._monitor.probe()
        self._found = self._measure()
        names = ("attention/nonfinite_heads", "qk_clip/heads")
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        counts = torch.stack([self._counts.get(name, zero) for name in names])
        dist.all_reduce(counts, group=parallel_state.get_pipeline_model_parallel_group())
        return dict(zip(names, counts.tolist(), strict=True))


def _least(values: torch.Tensor) -> torch.Tensor:
    """The least that is not NaN; NaN if there is none."""
    known = ~values.isnan()
    return torch.where(known.any(), torch.where(known, values, torch.inf).amin(), torch.nan)


class _Stages:
    """Exchange of tables between pipeline stages; every rank gets the whole model's."""

    def __init__(self, layers: Sequence[AttentionLayer], heads: int, device: torch.device) -> None:
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._names: list[list[str]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(self._names, [layer.name for layer in layers], group=self._group)
        sizes = torch.tensor([heads], device=device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self._group)
        self._heads, self._most = int(sizes.item()), max(map(len, self._names))

    def table(self, step: int, values_clh: torch.Tensor) -> AttentionTable:
        """Collective: one all-gather and one copy to the host."""
        columns, layers, heads = values_clh.shape
        padded = values_clh.new_full((columns, self._most, self._heads), torch.nan)
        padded[:, :layers, :heads] = values_clh
        gathered = [torch.empty_like(padded) for _ in self._names]
        dist.all_gather(gathered, padded, group=self._group)
        stages = torch.stack(gathered).tolist()  # [stage][column][layer][head]
        names = [name for stage in self._names for name in stage]
        rows = [
            [layer for stage, held in zip(stages, self._names, strict=True) for layer in stage[column][: len(held)]]
            for column in range(columns)
        ]
        logits, entropies, factors, clips, growths, gains = rows
        return AttentionTable(
            step=step,
            layers=tuple(names),
            max_logit_lh=_tuples(logits),
            entropy_lh=_tuples(entropies),
            factor_lh=_tuples(factors),
            clips_lh=_tuples(clips),
            growth_lh=_tuples(growths),
            max_gain_l=tuple(row[0] for row in gains),
        )


def _tuples(rows: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in rows)
