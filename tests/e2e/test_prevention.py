"""The `model` settings in real runs of both releases: patches, layer spec, loss, hooks and initialisation together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stability.records import Decision, StepRecord
from tests import effort
from tests.dist.pool import Pool
from tests.e2e import jobs
from tests.e2e.conftest import RELEASES

pytestmark = pytest.mark.megatron

STEPS, CAP, RADIUS, TOKENS = 4, 10.0, 0.9, 127
SETTINGS = {
    "qk-norm": "rmsnorm_whole",
    "attention-softcap": "20",
    "final-softcap": str(CAP),
    "z-loss": "1e-3",
    "embedding-norm-clip": str(RADIUS),
    "init-qk": "d_model",
    "init-embedding": "d_model",
    "init-report": "true",
}
FLAGS = (
    *(*jobs.TP2, "--sequence-parallel", "--group-query-attention", "--num-query-groups", "2", "--mtp-num-layers", "1"),
    *(
        "--untie-embeddings-and-output-weights",
        "--calculate-per-token-loss",
        "--train-iters",
        str(STEPS),
        "--stability-mode",
        "act",
    ),
    *(word for name, value in SETTINGS.items() for word in (f"--stability-model-{name}", value)),
)


class Seen:
    """Probe: each step's loss and signals, the modules built, and the longest embedding row at the end."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime

    def write(self, record: StepRecord, decision: Decision) -> None:
        named = dict(self._runtime.model[0].named_parameters())
        norms = [
            w.detach().float().norm(dim=1).amax() for n, w in named.items() if n.endswith("word_embeddings.weight")
        ]
        gains = {n.split("module.")[-1]: w.numel() for n, w in named.items() if "q_layernorm" in n}
        self.seen.append((record.loss, dict(record.signals), gains, float(torch.stack(norms).amax())))


PLAIN = (
    *("--stability-model-qk-norm", "rmsnorm_whole", "--stability-model-init-qk", "d_model", "--train-iters", "4"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--stability-mode", "act", "--save-interval", "2"),
)


@pytest.mark.parametrize("release", effort.sampled(RELEASES, RELEASES[:1]))
def test_plain_attention_with_a_whole_norm_trains_on_two_tensor_parallel_ranks(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, release: str
) -> None:
    """No --group-query-attention: --num-query-groups stays at the parser's 1. The same weights, whole and in halves."""
    pool, losses = pools[release, "patched"], {}
    for name, layout, world in (("whole", (), 1), ("halves", jobs.TP2, 2)):
        where = ("--save", str(tmp_path / name), "--stability-record-dir", str(tmp_path / name / "stability"))
        load = ("--load", str(tmp_path / "whole"), "--ckpt-step", "2") if name == "halves" else ()
        results = pool.run(jobs.train, (*PLAIN, *layout, *where, *load), Seen(), world=world, timeout=240)
        assert [code for code, _ in results] == [0] * world
        losses[name] = [loss for loss, *_ in results[0][1]]
        for _, seen in results:
            assert all(list(gains.values()) == [64] * 2 for _, _, gains, _ in seen), "whole on every rank"
    assert len(losses["whole"]) == 4
    assert losses["halves"] == pytest.approx(losses["whole"][2:], rel=1e-4)


@pytest.mark.parametrize("release", effort.sampled(RELEASES, RELEASES[:1]))
def test_settings_act_in_a_run(pools: dict[tuple[str, str], Pool], tmp_path: Path, release: str) -> None:
    flags = (*FLAGS, "--stability-record-dir", str(tmp_path))
    (code, steps), (other_code, other_steps) = pools[release, "patched"].run(
        jobs.train, flags, Seen(), world=2, timeout=240
    )
    assert (code, other_code) == (0, 0)
    assert [(loss, signals) for loss, signals, *_ in steps] == [(loss, signals) for loss, signals, *_ in other_steps]
    assert len(steps) == STEPS
    for loss, signals, gains, longest in steps:
        assert list(gains.values()) == [64] * 3, "of two layers and the MTP layer, whole on every rank"
        assert abs(loss - math.log(TOKENS)) < 1.0
        mean = signals["log_z/sum"] / signals["log_z/weight"]
        assert math.log(TOKENS) - 0.1 < mean <= signals["log_z/max"] < CAP + math.log(TOKENS)
        assert signals["log_z/square_sum"] / signals["log_z/weight"] >= mean**2 * (1 - 1e-6)
        assert longest <= RADIUS * (1 + 2**-7)
    assert steps[0][1]["embedding/rows_clipped"] == 0, "the clip comes after a step's record"
    assert steps[1][1]["embedding/rows_clipped"] > 10
