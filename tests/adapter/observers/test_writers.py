"""What W&B and TensorBoard are told of a rewind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.observers import losses
from megatron_stability.megatron.writers import MegatronWriters

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
    writers = MegatronWriters(host, enabled=False, head_curves=False)
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
