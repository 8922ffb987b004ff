"""The gate on real FP8 numerics: a small residual net in plain torch, its linears in emulated delayed scaling.

The healthy recipe passes; of four sabotages two fail by the name of their gate, and two are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_stability.fp8_compare.criteria import compare
from megatron_stability.fp8_compare.figures import RunFigures
from megatron_stability.fp8_compare.gates import Gates
from megatron_stability.ledger.sketches import Sketch
from megatron_stability.numerics.fp8 import stats
from megatron_stability.numerics.fp8.formats import E4M3, amax
from megatron_stability.numerics.fp8.recipes import Recipe, delayed_update
from megatron_stability.observe.fp8.telemetry import binades, worst
from megatron_stability.sites import TENSORS, Site
from tests.unit.fp8_compare.test_compare import step

STEPS, WARMUP, VOCABULARY, WIDTH, TOKENS, LAYERS = 60, 15, 64, 32, 128, 3
HEALTHY = Recipe(name="delayed", history=1024, algorithm="max")
SITES = [
    Site(layer, name, tensor)
    for layer in range(1, LAYERS + 1)
    for name in ("linear_fc1", "linear_fc2")
    for tensor in TENSORS
]
ORDERS = torch.tensor([site.order for site in SITES], dtype=torch.float64)


class Scaling:
    """Delayed scaling of every tensor of every linear: [n] scales, [history, n] amaxes, and a step's statistics."""

    def __init__(self, recipe: Recipe, frozen: frozenset[int]) -> None:
        n = len(SITES)
        self.recipe, self.frozen = recipe, list(frozen)
        self.scale, self.history = torch.ones(n), torch.zeros(recipe.history, n)
        self.formats = [recipe.backward if site.tensor == TENSORS[2] else recipe.forward for site in SITES]
        self.limits = torch.tensor([fmt.max for fmt in self.formats])
        self.least_normal = torch.tensor([fmt.least_normal for fmt in self.formats])
        self.begin()

    def begin(self) -> None:
        self.used, self.amax = self.scale.clone(), torch.zeros(len(SITES))
        self.seen = torch.zeros(len(SITES), len(stats.COLUMNS), dtype=torch.float64)

    def __call__(self, i: int, x: Any) -> Any:
        self.history[0, i] = self.amax[i] = amax(x.detach())
        weight = SITES[i].tensor == TENSORS[1]
        self.seen[i] = self.recipe.stats(x.detach(), self.formats[i], self.used[i], weight=weight)
        return self.recipe.quantize(x, self.formats[i], self.used[i], weight=weight, transposed=False)

    def end(self) -> dict[str, float]:
        each = [stats.read(row) for row in self.seen]
        found = binades(self.amax, self.used, self.least_normal, ORDERS)
        for name in ("saturation", "underflow"):
            values = torch.tensor([getattr(one, name) for one in each], dtype=torch.float64)
            found |= worst(f"fp8/{name}", values, ORDERS)
        kept = self.scale[self.frozen].clone()
        recipe = self.recipe
        delayed_update(self.history, self.scale, self.limits, algorithm=recipe.algorithm, margin=recipe.margin)
        self.scale[self.frozen] = kept
        signals = {name: float(value) for name, value in found.items() if not math.isnan(float(value))}
        return signals | {"fp8/gemms": float(len(SITES)), "fp8/fallbacks": 0.0}


class Linear(torch.autograd.Function):
    """x W^T with operands as a scaling leaves them; without one, as they are."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, first: int, scaling: Scaling | None) -> Any:
        if scaling is not None:
            x, weight = scaling(first, x), scaling(first + 1, weight)
        ctx.save_for_backward(x, weight)
        ctx.first, ctx.scaling = first, scaling
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.scaling is not None:
            gradient = ctx.scaling(ctx.first + 2, gradient)
        return gradient @ weight, gradient.T @ x, None, None


def loss_of(parameters: list[Any], tokens: Any, scaling: Scaling | None) -> Any:
    embedding, *linears = parameters
    x = embedding[tokens[:-1]]
    for layer in range(LAYERS):
        y = torch.nn.functional.rms_norm(x, (WIDTH,))
        y = Linear.apply(y, linears[2 * layer], 6 * layer, scaling)
        x = x + Linear.apply(torch.nn.functional.gelu(y), linears[2 * layer + 1], 6 * layer + 3, scaling)
    logits = torch.nn.functional.rms_norm(x, (WIDTH,)) @ embedding.T
    return torch.nn.functional.cross_entropy(logits, tokens[1:])


def text(draw: Any) -> Any:
    """A chain in which each token has one likely successor."""
    tokens = [0]
    jumps = torch.randint(VOCABULARY, (TOKENS,), generator=draw).tolist()
    for jump, chance in zip(jumps, torch.rand(TOKENS, generator=draw).tolist(), strict=True):
        tokens.append(jump if chance < 0.3 else (5 * tokens[-1] + 3) % VOCABULARY)
    return torch.tensor(tokens)


def train(
    name: str, recipe: Recipe | None, seed: int = 1, frozen: Callable[[Site], bool] = lambda _: False
) -> RunFigures:
    draw, data, held = (torch.Generator().manual_seed(s) for s in (seed, seed + 1000, 7))
    shapes = [(VOCABULARY, WIDTH), *[(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] * LAYERS]
    parameters = [(torch.randn(s, generator=draw) * 0.05).requires_grad_() for s in shapes]
    scaling = Scaling(recipe, frozenset(i for i, site in enumerate(SITES) if frozen(site))) if recipe else None
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    entries, sketches = [], {}
    for number in range(1, STEPS + 1):
        if scaling:
            scaling.begin()
        optimizer.zero_grad()
        loss = loss_of(parameters, text(data), scaling)
        loss.backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        if number in (1, 2, STEPS):
            rows = [[0], *[[2 * layer + 1, 2 * layer + 2] for layer in range(LAYERS)]]
            weights, gradients = (
                tuple(tuple(torch.cat([of(parameters[i]).flatten() for i in row]).tolist()) for row in rows)
                for of in (lambda p: p.detach(), lambda p: p.grad)
            )
            sketches[number] = Sketch(("1",) * len(rows), weights, gradients)
        optimizer.step()
        entries.append(step(number, float(loss.detach()), scaling.end() if scaling else {}, grad_norm=norm))
    with torch.no_grad():
        if scaling:
            scaling.begin()
        held_out = float(loss_of(parameters, text(held), scaling))
    settings: dict[str, Any] = {}
    if recipe:
        settings = {
            "fp8.emulate": "delayed",
            "fp8_amax_history_len": recipe.history,
            "fp8_amax_compute_algo": recipe.algorithm,
        }
    data_of = {"seed": str(seed), "data_path": "chain"}
    return RunFigures(name=name, steps=entries, held_out=held_out, data=data_of, sketches=sketches, settings=settings)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The net is so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def controls() -> tuple[RunFigures, RunFigures]:
    return train("bf16", None), train("seed 2", None, seed=2)


def stuck(site: Site) -> bool:
    return site.layer == 2 and site.module == "linear_fc1"


def verdict(
    controls: tuple[RunFigures, RunFigures], recipe: Recipe, frozen: Callable[[Site], bool] | None = None
) -> str:
    run = train("fp8", recipe, frozen=frozen or (lambda _: False))
    said: str = compare(run, *controls, WARMUP, Gates())["verdict"]
    return said


def test_a_healthy_recipe_passes_every_gate_but_the_one_left_out(controls: tuple[RunFigures, RunFigures]) -> None:
    assert verdict(controls, HEALTHY) == "PASS: 8 of 9 gates judged; not judged: time (left out)"


def test_a_margin_of_8_fails_by_its_binades(controls: tuple[RunFigures, RunFigures]) -> None:
    assert verdict(controls, replace(HEALTHY, margin=8)).startswith("FAIL: binades; 8 of 9")


def test_gradients_in_e4m3_fail_by_their_cosine(controls: tuple[RunFigures, RunFigures]) -> None:
    assert verdict(controls, replace(HEALTHY, backward=E4M3)).startswith("FAIL: cosine, held-out; 8 of 9")


# Two that the gates do not see here; strict, so that a gate that learns to see them is noticed.
@pytest.mark.xfail(strict=True, reason="its median saturation is 0.07 %, and the gate 0.1 %")
def test_a_history_of_one_step_fails_by_saturation(controls: tuple[RunFigures, RunFigures]) -> None:
    assert verdict(controls, replace(HEALTHY, history=1, algorithm="most_recent")).startswith("FAIL: saturation")


@pytest.mark.xfail(strict=True, reason="a scale of 1 is left out of the binades, and its 9 % underflow passes 10 %")
def test_one_layer_whose_scales_never_move_fails(controls: tuple[RunFigures, RunFigures]) -> None:
    assert verdict(controls, HEALTHY, stuck).startswith("FAIL: ")
