"""What runs with a step beside the pipeline: measures up to its gate, and changes weights after it (QK-clip)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from megatron.core import parallel_state

from megatron_stability.config import StabilityConfig
from megatron_stability.detect.base import Detector, blind, silent
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import master_weights, skipped
from megatron_stability.megatron.access.collectives import gather_json
from megatron_stability.megatron.access.data_iterators import DataIterators
from megatron_stability.megatron.access.flags import cuda_graphs
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.attention import qk_clip
from megatron_stability.megatron.checkpoint.run_files import RunFiles
from megatron_stability.megatron.fp8.flags import active_transformer_engine
from megatron_stability.megatron.fp8.hook import Fp8Hook
from megatron_stability.megatron.model.embedding_clip import EmbeddingClipHook
from megatron_stability.megatron.model.loss import real_vocab_size
from megatron_stability.megatron.observers import replicas
from megatron_stability.megatron.observers.batches import BatchHook
from megatron_stability.megatron.observers.experts import MoeHook
from megatron_stability.megatron.observers.held_out import HeldOutHook
from megatron_stability.megatron.observers.norms import NormsHook
from megatron_stability.megatron.observers.replicas import ReplicaHook
from megatron_stability.megatron.observers.sketches import SketchHook
from megatron_stability.megatron.observers.skipped import SkipHook
from megatron_stability.megatron.observers.step import StepHook
from megatron_stability.megatron.observers.vocabulary import VocabularyHook
from megatron_stability.observe.reduction import How
from megatron_stability.records import AttentionTable, StepRecord

_NO_PLAIN_MASTERS = ("use_precision_aware_optimizer", "fp8_param_gather", "fp4_param_gather", "optimizer_cpu_offload")


class WeightHook(Protocol):
    """One of them. Every rank has the same ones; "collective" methods are called by every rank, in the same order."""

    @property
    def signals(self) -> Mapping[str, How]:
        """The names that `observe` may return, and how each is combined over ranks; final once training begins."""

    def train_begins(self) -> None:
        """Collective, before the first step."""

    def step_begins(self, step: int) -> None:
        """Before the forward of `step` (1-based)."""

    def observe(self) -> Mapping[str, torch.Tensor | float]:
        """Collective, before the gate: this rank's values for the StepRecord; NaN or absent where it has none."""

    def update_done(self, record: StepRecord, updated: bool) -> AttentionTable | None:
        """Collective, after the optimizer; `updated` says whether it changed the weights."""


@runtime_checkable
class EvaluationHook(Protocol):
    """A hook that is told of evaluations."""

    def evaluated(self, suffix: str, losses: Mapping[str, torch.Tensor]) -> None:
        """Collective, after each validation set, whose losses these are; they are empty but on the last stage."""


@runtime_checkable
class StatefulHook(Protocol):
    """A hook with state in the checkpoint."""

    @property
    def checkpoint_key(self) -> str:
        """Its name there."""

    def state_dict(self) -> dict[str, Any]:
        """Collective over the pipeline group: JSON primitives, the same on every rank of it."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """When training goes on from a checkpoint; None: it holds nothing of this hook's."""


@runtime_checkable
class TableSink(Protocol):
    """A sink that takes tables of all layers and heads."""

    def write_attention(self, table: AttentionTable) -> None:
        """Called on every rank that has the table; most write on one."""


def build(
    config: StabilityConfig,
    model: Sequence[Any],
    optimizer: Any,
    device: torch.device,
    folder: Path,
    args: Namespace,
    data: DataIterators,
    host: Host,
    files: RunFiles,
    loaded: Callable[[], Mapping[str, Any]],
) -> list[WeightHook]:
    """The hooks that the configuration asks for. No collective, so that a rank may fail alone and say so.

    Args:
        config: the validated tree.
        model: Megatron's model chunks.
        optimizer: Megatron's.
        device: of the signals.
        folder: of the ledger.
        args: Megatron's.
        data: the iterators.
        host: the loop around the core.
        files: the run's data files.
        loaded: what Transformer Engine's modules had in the checkpoint that was loaded last.

    Returns:
        Those of this run, in one order on every rank.

    Raises:
        UsageError: a layer of this rank can't be measured or clipped; names it.
    """
    hooks = _observers(config, model, optimizer, device, args, host)
    hooks.append(VocabularyHook(host.vocab_size(), model, device, files.refuse_id))
    if config.observe.batch.enabled and cuda_graphs.flag(args) is None:
        hooks.append(BatchHook(config.observe.batch.ngram, model, device, data))
    if data.skipped is not None:
        hooks.append(SkipHook(data.skipped, args))
    if qk_clip.wanted(config):
        hooks.append(qk_clip.AttentionHook(config, model, optimizer, device))
    if config.model.embedding_norm_clip is not None:
        hooks.append(EmbeddingClipHook(config.model.embedding_norm_clip, model, optimizer))
    if config.fp8.emulate != "none":
        hooks.append(Fp8Hook(config.fp8, model, device, folder, args))
    if config.observe.sketch.every:
        hooks.append(SketchHook(config.observe.sketch.every, model, optimizer, device, folder, args))
    if active_transformer_engine(args):
        hooks.append(_transformer_engine_hook(config, model, device, folder, args, loaded))
    return hooks


def _transformer_engine_hook(
    config: StabilityConfig,
    model: Sequence[Any],
    device: torch.device,
    folder: Path,
    args: Namespace,
    loaded: Callable[[], Mapping[str, Any]],
) -> WeightHook:
    from megatron_stability.transformer_engine.hook import Run, TransformerEngineHook

    run = Run(
        recipe=args.fp8_recipe,
        margin=args.fp8_margin,
        sample_every=config.fp8.sample_every,
        recalibrate=config.fp8.recalibrate,
        keep_amax_after_skips=config.fp8.keep_amax_after_skips,
        iteration=lambda: int(args.iteration),
        loaded=loaded,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        gather=lambda own: gather_json(own, parallel_state.get_pipeline_model_parallel_group(), device),
        folder=folder,
        speaks=args.rank == 0,
    )
    return TransformerEngineHook(model, device, run)


def evaluated(hooks: Sequence[WeightHook], suffix: str, losses: Mapping[str, torch.Tensor]) -> None:
    """Tell those whom it concerns of a set's losses. Collective; see `EvaluationHook`."""
    for hook in hooks:
        if isinstance(hook, EvaluationHook):
            hook.evaluated(suffix, losses)


def judge(hooks: Sequence[WeightHook], record: StepRecord) -> None:
    """Before the update: end the run where the record shows what no policy may pass over. Equal on every rank.

    Args:
        hooks: of the run.
        record: the step's.

    Raises:
        UsageError: a batch held an id that is no token.
    """
    for hook in hooks:
        if isinstance(hook, VocabularyHook):
            hook.judge(record)


def say(args: Namespace, what: str) -> None:
    """One line from rank 0 on what can't be active."""
    if args.rank == 0:
        print(f"> megatron-stability: {what}", flush=True)


def say_what_is_silent(args: Namespace, detectors: Sequence[Detector], available: Collection[str]) -> Collection[str]:
    """A line on detectors whose signals no hook measures, and one on those still blind; returns the former's names."""
    lacking = silent(detectors, available)
    if lacking:
        names = ", ".join(f"{name} ({', '.join(missing)})" for name, missing in lacking.items())
        say(args, f"detectors without their signals in this run: {names}")
    begins = blind([detector for detector in detectors if detector.name not in lacking], args.iteration + 1)
    if begins and args.iteration > 0:
        names = ", ".join(f"{name} until step {step}" for name, step in begins.items())
        say(args, f"detectors without a baseline, as after a start without saved state: {names}")
    return lacking


def _observers(
    config: StabilityConfig, model: Sequence[Any], optimizer: Any, device: torch.device, args: Namespace, host: Host
) -> list[WeightHook]:
    """What only measures. The fixed micro-batch comes first: the others forget what they saw of it."""
    observe, norms = config.observe, config.observe.norms
    vocab_size = real_vocab_size(host.vocab_size(), args.padded_vocab_size)
    hooks: list[WeightHook] = []
    if observe.replicas.weights_every or observe.replicas.compute_every:
        hooks.append(ReplicaHook(observe.replicas, model, device, args, vocab_size))
    hooks.append(StepHook(float(optimizer.config.clip_grad)))
    if flag := next((name for name in _NO_PLAIN_MASTERS if getattr(args, name, False)), None):
        say(args, f"--{flag.replace('_', '-')}: no norms of weights, for their masters are no plain fp32 tensors")
        norms = norms.model_copy(update={"params_every": 0})
    hooks.append(NormsHook(norms, model, optimizer, args, vocab_size))
    if (graphs := cuda_graphs.flag(args)) is not None:
        say(args, f"{graphs}: a replayed graph calls no hook, so batches and experts are not observed")
    elif args.num_experts and observe.moe.every:
        hooks.append(MoeHook(observe.moe.every, model))
    if args.do_valid:
        hooks.append(HeldOutHook(args))
    return hooks


def refuse_what_cannot_work(config: StabilityConfig, args: Namespace) -> None:
    """Raise for Megatron's flags that a hook can't live with.

    Raises:
        UsageError: names the flag and the way out.
    """
    qk_clip.refuse_what_cannot_work(config, args)
    skipped.refuse_what_cannot_work(config.data.skip_list, args)
    replicas.refuse_what_cannot_work(config, args)
    if config.observe.sketch.every:
        feature = "observe.sketch.every"
        master_weights.refuse_what_has_no_plain_copies(args, feature)
        if args.use_precision_aware_optimizer:
            raise UsageError(
                f"{feature} with --use-precision-aware-optimizer: its masters are no plain fp32 tensors; set it to 0"
            )
