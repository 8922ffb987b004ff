"""What Megatron's optimizer and model keep that a withheld step must not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


class ForwardState:
    """The model's buffers, kept before a forward and put back when the step is withheld.

    MoE routers count tokens and move their expert bias in buffers, in the forward and in `finalize_model_grads`, before
    the optimizer is asked (`core/transformer/moe/router.py`). Every buffer is kept, by name of none: a router of the
    next release is covered too. A dense model has next to none.
    """

    def __init__(self, model: list[Any]) -> None:
        """Takes Megatron's list of model chunks."""
        self._model = model
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy every buffer, on its device."""
        buffers = self._buffers()
        if [id(buffer) for buffer, _ in self._kept] != [id(buffer) for buffer in buffers]:
            self._kept = [(buffer, buffer.clone()) for buffer in buffers]
            return
        for buffer, copy in self._kept:
            if copy.shape != buffer.shape or copy.dtype != buffer.dtype:  # a router goes to fp32 in its first forward
                copy.data = buffer.clone()
            else:
                copy.copy_(buffer)

    def _buffers(self) -> list[torch.Tensor]:
        # Not `chunk.buffers()`: Megatron's DDP wrapper has a list of gradient buffers under that name.
        modules = (module for chunk in self._model for module in chunk.modules())
        return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what `keep` saw."""
        for buffer, copy in self._kept:
            buffer.copy_(copy)


def grad_amax(model: list[Any]) -> torch.Tensor | None:
    """The largest |g| over all gradients that this rank holds, NaN if one is NaN; None without gradients.

    One pass over the gradient buffers of Megatron's DDP, without a temporary and without a host synchronisation. Called
    between the gradient reduction and the optimizer, before clipping can spread a NaN.
    """
    grads: list[torch.Tensor] = []
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            grads += [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        else:
            held = (getattr(p, "main_grad", None) if p.grad is None else p.grad for p in chunk.parameters())
            grads += [grad for grad in held if grad is not None]
    if not grads:
        return None
    ends = [end.float() for grad in grads if grad.numel() for end in torch.aminmax(grad)]
    return torch.stack(ends).abs().amax() if ends else None


class ScaledGroups:
    """Multiplies a value of every parameter group for one optimizer step, and puts the scheduler's own back after it.

    The scheduler, the log and the checkpoint see their own values only. Every group is scaled alike: decoupled learning
    rates, µP groups, and both halves of a Muon and Adam chain keep their ratios.
    """

    def __init__(self) -> None:
        """Nothing is scaled yet."""
        self._kept: list[tuple[dict[str, Any], str, Any]] = []

    def scale(self, optimizer: Any, key: str, factor: float) -> None:
        """`key` is "lr" or "weight_decay"; a factor of 1 touches nothing."""
        if factor == 1.0:
            return
        for group in optimizer.param_groups:
            self._kept.append((group, key, group[key]))
            group[key] = group[key] * factor

    def restore(self) -> None:
        """Put every value back as it was."""
        while self._kept:
            group, key, value = self._kept.pop()
            group[key] = value


def give_empty_state(optimizer: Any) -> None:
    """Let a fresh distributed optimizer over torch's Adam describe itself to a load.

    Without Apex and TE, `DistributedOptimizer.state_dict` reads the step from the moments, which Adam makes in its
    first step only (`core/optimizer/distrib_optimizer.py`), so that a `torch_dist` load fails. The load overwrites the
    moments; the step is `restore_step`'s.
    """
    for inner in _torch_adams(optimizer):
        _begin(inner)


def begin_state(optimizer: Any) -> None:
    """The state that a first step would begin with, where no step has been applied yet, so that it can be saved.

    A load asks for the moments of every parameter, and `DistributedOptimizer.state_dict` for their step, both of which
    an optimizer makes in its first step only. What is there is left alone.
    """
    for one in _innermost(optimizer):
        inner = getattr(one, "optimizer", None)
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            _begin(inner)
        elif inner is not None and not inner.state and one.init_state_fn is not None:
            one.init_state_fn(inner, one.config)


def give_first_step(optimizer: Any, saved: Any) -> None:
    """Before a load, the step 0 that Megatron leaves out of a checkpoint without an applied update.

    `MixedPrecisionOptimizer.sharded_state_dict` saves a step only where it is true, and torch's Adam takes no moments
    without one.

    Args:
        optimizer: Megatron's, that is about to load.
        saved: its part of the state dict; changed in place.
    """
    plain = (one for one in _innermost(optimizer) if not isinstance(one, DistributedOptimizer))
    if not any(isinstance(getattr(one, "optimizer", None), torch.optim.Adam | torch.optim.AdamW) for one in plain):
        return
    for state in _states_by_parameter(saved):
        moments = [each for each in state.values() if isinstance(each, dict) and "exp_avg" in each]
        if moments and "common_step" not in state and not any("step" in each for each in moments):
            state["common_step"] = torch.zeros(())


def _states_by_parameter(saved: Any) -> Iterator[dict[Any, Any]]:
    """The `state` of each torch optimizer in a state dict of Megatron's, however deep."""
    if not isinstance(saved, dict):
        return
    if "state" in saved and "param_groups" in saved:
        yield saved["state"]
        return
    for each in saved.values():
        yield from _states_by_parameter(each)


def _begin(adam: torch.optim.Optimizer) -> None:
    for parameter in (p for group in adam.param_groups for p in group["params"] if not adam.state[p]):
        adam.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def restore_step(optimizer: Any) -> None:
    """After a load, give each parameter a step count of its own.

    `DistributedOptimizer.load_state_dict` gives all of them one tensor, which torch's Adam then counts up once for each
    parameter, so that the bias correction of a resumed run is that of a much later step.
    """
    for inner in _torch_adams(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"] if "step" in group else ():
                state = inner.state[parameter]
                state["step"] = state["step"].clone().fill_(group["step"])


def _innermost(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers that hold no others."""
    for one in getattr(optimizer, "chained_optimizers", ()):
        yield from _innermost(one)
    if not hasattr(optimizer, "chained_optimizers"):
        yield optimizer


def _torch_adams(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for one in _innermost(optimizer):
        inner = getattr(one, "optimizer", None)
        if isinstance(one, DistributedOptimizer) and isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            yield inner


def has_no_norm_of_its_own(optimizer: Any) -> bool:
    """Whether Megatron computes no norm: clipping is off, and only ChainedOptimizer computes one all the same."""
    return optimizer.config.clip_grad <= 0.0 and not isinstance(optimizer, ChainedOptimizer)
