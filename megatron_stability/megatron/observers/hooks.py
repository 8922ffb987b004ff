"""Which hooks a run has, in which order."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from megatron.core import parallel_state

from megatron_stability.config import StabilityConfig
from megatron_stability.detect.base import Detector, blind, silent
from megatron_stability.echo import say
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import master_weights, skipped
from megatron_stability.megatron.access.collectives import gather_json
from megatron_stability.megatron.access.data_iterators import DataIterators
from megatron_stability.megatron.access.flags import cuda_graphs
from megatron_stability.megatron.access.flags.argument_table import is_set
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.attention import qk_clip
from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints
from megatron_stability.megatron.checkpoint.run_files import RunFiles
from megatron_stability.megatron.fp8.flags import active_transformer_engine
from megatron_stability.megatron.fp8.hook import Fp8Hook
from megatron_stability.megatron.model.embedding_clip import EmbeddingClipHook
from megatron_stability.megatron.model.loss import HeadLoss, real_vocab_size
from megatron_stability.megatron.observers import replicas
from megatron_stability.megatron.observers.batches import BatchHook
from megatron_stability.megatron.observers.experts import MoeHook
from megatron_stability.megatron.observers.held_out import HeldOutHook
from megatron_stability.megatron.observers.log_z import LogZHook
from megatron_stability.megatron.observers.norms import NormsHook
from megatron_stability.megatron.observers.replicas import ReplicaHook
from megatron_stability.megatron.observers.sketches import SketchHook
from megatron_stability.megatron.observers.skipped import SkipHook
from megatron_stability.megatron.observers.step import StepHook
from megatron_stability.megatron.observers.vocabulary import VocabularyHook
from megatron_stability.observe.hook import Hook
from megatron_stability.records import AttentionTable

_NO_PLAIN_MASTERS = ("use_precision_aware_optimizer", "fp8_param_gather", "fp4_param_gather", "optimizer_cpu_offload")


@runtime_checkable
class TableSink(Protocol):
    """A sink that takes tables of all layers and heads."""

    def write_attention(self, table: AttentionTable) -> None:
        """Called on every rank that has the table; most write on one."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What hooks are made from.

    Attributes:
        config: the validated tree.
        args: Megatron's.
        host: the loop around the core.
        model: Megatron's model chunks.
        optimizer: Megatron's.
        device: of the signals.
        folder: of the ledger.
        data: the iterators.
        files: the run's data files.
        head: the loss of the language-model head, where a setting changes it.
        checkpoints: has what Transformer Engine's modules had in the checkpoint that was loaded last.
    """

    config: StabilityConfig
    args: Namespace
    host: Host
    model: Sequence[Any]
    optimizer: Any
    device: torch.device
    folder: Path
    data: DataIterators
    files: RunFiles
    checkpoints: Checkpoints
    head: HeadLoss | None


def build(run: Context) -> list[Hook]:
    """The hooks that the configuration asks for. No collective, so that a rank may fail alone and say so.

    Args:
        run: what they are made from.

    Returns:
        Those of this run, in one order on every rank.

    Raises:
        UsageError: a layer of this rank can't be measured or clipped; names it.
    """
    config, args, model, optimizer, device = run.config, run.args, run.model, run.optimizer, run.device
    hooks = _observers(run)
    hooks.append(VocabularyHook(run.host.vocab_size(), model, device, run.files.refuse_id))
    if config.observe.batch.enabled and cuda_graphs.flag(args) is None:
        hooks.append(BatchHook(config.observe.batch.ngram, model, device, run.data))
    if run.data.skipped is not None:
        hooks.append(SkipHook(run.data.skipped, args))
    if qk_clip.wanted(config):
        hooks.append(qk_clip.AttentionHook(config, model, optimizer, device))
    if config.model.embedding_norm_clip is not None:
        hooks.append(EmbeddingClipHook(config.model.embedding_norm_clip, model, optimizer))
    if config.fp8.emulate != "none":
        hooks.append(Fp8Hook(config.fp8, model, device, run.folder, args))
    if config.observe.sketch.every:
        hooks.append(SketchHook(config.observe.sketch.every, model, optimizer, device, run.folder, args))
    if active_transformer_engine(args):
        hooks.append(_transformer_engine_hook(run))
    if run.head is not None:
        speaks = parallel_state.get_tensor_model_parallel_rank() == 0
        hooks.append(LogZHook(run.head, config.model.z_loss, speaks))
    return hooks


def _transformer_engine_hook(context: Context) -> Hook:
    from megatron_stability.transformer_engine.hook import Run, TransformerEngineHook

    args, device = context.args, context.device
    run = Run(
        recipe=args.fp8_recipe,
        margin=args.fp8_margin,
        fp8=context.config.fp8,
        iteration=lambda: int(args.iteration),
        loaded=lambda: context.checkpoints.extra_states,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        gather=lambda own: gather_json(own, parallel_state.get_pipeline_model_parallel_group(), device),
        folder=context.folder,
        speaks=args.rank == 0,
    )
    return TransformerEngineHook(context.model, device, run)


def say_what_is_silent(args: Namespace, detectors: Sequence[Detector], available: Collection[str]) -> Collection[str]:
    """A line on detectors whose signals no hook measures, and one on those still blind; returns the former's names."""
    lacking = silent(detectors, available)
    if lacking:
        names = ", ".join(f"{name} ({', '.join(missing)})" for name, missing in lacking.items())
        say(f"detectors without their signals in this run: {names}", args.rank == 0)
    begins = blind([detector for detector in detectors if detector.name not in lacking], args.iteration + 1)
    if begins and args.iteration > 0:
        names = ", ".join(f"{name} until step {step}" for name, step in begins.items())
        say(f"detectors without a baseline, as after a start without saved state: {names}", args.rank == 0)
    return lacking


def _observers(run: Context) -> list[Hook]:
    """What only measures. The fixed micro-batch comes first: the others forget what they saw of it."""
    config, args, model, optimizer, device = run.config, run.args, run.model, run.optimizer, run.device
    observe, norms = config.observe, config.observe.norms
    vocab_size = real_vocab_size(run.host.vocab_size(), args.padded_vocab_size)
    hooks: list[Hook] = []
    if observe.replicas.weights_every or observe.replicas.compute_every:
        hooks.append(ReplicaHook(observe.replicas, model, device, args, vocab_size))
    hooks.append(StepHook(float(optimizer.config.clip_grad)))
    if flag := next((name for name in _NO_PLAIN_MASTERS if is_set(args, name)), None):
        say(
            f"--{flag.replace('_', '-')}: no norms of weights, for their masters are no plain fp32 tensors",
            args.rank == 0,
        )
        norms = norms.model_copy(update={"params_every": 0})
    hooks.append(NormsHook(norms, model, optimizer, args, vocab_size))
    if (graphs := cuda_graphs.flag(args)) is not None:
        say(f"{graphs}: a replayed graph calls no hook, so batches and experts are not observed", args.rank == 0)
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
