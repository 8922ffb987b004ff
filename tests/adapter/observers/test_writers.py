"""What W&B and TensorBoard are told of a rewind and of open episodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_stability.config import Record
from megatron_stability.decide.config import Decide
from megatron_stability.decide.episodes import Episodes
from megatron_stability.decide.policy import TablePolicy
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.observers import losses
from megatron_stability.megatron.writers import MegatronWriters
from megatron_stability.pipeline import Pipeline
from megatron_stability.records import StepRecord, Tier, Verdict
from megatron_stability.report import tags

pytestmark = pytest.mark.megatron


class FakeWandb:
    """The parts of W&B's module that are asked; `reachable` is whether its server is."""

    def __init__(self, reachable: bool) -> None:
        self.errors = SimpleNamespace(Error=ConnectionError)
        self.reachable, self.began, self.finished = reachable, [], []
        self.run: Any = self._run(name="gpt", id="first", project="p", config={"lr": 1e-3})

    def _run(self, **settings: Any) -> SimpleNamespace:
        run = SimpleNamespace(entity="", group="", settings=SimpleNamespace(root_dir="d"), summary={}, id="next")
        vars(run).update(settings)
        run.finish = lambda: self.finished.append(run)
        return run

    def init(self, **settings: Any) -> None:
        if not self.reachable and settings.get("mode") != "offline":
            raise ConnectionError("no route")
        self.began.append(settings)
        self.run = self._run(**settings)


@pytest.mark.parametrize("reachable", [True, False])
def test_each_rewind_begins_a_run_of_the_same_group(reachable: bool) -> None:
    wandb = FakeWandb(reachable)
    first = wandb.run
    host = cast(Host, SimpleNamespace(writers=lambda: (None, wandb)))
    writers = MegatronWriters(host, Episodes([], 50), Record(tensorboard=False))
    writers.rewound(8)
    writers.rewound(4)
    assert first.summary == {"stability/undone_after_step": 8}
    assert wandb.finished[0] is first
    assert [each["group"] for each in wandb.began] == ["gpt", "gpt"]
    assert [each["name"] for each in wandb.began] == [
        "gpt (generation 1, from step 8)",
        "gpt (generation 2, from step 4)",
    ]
    assert wandb.began[0]["config"] == {"lr": 1e-3, "stability_rewound": {"run": "first", "to_step": 8}}
    assert wandb.began[1]["config"]["stability_rewound"] == {"run": "next", "to_step": 4}
    assert [each.get("mode") for each in wandb.began] == [None if reachable else "offline"] * 2


def test_a_line_without_an_applied_step_has_no_loss() -> None:
    sums = {"advanced iterations": 0, "skipped iterations": 2, "nan iterations": 1, "lm loss": torch.zeros(1)}
    losses.leave_out_those_of_no_step(sums)
    assert sums == {"advanced iterations": 0, "skipped iterations": 2, "nan iterations": 1}
    sums = {"advanced iterations": 1, "skipped iterations": 1, "nan iterations": 0, "lm loss": torch.ones(1)}
    losses.leave_out_those_of_no_step(sums)
    assert "lm loss" in sums


class Always:
    """A detector that has something to say of every step."""

    name, requires = "always", ()

    def inspect(self, record: StepRecord) -> Verdict:
        return Verdict(detector="always", tier=Tier.WATCH, step=record.step, value=2.0, threshold=1.0, reason="so")

    def learn(self, record: StepRecord, applied: bool) -> None: ...


def test_what_is_open_is_counted_from_its_first_step_and_after_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    scalars: list[tuple[str, float, int]] = []
    layouts: list[Any] = []
    board = SimpleNamespace(
        add_scalar=lambda *row: scalars.append(row), add_text=lambda *row: None, add_custom_scalars=layouts.append
    )
    host = cast(Host, SimpleNamespace(writers=lambda: (board, None)))
    record = StepRecord(step=7, first_sample=0, samples=1, tokens=8.0, loss=2.0, grad_norm=1.0)
    first, resumed = Episodes([], 50), Episodes([], 50)
    for episodes in (first, resumed):
        writers = MegatronWriters(host, episodes, Record())
        resumed.load_state_dict(first.state_dict())
        pipeline = Pipeline(lambda seen: seen, [Always()], TablePolicy(Decide(), "act"), [writers], episodes)
        pipeline.finish(*pipeline.decide(record))
    assert [row for row in scalars if "open" in row[0]] == [("stability/step/open_episodes", 1.0, 7)] * 2
    assert layouts == [tags.layout()] * 2
    writers.close()
    assert "always opened (watch), incident 7: so" in capsys.readouterr().out
