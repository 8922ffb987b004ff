"""Megatron-Bridge's loop with the plugin: the outcomes of Megatron's own, checkpoints, rewinds by relaunch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_stability.checkpoints import generations
from megatron_stability.errors import EXIT_HALTED
from megatron_stability.ledger import entries, fates
from megatron_stability.records import Decision, StepRecord
from tests.dist.pool import Pool
from tests.e2e import artifacts, scenarios
from tests.e2e.incidents.test_resume_and_halt import Actions
from tests.nemo import jobs, rewinds

pytestmark = pytest.mark.nemo


def test_the_outcomes_that_every_host_must_have(bridge: Pool, tmp_path: Path) -> None:
    settings = {**jobs.SHARDED, "train.train_iters": scenarios.STEPS}
    results = bridge.run(
        jobs.train, settings, scenarios.stability(tmp_path), scenarios.FAULTS, world=scenarios.WORLD, timeout=120
    )
    assert [code for code, _ in results] == [0] * scenarios.WORLD
    scenarios.assert_outcomes(tmp_path)


def test_a_rewind_by_relaunch_is_a_start_from_that_checkpoint(bridge: Pool, tmp_path: Path) -> None:
    found = rewinds.compare(bridge, jobs.TP2, 2, tmp_path)
    assert found["findings"] == []
    assert found["entries"] > 30
    assert found["generators"] > 0
    assert fates.audit(entries.read(tmp_path / "relaunched" / "stability")) == []
    assert {each.step: each.state for each in generations.generations(tmp_path / "by-hand")} == {6: "complete"}
    written = yaml.safe_load((tmp_path / "by-hand" / "iter_0000006" / "run_config.yaml").read_text())
    assert "megatron_stability" not in yaml.safe_dump({name: written[name] for name in ("model", "checkpoint")})


def test_a_halt_ends_with_its_code_and_keeps_the_last_step_that_stands(bridge: Pool, tmp_path: Path) -> None:
    rule = {"detector": "non_finite", "tier": "non_finite", "action": "halt"}
    settings = {**jobs.PP2, "train.train_iters": 6}
    seen = rewinds.run(bridge, tmp_path, settings, [rule], ("nan-loss:step=4,rank=1",), EXIT_HALTED)
    assert seen == [*((step, "apply") for step in range(1, 4)), (4, "halt")]
    assert {each.step: each.state for each in generations.generations(tmp_path)} == {2: "complete", 3: "suspect"}


class Norms(Actions):
    """Probe: the classes of the model's attention parts, and the recipe's layer spec while it trains."""

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime

    def write(self, record: StepRecord, decision: Decision) -> None:
        (chunk,) = self._runtime.model
        parts = ("q_layernorm", "core_attention", "linear_qkv", "input_layernorm")
        modules = {name.rpartition(".")[2]: type(module).__module__ for name, module in chunk.named_modules()}
        self.seen = [modules[part] for part in parts]


def test_everything_that_prevents_and_measures(bridge: Pool, tmp_path: Path) -> None:
    tree = rewinds.act(
        tmp_path,
        model={"qk_norm": "rmsnorm", "attention_softcap": 30.0, "final_softcap": 20.0, "z_loss": 1e-4},
        qk_clip={"enabled": True, "tau": 1e-3},
        fp8={"emulate": "delayed", "sample_every": 1},
    )
    settings = {"train.train_iters": 3, "validation.eval_iters": 1, "validation.eval_interval": 2}
    ((code, modules),) = bridge.run(jobs.train, settings, tree, (), Norms(), world=1, timeout=120)
    assert code == 0
    assert all(module.startswith("megatron_stability.") for module in modules), modules
    steps = entries.read(tmp_path / "stability").surviving
    signals = ("qk_clip/heads", "attention/max_logit", "fp8/gemms", "held_out/validation", "data/entropy")
    assert [name for name in signals if name not in steps[-1].signals] == []
    assert steps[0].signals["qk_clip/heads"] == 8  # all of both layers, and down to tau
    assert steps[1].signals["attention/max_logit"] < 0.1 < steps[0].signals["attention/max_logit"]


def test_observing_changes_nothing(bridge: Pool, tmp_path: Path) -> None:
    """Nor do the seams: the first run has no runtime."""
    settings = {**jobs.TP2, "train.train_iters": 3}
    losses = []
    for name, tree in (("stock", None), ("observed", rewinds.act(tmp_path, mode="observe"))):
        where = {"logger.tensorboard_dir": str(tmp_path / name), "logger.tensorboard_log_interval": 1}
        bridge.run(jobs.train, settings | where, tree, world=2, timeout=120)
        scalars = artifacts.scalars(tmp_path / name)
        losses.append({tag: scalars[tag] for tag in ("lm loss", "grad-norm")})
    assert losses[0] == losses[1]
    assert len(losses[0]["lm loss"]) == 3
    assert "stability/step/grad_norm" in scalars


def test_what_would_be_silent_or_wrong_is_refused(bridge: Pool, tmp_path: Path) -> None:
    clip = {"qk_clip": {"enabled": True}}
    cases: list[Any] = [
        ({"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"}, {}, "would train in BF16"),
        ({"model.qk_clip": True}, clip, "model.qk_clip"),
        ({"mixed_precision": "fp16_mixed"}, {}, "mixed_precision.fp16 with stability.mode act"),
        ({"checkpoint.most_recent_k": 2}, {}, "stability.checkpoint.keep"),
        ({"checkpoint.async_save": True}, {}, "checkpoint.async_save on the CPU backend"),
        ({"checkpoint.non_persistent_ckpt_type": "global"}, {}, "checkpoint.non_persistent_ckpt_type global"),
        ({"model.cuda_graph_impl": "transformer_engine"}, clip, "qk_clip.enabled with model.cuda_graph_impl"),
        ({"model.enable_cuda_graph": True}, clip, "qk_clip.enabled with model.enable_cuda_graph"),
        ({"dist.use_torch_fsdp2": True}, {}, "dist.use_torch_fsdp2 with stability.mode act"),
        ({"ddp.use_megatron_fsdp": True}, {}, "use_megatron_fsdp with stability.mode act"),
        ({}, {"decide": {"snapshot_steps": 4}}, "no rewind within the process"),
        ({}, {"decide": {"rules": [rewinds.RULE]}}, "give checkpoint.save and checkpoint.save_interval"),
        ({}, {}, ""),
    ]
    (said,) = bridge.run(jobs.refusals, [(settings, tree) for settings, tree, _ in cases], world=1)
    assert [(text, wanted) for text, (_, _, wanted) in zip(said, cases, strict=True) if wanted not in text] == []
    assert [bool(text) for text in said] == [bool(wanted) for _, _, wanted in cases]


def test_a_missing_checkpoint_and_a_partial_one_are_not_trained_from(bridge: Pool, tmp_path: Path) -> None:
    """Bridge would start from random weights, and load what fits with a line in the log."""
    ((code, seen),) = bridge.run(
        jobs.train, {"checkpoint.load": str(tmp_path / "none")}, rewinds.act(tmp_path), (), Actions(), world=1
    )
    assert (code, seen) == (2, [])
    assert bridge.run(jobs.partial_load, rewinds.act(tmp_path), world=1) == [["code 2", "loaded"]]


def test_a_rollback_by_hand_stands(bridge: Pool, tmp_path: Path) -> None:
    """Megatron-Bridge#5260, #5964: back to step 3, a window left out; a requeue goes on from there, not from 6."""

    def start(settings: dict[str, Any], **decide: Any) -> list[tuple[int, str]]:
        fixed = {"train.train_iters": 8, "checkpoint.save": str(tmp_path), "checkpoint.save_interval": 3}
        tree = rewinds.act(tmp_path, **({"decide": decide} if decide else {}))
        ((code, seen),) = bridge.run(jobs.train, fixed | settings, tree, (), Actions(), world=1, timeout=120)
        assert code == 0
        return [row[:2] for row in seen]

    def states() -> dict[str, str]:
        return {each.folder.name: each.state for each in generations.generations(tmp_path)}

    load = {"checkpoint.load": str(tmp_path)}
    assert start({"train.exit_interval": 6}) == [(step, "apply") for step in range(1, 7)]
    back = load | {"checkpoint.ckpt_step": 3, "train.exit_interval": 4}
    assert start(back, skip_samples=[[12, 16]]) == [(4, "skip")]
    assert states() == {"iter_0000003": "complete", "iter_0000004": "complete", "iter_0000006": "suspect"}
    assert generations.read_tracker(tmp_path) == 4
    assert start(load | {"train.exit_interval": 5}) == [(5, "apply")]
    assert states()["iter_0000006"] == "suspect"
    assert start(load | {"checkpoint.ckpt_step": 6, "train.exit_interval": 7}) == [(7, "apply")]
    assert generations.candidates(tmp_path)[0].step == 7
    assert states()["iter_0000005"] == "suspect"


class Poison(Actions):
    """Probe: a weight is NaN after step 2."""

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime

    def write(self, record: StepRecord, decision: Decision) -> None:
        super().write(record, decision)
        if record.step == 2:
            next(self._runtime.model[0].parameters()).data.view(-1)[0] = math.nan


def test_weights_are_looked_at_when_they_are_saved(bridge: Pool, tmp_path: Path) -> None:
    """Bridge saves what it has, also where its rerun machine ends the run with code 16."""
    settings = {"train.train_iters": 3, "checkpoint.save": str(tmp_path), "checkpoint.save_interval": 2}
    ((code, seen),) = bridge.run(jobs.train, settings, rewinds.act(tmp_path), (), Poison(), world=1)
    assert (code, [row[:2] for row in seen]) == (0, [(1, "apply"), (2, "apply"), (3, "skip")])
    assert {each.step: each.state for each in generations.generations(tmp_path)} == {2: "suspect", 3: "suspect"}
