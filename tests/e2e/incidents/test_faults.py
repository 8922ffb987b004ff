"""NaN, Inf and a spike on any one rank: one decision everywhere, and not a bit of state changes in the withheld step.

One run a layout trains through a list of faults, a clean step after each; a probe on every rank keeps the decision and
compares weights, buffers and optimizer state before and after.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_stability.ledger import bundle
from megatron_stability.records import Action, Decision, StepRecord
from tests import effort
from tests.dist.pool import Pool
from tests.e2e import artifacts, jobs, scenarios

pytestmark = pytest.mark.megatron

# Flags, world size, ranks that compute a loss, model chunks a rank.
LAYOUTS = {
    "tp2": (jobs.TP2, 2, (0, 1), 1),
    "pp2": (jobs.PP2, 2, (1,), 1),
    "dp2-distributed-optimizer": (jobs.SHARDED, 2, (0, 1), 1),
    "tp2-pp2": ((*jobs.TP2, *jobs.PP2), 4, (2, 3), 1),
    "vpp2": (jobs.VPP2, 2, (1,), 2),
}
NO_BUDGET = ("--stability-decide-max-consecutive-skips", "1000", "--stability-decide-max-skips-per-1000-steps", "1000")


class Watch:
    """Probe: per step (step, action, reason, culprit ranks, grad norm is a number, names of what changed)."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._before: dict[str, torch.Tensor] = {}

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime

    def write(self, record: StepRecord, decision: Decision) -> None:
        after = _state(self._runtime.model, self._runtime.optimizer)
        changed = tuple(artifacts.differences(self._before, after))
        self.seen.append((record.step, str(decision.action), decision.reason, record.culprit_ranks, changed))
        self._before = after


def _state(model: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    state = {}
    for i, chunk in enumerate(model):
        state |= {f"model.{i}.{name}": weight.detach().clone() for name, weight in chunk.named_parameters()}
        for path, module in chunk.named_modules():
            held = {f"{i}.{path}.{name}": value for name, value in module._buffers.items() if value is not None}
            state |= {f"buffer.{name}": value.clone() for name, value in held.items()}
    for i, inner in enumerate(_torch_optimizers(optimizer)):
        for g, group in enumerate(inner.param_groups):
            if "step" in group:
                state[f"optimizer.{i}.{g}.step"] = torch.as_tensor(group["step"]).clone()
            for p, master in enumerate(group["params"]):
                name = f"optimizer.{i}.{g}.{p}"
                state[f"{name}.master"] = master.detach().clone()
                moments = {k: v for k, v in inner.state[master].items() if isinstance(v, torch.Tensor)}
                state |= {f"{name}.{key}": value.detach().clone() for key, value in moments.items()}
    return state


def _torch_optimizers(optimizer: Any) -> list[Any]:
    if hasattr(optimizer, "chained_optimizers"):
        return [inner for chained in optimizer.chained_optimizers for inner in _torch_optimizers(chained)]
    return [optimizer.optimizer]


def _faults(world: int, loss_ranks: tuple[int, ...], chunks: int) -> list[str]:
    """Every rank and chunk, NaN and Inf, in the first parameter and in one drawn; every loss, NaN and Inf."""
    draw = random.Random(7)
    gradient = [
        f"{kind},rank={rank},param={param},chunk={chunk}"
        for rank in range(world)
        for chunk in range(chunks)
        for kind in ("nan", "inf")
        for param in (0, draw.randrange(1, 20))
    ]
    return gradient + [f"{kind},rank={rank}" for rank in loss_ranks for kind in ("nan-loss", "inf-loss")]


def _at(step: int, fault: str) -> tuple[str, str]:
    kind, _, rest = fault.partition(",")
    return "--drill-fault", f"{kind}:step={step},{rest}"


def _watched(pool: Pool, flags: tuple[str, ...], world: int) -> list[list[Any]]:
    """What each rank's probe saw; every rank ended well."""
    results = pool.run(jobs.train, flags, Watch(), world=world, timeout=240)
    assert [code for code, _ in results] == [0] * world
    return [seen for _, seen in results]


@pytest.mark.parametrize("layout", effort.sampled(LAYOUTS, ("tp2-pp2", "dp2-distributed-optimizer")))
def test_one_verdict_and_no_trace(pools: dict[tuple[str, str], Pool], tmp_path: Any, layout: str) -> None:
    """Megatron-LLM issue 33 (one NaN element on one rank), metaseq issue 521 (one rank spikes), and Megatron-DeepSpeed
    issue 177 (tensor-parallel ranks hang after a skip): a clean step follows each fault."""
    flags, world, loss_ranks, chunks = LAYOUTS[layout]
    faults = _faults(world, loss_ranks, chunks)
    struck = {2 * (i + 1): fault for i, fault in enumerate(faults)}
    last = 2 * len(faults) + 2
    spike = ("--drill-fault", f"scale:step={last},rank={loss_ranks[-1]},factor=100000")
    seen = _watched(
        pools["0.19.2", "patched"],
        (
            *(*flags, *NO_BUDGET, "--stability-mode", "act", "--stability-record-dir", str(tmp_path)),
            *("--train-iters", str(last + 1), "--stability-detect-grad-norm-spike-warmup-steps", "4"),
            *(word for step, fault in struck.items() for word in _at(step, fault)),
            *spike,
        ),
        world,
    )
    for step, *rows in zip(range(1, last + 2), *seen, strict=True):
        verdicts = {row[:4] for row in rows}
        assert len(verdicts) == 1, f"step {step}: ranks decided {verdicts}"
        if step in struck or step == last:
            assert rows[0][1] == "skip", (step, struck.get(step), rows[0])
            assert [row[4] for row in rows] == [()] * world, (step, struck.get(step))
        else:
            assert rows[0][1] == "apply", (step, rows[0])
            assert all(any(".exp_avg" in name for name in row[4]) for row in rows)
            assert all(any(name.startswith("model.") for name in row[4]) for row in rows)
    assert "grad_norm_spike" in seen[0][-2][2]


def test_the_outcomes_that_every_host_must_have(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    tree = tmp_path / "stability.yaml"
    tree.write_text(yaml.safe_dump(scenarios.stability(tmp_path)))
    faults = (word for fault in scenarios.FAULTS for word in ("--drill-fault", fault))
    flags = (*jobs.SHARDED, "--stability-config", str(tree), "--train-iters", str(scenarios.STEPS), *faults)
    results = pools["0.19.2", "patched"].run(jobs.train, flags, world=scenarios.WORLD, timeout=180)
    assert [code for code, _ in results] == [0] * scenarios.WORLD
    scenarios.assert_outcomes(tmp_path)


def test_expert_bias_and_token_counters_are_put_back(pools: dict[tuple[str, str], Pool], tmp_path: Any) -> None:
    """Megatron moves both before the optimizer is asked."""
    flags = (*jobs.MOE, *jobs.SHARDED, "--stability-mode", "act", "--stability-record-dir", str(tmp_path))
    fault = ("--drill-fault", "nan:step=4,rank=1", "--train-iters", "5")
    seen = _watched(pools["0.19.2", "patched"], (*flags, *fault), 2)
    for rank in seen:
        assert [row[1] for row in rank] == ["apply", "apply", "apply", "skip", "apply"]
        assert rank[3][4] == ()
        assert any("expert_bias" in name for name in rank[2][4])


def test_an_overflow_of_the_loss_scaler_is_seen_alike(pools: dict[tuple[str, str], Pool], tmp_path: Any) -> None:
    """fp16 is for observing only: the scaler withholds the step before the gate, on every rank, and moves its scale.

    slime issue 1762: there some ranks returned undefined values; here each has the same record.
    """
    flags = (*jobs.TP2, "--fp16", "--initial-loss-scale", str(2**40), "--hysteresis", "1", "--train-iters", "3")
    observe = ("--stability-mode", "observe", "--stability-record-dir", str(tmp_path))
    seen = _watched(pools["0.19.2", "patched"], (*flags, *observe), 2)
    assert [row[:4] for row in seen[0]] == [row[:4] for row in seen[1]]
    assert [row[1] for row in seen[0]] == ["skip"] * 3
    # Moments of zero are made before a save that may come first; nothing else changes, and nothing after that.
    assert all(name.endswith(("step", "exp_avg", "exp_avg_sq")) for rank in seen for name in rank[1][4])
    assert all(row[4] == () for rank in seen for row in rank[2:])


class Samples(Watch):
    """Probe: what the data set holds at a skipped step's sample indexes, on rank 0."""

    def write(self, record: StepRecord, decision: Decision) -> None:
        if decision.action is Action.SKIP and torch.distributed.get_rank() == 0:
            dataset = self._runtime.rewinds.data._chunks[0].datasets[0]
            samples = [dataset[i]["tokens"] for i in range(record.first_sample, record.last_sample)]
            self.seen = torch.stack(samples).tolist()


def test_the_bundle_of_a_skip_holds_its_samples_in_order_and_its_generators(
    pools: dict[tuple[str, str], Pool], tmp_path: Any
) -> None:
    flags = (*jobs.SHARDED, "--micro-batch-size", "1", "--stability-mode", "act", "--train-iters", "3")
    fault = ("--drill-fault", "nan:step=3,rank=1", "--stability-record-dir", str(tmp_path))
    results = pools["0.19.2", "patched"].run(jobs.train, (*flags, *fault), Samples(), world=2, timeout=240)
    (path,) = bundle.bundles(tmp_path)
    tensors = bundle.read_tensors(path)
    assert tensors["tokens"].tolist() == results[0][1]
    assert tensors["sample_ids"].tolist() == [8, 9, 10, 11]
    assert {f"rng.{rank}.{name}" for rank in (0, 1) for name in ("torch", "device")} <= set(tensors)
