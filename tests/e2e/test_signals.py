"""Signals of real runs: every one is filled, layer norms and weight norms are right, and replicas are compared."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_stability import cli
from megatron_stability.checkpoints import generations
from megatron_stability.data.prepare import Options
from megatron_stability.ledger import entries, sketches
from megatron_stability.megatron.start.prepare_data import prepare
from megatron_stability.records import Decision, StepRecord
from megatron_stability.signals import SIGNALS
from tests.dist.pool import Pool
from tests.e2e import jobs

pytestmark = pytest.mark.megatron

OFTEN = (
    *("--stability-observe-norms-layers-every", "2", "--stability-observe-norms-params-every", "2"),
    *("--stability-observe-moe-every", "1", "--stability-observe-replicas-weights-every", "2"),
    *("--stability-observe-sketch-every", "2"),
)
EP2 = ("--expert-model-parallel-size", "2")
ELSEWHERE = (  # other tests' runs
    *("attention/", "qk_", "fp8/", "log_z/", "embedding/", "ranks/compute", "held_out/<"),
    *("data/masked", "data/outside_vocabulary"),
)


class Row(NamedTuple):
    """A step on one rank; squared norms by name, with whether tensor parallelism cuts the parameter."""

    signals: dict[str, float]
    disagreeing: tuple[int, ...]
    reason: str
    loss: float
    gradients: dict[str, tuple[bool, float]]
    weights: dict[str, tuple[bool, float]]  # that the step began with


class Norms:
    """Probe: a `Row` a step."""

    def __init__(self) -> None:
        self.seen: list[Row] = []
        self._weights: dict[str, tuple[bool, float]] = {}

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime

    def write(self, record: StepRecord, decision: Decision) -> None:
        from megatron.core import parallel_state

        cut = parallel_state.get_tensor_model_parallel_world_size() > 1  # a layer's weights say so at size 1 too
        grads, weights = {}, {}
        for chunk in self._runtime.model:
            layers = {path: m.layer_number for path, m in chunk.named_modules() if path.endswith(("rs.0", "rs.1"))}
            for name, parameter in chunk.named_parameters():
                path = next((path for path in layers if name.startswith(path + ".")), None)
                key = f"layer{layers[path]}{name.removeprefix(path)}" if path else name
                experts = not getattr(parameter, "allreduce", True)
                sharded = experts or (cut and bool(getattr(parameter, "tensor_model_parallel", False)))
                grads[key] = sharded, float(parameter.main_grad.double().square().sum())
                weights[key] = sharded, float(parameter.detach().double().square().sum())
        row = dict(record.signals), record.disagreeing_ranks, decision.reason, record.loss, grads, self._weights
        self.seen.append(Row(*row))
        self._weights = weights


def _total(ranks: list[dict[str, tuple[bool, float]]], begin: str = "") -> float:
    """Norm over all ranks of a job, each parameter once; data-parallel replicas are alike."""
    names = {name for rank in ranks for name in rank if name.startswith(begin)}
    total = 0.0
    for name in names:
        held = [rank[name] for rank in ranks if name in rank]
        total += sum(square for _, square in held) if held[0][0] else held[0][1]
    return math.sqrt(total)


def _run(pool: Pool, out: Path, world: int, probe: Any, *flags: str) -> list[list[Row]]:
    record = ("--stability-mode", "act", "--stability-record-dir", str(out))
    results = pool.run(jobs.train, (*OFTEN, *record, *flags), probe, world=world, timeout=240)
    assert [code for code, _ in results] == [0] * world
    return [seen for _, seen in results]


@pytest.mark.parametrize(("layout", "world"), [((), 2), ((*jobs.TP2, *jobs.PP2), 4)])
def test_norms_of_layers_and_weights_are_those_of_the_whole_model(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, layout: tuple[str, ...], world: int
) -> None:
    unclipped = ("--clip-grad", "1000", "--untie-embeddings-and-output-weights")  # clipping scales gradients in place
    whole = ("--vocab-size", "128")  # no row that pads, which `embedding_norm` leaves out
    seen = _run(pools["0.19.2", "patched"], tmp_path, world, Norms(), *layout, *unclipped, *whole, "--train-iters", "4")
    for step in (1, 3):  # the second and fourth
        signals = seen[0][step].signals
        layers = [_total([rank[step].gradients for rank in seen], f"layer{n}") for n in (1, 2)]
        assert signals["grad_norm/layer_max"] == pytest.approx(max(layers), rel=1e-5)
        assert signals["grad_norm/layer_median"] == pytest.approx(min(layers), rel=1e-5)
        assert signals["grad_norm/layer_max/at"] == 1 + layers.index(max(layers))
        weights = [rank[step].weights for rank in seen]
        assert signals["param_norm"] == pytest.approx(_total(weights), rel=1e-3)  # ours is of the fp32 masters
        assert signals["embedding_norm"] == pytest.approx(_total(weights, "module.module.embedding"), rel=1e-3)
        assert "param_norm" not in seen[0][step - 1].signals, "norms are measured on every second step only"
        rows = sketches.read(tmp_path)[step + 1]
        for sketch, whole in ((rows.gradients, layers), (rows.weights, [_total(weights, f"layer{n}") for n in (1, 2)])):
            for row, norm in zip(sketch[1:], whole, strict=True):
                assert math.hypot(*row) == pytest.approx(norm, rel=0.3), "lengths are kept within 6 %, one sigma"
    assert list(sketches.read(tmp_path)) == [1, 2, 4]


def test_a_run_fills_every_signal_inside_the_one_collective(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    evaluated = ("--eval-interval", "2", "--eval-iters", "1", "--train-iters", "6")
    seen = _run(pools["0.19.2", "patched"], tmp_path, 2, Norms(), *jobs.MOE, *EP2, *jobs.SHARDED, *evaluated)
    assert [row.signals for row in seen[0]] == [row.signals for row in seen[1]]
    filled = set().union(*(row.signals for row in seen[0]))
    assert {name for name in SIGNALS if not name.startswith(ELSEWHERE)} <= filled
    assert "held_out/validation" in filled
    fourth, fifth = seen[0][3].signals, seen[0][4].signals
    assert "held_out" not in fourth, "a set's loss belongs to the step after its evaluation"
    assert fifth["held_out"] == 1
    assert 3 < fifth["held_out/validation"] < 8
    assert fourth["clip_grad"] == 1.0
    assert 0 < fourth["step_seconds"] < 60
    assert 1 <= fourth["moe/max_load"] <= 4
    assert fourth["moe/dropped"] == 0
    assert fourth["moe/router_z"] > 0
    assert fourth["ranks/weights"] == 0
    assert fourth["ranks/expert_weights"] == 0
    assert 0 <= fourth["data/repeated"] < 1
    assert 0 < fourth["data/entropy"] <= math.log(64)
    assert fourth["param_norm"] == pytest.approx(_total([rank[3].weights for rank in seen]), rel=1e-3)
    rows = sketches.read(tmp_path)[4].weights
    assert math.hypot(*(x for row in rows for x in row)) == pytest.approx(fourth["param_norm"], rel=0.2), "each once"


class Flip(Norms):
    """Flips one bit of one weight on one rank after a step and each that follows, whose update sets it right."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__()
        self._rank, self._flip = rank, step

    def write(self, record: StepRecord, decision: Decision) -> None:
        super().write(record, decision)
        if self._runtime.rank == self._rank and record.step >= self._flip:
            weights = dict(self._runtime.model[0].named_parameters())
            weight = weights["module.module.decoder.layers.0.mlp.linear_fc1.weight"]
            weight.data.view(-1)[:1].view(torch.int16).bitwise_xor_(1 << 6)


def test_a_flipped_bit_of_a_weight_names_its_rank_and_its_save_is_suspect(
    pools: dict[tuple[str, str], Pool], tmp_path: Path
) -> None:
    check = ("--stability-observe-replicas-compute-every", "2", "--stability-mode", "observe")
    save = ("--save", str(tmp_path / "save"), "--save-interval", "9")
    flags = (*check, *save, "--global-batch-size", "8", "--train-iters", "4")
    for rank in _run(pools["0.19.2", "patched"], tmp_path, 4, Flip(rank=2, step=3), *flags):
        assert [row.disagreeing for row in rank] == [(), (), (), (2,)]
        assert "rank 2" in rank[3].reason
        assert "would halt" in rank[3].reason
        assert rank[3].signals["ranks/weights"] == 1
        assert rank[3].signals["ranks/compute"] == 1
    (saved,) = generations.generations(tmp_path / "save")
    assert saved.state == "suspect"
    assert "weights of rank 2 differ from those of rank 0, their replica" in saved.reason
    assert not (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()


OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather", *jobs.SHARDED, "--global-batch-size", "8")


@pytest.mark.parametrize(
    ("layout", "bad", "named"),
    [
        pytest.param(OVERLAPPED, 3, (3,), id="dp4-overlapped", marks=pytest.mark.rare),
        pytest.param(jobs.PP2, 1, (0, 1), id="pp2-dp2"),  # of two replicas that differ both are named
    ],
)
def test_a_rank_that_computes_wrong_but_finite_values_is_named(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, layout: tuple[str, ...], bad: int, named: tuple[int, ...]
) -> None:
    """And the check leaves no trace: the same run without it has the same losses."""
    fault = ("--drill-fault", f"wrong:step=4,rank={bad},param=2,factor=1.01", "--train-iters", "5")
    losses = []
    for every in ("2", "0"):
        check = ("--stability-observe-replicas-compute-every", every, "--stability-mode", "observe")
        seen = _run(pools["0.19.2", "patched"], tmp_path / every, 4, Norms(), *layout, *fault, *check)
        losses.append([row.loss for row in seen[0]])
        if every == "2":
            for rank in seen:
                assert [row.disagreeing for row in rank] == [(), (), (), named, ()]
                assert "fixed micro-batch" in rank[3].reason
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(jobs.PP2, id="pp2", marks=pytest.mark.rare),
        pytest.param(jobs.VPP2, id="vpp2", marks=pytest.mark.rare),
        pytest.param(jobs.SHARDED, id="dp2"),
    ],
)
def test_a_bad_batch_is_skipped_by_its_data_without_compute(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, layout: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """By thresholds from the run's own first batches, with its score in the record of the step before."""
    text = "".join(f"{i * i * 7919} words of {i % 17} kinds; " for i in range(900))
    (tmp_path / "train.txt").write_text(text[:9000] + "na " * 600 + text[9000:], encoding="utf-8")
    prepare([tmp_path / "train.txt"], tmp_path / "train", Options())
    rules = tmp_path / "rules.yaml"
    rules.write_text("decide: {rules: [{detector: bad_batch, tier: medium, action: skip}]}", encoding="utf-8")
    flags = ("--stability-config", str(rules), "--stability-detect-bad-batch-calibration-steps", "10")
    data = ("--data-path", str(tmp_path / "train"), "--vocab-size", "257", "--split", "100,0,0")
    seen = _run(pools["0.19.2", "patched"], tmp_path, 2, Norms(), *layout, *flags, *data, "--train-iters", "60")
    assert [row.reason for row in seen[0]] == [row.reason for row in seen[1]]
    steps = entries.read(tmp_path).steps
    bad = {step.step for step in steps if step.fate == "skipped"}
    assert bad
    assert all("bad_batch" in step.reason for step in steps if step.step in bad)
    for before, step in pairwise(steps):
        if before.tokens and step.tokens:  # both were computed: what was seen coming is what came
            assert before.signals["data/next/repeated"] == step.signals["data/repeated"]
            assert before.signals["data/next/entropy"] == step.signals["data/entropy"]
        elif step.step in bad:  # seen coming, or after one that was, so without a record that could have told
            assert step.tokens == 0 or before.tokens == 0
    assert [step.tokens for step in steps if step.step == min(bad)] == [0], "tokens are counted in a forward only"
    assert [step.first_sample for step in steps] == [4 * i for i in range(60)]
    assert cli.main(["incident", str(tmp_path), str(min(bad)), "--json"]) == 1
    page = json.loads(capsys.readouterr().out)
    assert {each["path"] for each in page["batch"]["documents"]} == {str(tmp_path / "train.txt")}
    assert page["triage"]["hypotheses"][0]["cause"] == "bad_batch"


def test_each_of_several_validation_sets_has_its_loss_in_the_ledger(
    pools: dict[tuple[str, str], Pool], tmp_path: Path
) -> None:
    texts = {
        "train": "what a piece of work is a man, " * 300,
        "prose": "how noble in reason, " * 40,
        "digits": "0123" * 200,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        prepare([tmp_path / f"{name}.txt"], tmp_path / name, Options())
    paths = {name: str(tmp_path / name) for name in texts}
    data = ("--train-data-path", paths["train"], "--valid-data-path", paths["prose"], paths["digits"])
    sets = ("--multiple-validation-sets", "--full-validation", "--validation-set-names", "prose", "digits")
    often = ("--eval-interval", "2", "--train-iters", "3", "--vocab-size", "257")
    _run(pools["0.19.2", "patched"], tmp_path, 2, Norms(), *jobs.TP2, *data, *sets, *often)
    steps = entries.read(tmp_path).steps
    assert [step.signals.get("held_out") for step in steps] == [None, None, 2.0]
    losses = [steps[2].signals[f"held_out/{name}"] for name in ("prose", "digits")]
    assert all(2 < loss < 7 for loss in losses)
    assert losses[0] != losses[1]
