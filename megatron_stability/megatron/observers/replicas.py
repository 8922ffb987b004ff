"""What data-parallel replicas must have in common to the bit, as digests in the step's one collective.

    weights   as the step's forward used them, every `weights_every` steps and where a save is planned
    compute   what a fixed micro-batch makes of this rank's layers, every `compute_every` steps: outputs, and with
              --deterministic-mode or on CPUs the gradients too

The micro-batch is drawn from a fixed seed: tokens on the first pipeline stage, hidden states on the others, so that
each stage is checked by itself and no pipeline schedule is needed. It runs before the step's own forward, in evaluation
mode (no dropout, no auxiliary losses, no attention telemetry); buffers that it moves are put back, and its gradients go
where Megatron zeroes them next. Only the model's own collectives run.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model

from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access import rank_state
from megatron_stability.megatron.access.flags import cuda_graphs
from megatron_stability.megatron.access.flags.argument_table import argument, is_set
from megatron_stability.megatron.access.optimizer_state import ForwardState
from megatron_stability.observe.config import Replicas as Settings
from megatron_stability.observe.fingerprint import digest
from megatron_stability.observe.hook import Hook
from megatron_stability.observe.reduction import How
from megatron_stability.observe.wide import Replicas, fold

SEED = 20_240_117  # of the fixed micro-batch


class ReplicaHook(Hook):
    """Digests of this rank's weights and of what it computes."""

    def __init__(
        self, settings: Settings, model: Sequence[Any], device: torch.device, args: Namespace, vocab_size: int
    ) -> None:
        """Finds the weights.

        Args:
            settings: the `observe.replicas` section.
            model: Megatron's list of model chunks.
            device: of the model.
            args: Megatron's.
            vocab_size: real rows of the vocabulary.
        """
        self._settings, self._model, self._args = settings, list(model), args
        self._step = 0
        self._experts = rank_state.expert_names(self._model)
        self._check = FixedBatch(self._model, device, args, vocab_size) if settings.compute_every else None
        self._signals: dict[str, How] = {}
        self._found: dict[str, torch.Tensor] = {}

    @property
    def signals(self) -> Mapping[str, How]:
        """See `Hook`; known once training begins."""
        return self._signals

    def train_begins(self) -> None:
        """Collective: every rank learns who is whose replica."""
        with_context = parallel_state.get_data_parallel_group(with_context_parallel=True)
        rank = dist.get_rank()
        if self._settings.weights_every:
            self._signals["weights"] = Replicas(_everyones(with_context), rank)
            if self._args.expert_model_parallel_size > 1:  # else Megatron reduces experts like all others
                of_experts = parallel_state.get_expert_data_parallel_group()
                self._signals["expert_weights"] = Replicas(_everyones(of_experts), rank)
        if self._check is not None:
            self._signals["compute"] = Replicas(_everyones(with_context), rank)

    def step_begins(self, step: int) -> None:
        """Collective over tensor-parallel ranks where the fixed micro-batch is due."""
        self._step, self._found = step, {}
        if self._check is not None and step % self._settings.compute_every == 0:
            self._found["compute"] = fold(self._check())

    def observe(self) -> Mapping[str, torch.Tensor]:
        """The digests that are due."""
        if self._settings.weights_due(self._step, saves=saves_after(self._args, self._step)):
            weights: dict[str, list[torch.Tensor]] = {"weights": [], "expert_weights": []}
            for name, tensor in rank_state.weights(self._model):  # anew: a quantized weight may get new codes
                weights["expert_weights" if name in self._experts else "weights"].append(tensor)
            for kind, tensors in weights.items():
                if kind in self._signals and tensors:
                    self._found[kind] = fold(digest(tensors))
        return self._found


def saves_after(args: Namespace, step: int) -> bool:
    """Whether Megatron plans to save after this 1-based step; SIGTERM and --exit-duration-in-mins are not foreseen.

    After `checkpoint_and_decide_exit` and the end of `pretrain` in megatron/training/training.py.
    """
    if not args.save:
        return False
    every = (args.save_interval, args.non_persistent_save_interval, args.exit_interval)
    return step == args.train_iters or any(interval and step % interval == 0 for interval in every)


class FixedBatch:
    """A fixed micro-batch through this rank's model chunks."""

    def __init__(self, model: list[Any], device: torch.device, args: Namespace, vocab_size: int) -> None:
        """Args: model: Megatron's chunks, in its DDP; device: of the model; args: Megatron's; vocab_size: real rows.

        Raises:
            UsageError: a chunk is no GPTModel, so how to run it is not known.
        """
        self._model, self._device, self._args, self._vocab_size = model, device, args, vocab_size
        self._gradients = bool(args.deterministic_mode) or device.type == "cpu"
        for chunk, inner in zip(model, unwrap_model(model), strict=True):
            if not (isinstance(inner, GPTModel) and isinstance(chunk, DistributedDataParallel)):
                raise UsageError(
                    f"observe.replicas.compute_every runs a GPTModel in Megatron's DDP, not {type(inner).__name__} in "
                    f"{type(chunk).__name__}; set it to 0"
                )
        self._buffers = ForwardState(model)

    def __call__(self) -> torch.Tensor:
        """[] int64, a digest of the outputs, and of the gradients before any reduction."""
        self._buffers.keep()
        training = [chunk.training for chunk in self._model]
        found = []
        try:
            for chunk in self._model:
                chunk.eval()
                found += self._run(chunk)
        finally:
            for chunk, was in zip(self._model, training, strict=True):
                chunk.train(was)
            self._buffers.restore()
        return digest(found)

    def _run(self, chunk: Any) -> list[torch.Tensor]:
        inner = unwrap_model([chunk])[0]
        draw = torch.Generator().manual_seed(SEED)  # on the host: the same numbers on any device
        shape = (1, self._args.seq_length)
        tokens = torch.randint(self._vocab_size, shape, generator=draw).to(self._device)
        labels = tokens.roll(-1, dims=1)
        places = torch.arange(shape[1], device=self._device).expand(shape)
        if not inner.pre_process:
            length = shape[1] // (self._args.tensor_model_parallel_size if self._args.sequence_parallel else 1)
            hidden = torch.randn(length, 1, self._args.hidden_size, generator=draw)
            hidden = hidden.to(self._device, self._args.params_dtype).requires_grad_()
            inner.set_input_tensor([hidden])
        if self._gradients:
            chunk.zero_grad_buffer()
        with torch.set_grad_enabled(self._gradients), chunk.no_sync() if self._gradients else contextlib.nullcontext():
            output = inner(tokens, places, None, labels=labels if inner.post_process else None)
            if self._gradients:
                output.float().square().mean().backward()
        found = [output.detach()]
        if self._gradients:
            found += [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return found


def refuse_what_cannot_work(config: StabilityConfig, args: Namespace) -> None:
    """Raise for layouts in which replicas do not compute the same, or in which running once more leaves a trace.

    Raises:
        UsageError: names the flag.
    """
    if not config.observe.replicas.compute_every:
        return
    for flag, active, why in (
        ("--context-parallel-size above 1", args.context_parallel_size > 1, "context ranks see different positions"),
        ("--expert-model-parallel-size above 1", args.expert_model_parallel_size > 1, "experts mix ranks' tokens"),
        ("--mtp-num-layers", is_set(args, "mtp_num_layers"), "MTP layers log what they see"),
        ("--fp8-format", bool(argument(args, "fp8")), "amax histories would take it in"),
        ("fp8.emulate", config.fp8.emulate != "none", "amax histories would take it in"),
        (
            "--defer-embedding-wgrad-compute",
            is_set(args, "defer_embedding_wgrad_compute"),
            "it keeps activations back",
        ),
        (str(cuda_graphs.flag(args)), cuda_graphs.flag(args) is not None, "graphs are captured of the step"),
    ):
        if active:
            raise UsageError(f"observe.replicas.compute_every with {flag}: {why}; set it to 0")


def _everyones(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Collective: each rank's group, as global ranks, every group once."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, tuple(dist.get_process_group_ranks(group)))
    return tuple(dict.fromkeys(answers))
