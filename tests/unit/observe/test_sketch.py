"""Sketches: linear, of parts as of the whole, and cosines of two vectors from theirs."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path

import pytest
import torch

from megatron_stability.errors import UsageError
from megatron_stability.ledger import sketches
from megatron_stability.observe.sketch import K, seed_of, sketch

N = 40_000


def vectors(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(N, generator=draw) * torch.logspace(-4, 0, 64).repeat(N // 64 + 1)[:N]  # unlike columns
    return x, x + noise * x.norm() / math.sqrt(N) * torch.randn(N, generator=draw)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.3, 3.0])
def test_the_cosine_of_two_vectors_is_that_of_their_sketches(noise: float) -> None:
    """Over seeds: 1 - cosine has no bias, and the stated deviation while it is small."""
    a, b = vectors(noise)
    true = float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))
    found = [sketches.cosine(sketch(a, s).tolist(), sketch(b, s).tolist()) for s in range(20)]
    if noise == 0:
        assert found == [pytest.approx(1.0, abs=1e-12)] * 20
        return
    assert sum(found) / 20 == pytest.approx(true, abs=4 * math.sqrt(2 / K / 20) * (1 - true))
    if noise < 1:
        deviation = math.sqrt(sum((each - true) ** 2 for each in found) / 20)
        assert deviation < 2 * math.sqrt(2 / K) * (1 - true)


def test_sketches_of_updates_are_differences_and_lengths_are_kept() -> None:
    a, b = vectors(0.1)
    assert torch.allclose(sketch(b, 3) - sketch(a, 3), sketch(b.double() - a.double(), 3), atol=1e-3)
    squares = [float(sketch(a, seed).square().sum()) for seed in range(20)]
    assert sum(squares) / 20 == pytest.approx(float(a.double().square().sum()), rel=0.15)
    assert sketch(torch.zeros(0), 1).tolist() == [0.0] * K


def test_parts_of_a_whole_have_signs_of_their_own() -> None:
    """With one seed for all, equal parts would add up coherently and their sum would be twice too long."""
    part = vectors(0.0)[0]
    total = sum(sketch(part, seed_of("weight", 0, N, rank)) for rank in range(16))
    assert float(total.square().sum()) == pytest.approx(16 * float(part.square().sum()), rel=0.6)
    assert seed_of("a", 0, 5, 1) != seed_of("a", 5, 5, 1)


def line(step: int, weights: list[float], gradients: list[float], cut: tuple[str, ...] = ("1", "2")) -> str:
    text = [
        base64.b64encode(torch.tensor(each, dtype=torch.float64).numpy().tobytes()).decode()
        for each in (weights, gradients)
    ]
    return json.dumps({"step": step, "k": 2, "cut": cut, "weights": text[0], "gradients": text[1]}) + "\n"


def test_lines_are_read_by_step_and_a_torn_last_one_is_left_out(tmp_path: Path) -> None:
    assert sketches.read(tmp_path) == {}
    path = tmp_path / sketches.FILE
    whole = line(50, [1, 2, 3, 4], [5, 6, 7, 8]) + line(1, [0, 0, 0, 0], [1, 1, 1, 1])
    path.write_text(whole + line(50, [1, 2, 3, 5], [5, 6, 7, 9]) + line(60, [1, 2, 3, 4], [1, 1, 1, 1])[:40])
    found = sketches.read(tmp_path)
    assert list(found) == [1, 50]
    assert found[50].weights == ((1.0, 2.0), (3.0, 5.0)), "a step that was trained twice counts as it stands"
    assert sketches.update(found, 1, 50) == found[50].weights
    path.write_text(whole + "{}\n")
    with pytest.raises(UsageError, match="line 3: is not a line of sketches"):
        sketches.read(tmp_path)


def test_what_has_no_direction_has_no_cosine() -> None:
    assert math.isnan(sketches.cosine([0.0, 0.0], [1.0, 0.0]))
    assert math.isnan(sketches.cosine([math.nan, 0.0], [1.0, 0.0]))
    assert sketches.cosine([1.0, 0.0], [-2.0, 0.0]) == -1
    assert sketches.distance([1.0, 0.0], [1.0, 0.0]) == 0
    assert math.isnan(sketches.distance([1.0], [math.inf]))
