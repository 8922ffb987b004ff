"""Emulated FP8: Column- and RowParallelLinear of the local spec whose three GEMMs see FP8 values.

    fprop   input (E4M3)  x weight (E4M3)          as TE's Linear: `transformer_engine/pytorch/module/linear.py`
    dgrad   grad_output (E5M2, or E4M3) x weight
    wgrad   grad_output x input

Operands are rounded to FP8 values and multiplied in float32, so sums are exact to float32; an H100 sums in fewer bits.
It is a dry run of the numerics and no faster than BF16: slower. Attention, embedding, output layer, norms and router
stay as they are, as under TE. A weight is quantized in a step's first micro-batch and kept for the others, as TE does
with Megatron's `is_first_microbatch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_stability.numerics.fp8.config import Fp8
from megatron_stability.numerics.fp8.formats import E4M3, E5M2, amax
from megatron_stability.numerics.fp8.recipes import Recipe
from megatron_stability.numerics.fp8.stats import COLUMNS

INPUT, WEIGHT, GRAD = 0, 1, 2  # the order of `sites.TENSORS`


def recipe_of(fp8: Fp8, config: TransformerConfig) -> Recipe | None:
    """The recipe that the settings and Megatron's FP8 flags name; None where nothing is emulated."""
    if fp8.emulate == "none":
        return None
    own = "e4m3" if fp8.emulate in ("block", "mxfp8") else "hybrid"
    gradients = E5M2 if (own if fp8.format == "recipe" else fp8.format) == "hybrid" else E4M3
    return Recipe(
        name=fp8.emulate,
        backward=gradients,
        margin=config.fp8_margin,
        history=config.fp8_amax_history_len,
        algorithm=config.fp8_amax_compute_algo,
        power_of_two=not fp8.fp32_scales,
    )


class Backward:
    """The end of one model chunk's backward: that of the linear which ran first in its forward, as in TE.

    Args:
        done: called then.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.first: State | None = None  # known after the first forward; module order is not the order of execution


class State:
    """What one layer keeps: scales and history (delayed), this step's amax, and the samples of tier 2.

    The tensors may be rows of larger ones that `fp8_hook` works on as a whole; they change in place only.
    """

    def __init__(self, recipe: Recipe) -> None:
        """As before the first step: scale 1, empty history (TE `DelayedScalingRecipeState`)."""
        self.recipe = recipe
        self.formats = (recipe.forward, recipe.forward, recipe.backward)
        self.scale = torch.ones(3)
        self.staged = torch.zeros(3)  # delayed: row 0 of the history, amax since the last update
        self.step_amax = torch.zeros(3)  # amax of this step, all micro-batches
        self.samples: torch.Tensor | None = None  # [3, len(COLUMNS)] float64 while the step is sampled
        self.calibrating = False
        self.first_microbatch = True
        self.weight: tuple[torch.Tensor, torch.Tensor] | None = None
        self.runs = self.fallbacks = 0
        self.chunk: Backward | None = None  # delayed: shared by a model chunk's linears

    def observe(self, which: int, x: torch.Tensor) -> None:
        """Take a tensor's amax, and its statistics where the step is sampled."""
        largest = amax(x)
        self.step_amax[which] = torch.maximum(self.step_amax[which], largest)
        self.staged[which] = torch.maximum(self.staged[which], largest)
        if self.samples is not None and not self.calibrating:
            stats = self.recipe.stats(x, self.formats[which], self.scale[which], weight=which == WEIGHT)
            at = COLUMNS.index("amax")
            largest_seen = torch.maximum(self.samples[which, at], stats[at])
            self.samples[which] += stats
            self.samples[which, at] = largest_seen

    def quantize(self, which: int, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """[R, C] float32, as the GEMM that sums over C (transposed: over R) sees it."""
        if self.calibrating:
            return x.float()
        scale = self.scale[which].clone()
        return self.recipe.quantize(x, self.formats[which], scale, weight=which == WEIGHT, transposed=transposed)

    def quantized_weight(self, weight: torch.Tensor, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight for fprop and for dgrad."""
        if training and self.weight is not None and not self.first_microbatch:
            return self.weight
        if training:
            self.observe(WEIGHT, weight)
        made = tuple(self.quantize(WEIGHT, weight, transposed=transposed) for transposed in (False, True))
        if training:
            self.weight, self.first_microbatch = (made[0], made[1]), False
        return made[0], made[1]


class _Linear(torch.autograd.Function):
    """y = x W^T + b in emulated FP8; the communication is Megatron's, see `LinearWithGradAccumulation...`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, state: State, training: bool
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if training and rows.numel():
            state.observe(INPUT, rows)
        fprop, dgrad = state.quantized_weight(weight, training)
        output = _quantized(state, INPUT, rows, transposed=False) @ fprop.t()
        if training:
            ctx.save_for_backward(_quantized(state, INPUT, rows, transposed=True), dgrad)
            ctx.state, ctx.dtypes, ctx.bias = state, (x.dtype, weight.dtype), bias is not None
        output = output.to(x.dtype)
        output = output if bias is None else output + bias
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        wgrad_input, weight = ctx.saved_tensors
        state: State = ctx.state
        shape = grads[0].shape
        rows = grads[0].reshape(-1, shape[-1])
        if rows.numel():
            state.observe(GRAD, rows)
        dgrad = (_quantized(state, GRAD, rows, transposed=False) @ weight).to(ctx.dtypes[0])
        wgrad = _quantized(state, GRAD, rows, transposed=True).t() @ wgrad_input
        bias = rows.sum(0) if ctx.bias else None
        return dgrad.view(*shape[:-1], weight.shape[-1]), wgrad.to(ctx.dtypes[1]), bias, None, None


def _quantized(state: State, which: int, rows: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    return state.quantize(which, rows, transposed=transposed) if rows.numel() else rows.float()


class _ReduceBackward(torch.autograd.Function):
    """Identity; the gradient is summed over the tensor-parallel group (Megatron's `allreduce_dgrad`)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _AfterBackward(torch.autograd.Function):
    """Identity on a layer's input; its backward is the layer's end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: State) -> torch.Tensor:
        ctx.state = state
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.state.chunk is not None and ctx.state.chunk.first is ctx.state:
            ctx.state.chunk.done()
        return grads[0], None


class _Emulated:
    """What both linears share: `_forward_impl` is where Megatron's own multiply."""

    fp8: State | None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        state = self.fp8
        if state is None:
            return super()._forward_impl(input=input, weight=weight, **kwargs)  # type: ignore[misc]
        if state.chunk is not None and state.chunk.first is None:
            state.chunk.first = state
        if torch.is_grad_enabled():
            state.runs += 1
            state.fallbacks += state.calibrating
            if input.requires_grad:
                input = _AfterBackward.apply(input, state)
        if kwargs["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, group=kwargs["tp_group"])
        elif kwargs["allreduce_dgrad"]:
            input = _ReduceBackward.apply(input, kwargs["tp_group"])
        output: torch.Tensor = _Linear.apply(input, weight, kwargs.get("bias"), state, torch.is_grad_enabled())
        return output


class Fp8ColumnParallelLinear(_Emulated, ColumnParallelLinear):
    """ColumnParallelLinear, emulated where `fp8` is set.

    Under sequence parallel the gathered input is quantized as a whole: TE quantizes the shard with an amax reduced over
    the TP group, which is the same (`linear.py`, `set_quantizer_amax_reduction_group`).
    """

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8 = State(recipe)


class Fp8RowParallelLinear(_Emulated, RowParallelLinear):
    """RowParallelLinear, emulated where `fp8` is set. Its grad_output is whole on every TP rank."""

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8 = State(recipe)


def fp8_linears(spec: ModuleSpec, recipe: Recipe | None) -> ModuleSpec:
    """A layer's spec with emulated linears, MoE experts included; the spec given is left as it is."""
    made: ModuleSpec = spec if recipe is None else _replaced(spec, recipe)
    return made


def _replaced(part: Any, recipe: Recipe) -> Any:
    if part is ColumnParallelLinear or part is RowParallelLinear:
        column = part is ColumnParallelLinear
        kind = Fp8ColumnParallelLinear if column else Fp8RowParallelLinear
        return ModuleSpec(module=kind, params={"recipe": recipe})  # callable, and what `build_module` takes
    if isinstance(part, partial):
        arguments = [_replaced(value, recipe) for value in part.args]
        keywords = {name: _replaced(value, recipe) for name, value in part.keywords.items()}
        return partial(_replaced(part.func, recipe), *arguments, **keywords)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.init}
        changed = {name: new for name, old in fields.items() if (new := _replaced(old, recipe)) is not old}
        return dataclasses.replace(part, **changed) if changed else part
    return part
