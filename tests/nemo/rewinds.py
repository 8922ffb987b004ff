"""A rewind by relaunch under Megatron-Bridge, against a start by hand from the same checkpoint without the window."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_stability.checkpoints import run_state
from megatron_stability.errors import EXIT_REWIND
from tests.dist.pool import Pool
from tests.e2e import artifacts
from tests.e2e.incidents.test_resume_and_halt import Actions
from tests.nemo import jobs

RULE = {"detector": "non_finite", "tier": "non_finite", "action": "rewind", "generations": 1, "skip_steps": 1}
FAULT = "nan:step=5,rank=1"
DROPOUT = MappingProxyType({"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1})


def act(folder: Path, **more: Any) -> dict[str, Any]:
    """The `stability` section, with the ledger in a folder of the run's."""
    return {"mode": "act", "record": {"dir": str(folder / "stability")}} | more


def run(
    bridge: Pool,
    out: Path,
    settings: Mapping[str, Any],
    rules: list[Any] | None = None,
    faults: tuple[str, ...] = (),
    code: int = 0,
    world: int = 2,
) -> list[Any]:
    """(step, action) of each finished step; every rank ended with `code` and saw the same. Saves every second step."""
    where = {"checkpoint.save": str(out), "checkpoint.save_interval": 2, **settings}
    tree = act(out, **({"decide": {"rules": rules}} if rules else {}))
    results = bridge.run(jobs.train, where, tree, faults, Actions(), world=world, timeout=120)
    assert [answer for answer, _ in results] == [code] * world
    assert all(seen == results[0][1] for _, seen in results)
    return [row[:2] for row in results[0][1]]


def compare(bridge: Pool, layout: Mapping[str, Any], world: int, folder: Path) -> dict[str, Any]:
    """NaN in step 5 of 6, saves at 2 and 4; dropout is on, so that every draw counts.

    Args:
        bridge: ranks.
        layout: settings.
        world: ranks.
        folder: for both runs: `relaunched`, `by-hand`.

    Returns:
        `findings`: names of what differs at step 6, Bridge's entries and ours; `entries` and `generators`: how many
        were compared.
    """
    settings = {**layout, **DROPOUT, "train.train_iters": 6}
    again = [(5, "skip"), (6, "apply")]
    relaunched, by_hand = folder / "relaunched", folder / "by-hand"
    first = run(bridge, relaunched, settings, [RULE], (FAULT,), EXIT_REWIND, world)
    assert first == [*((step, "apply") for step in range(1, 5)), (5, "rewind")]
    state = run_state.read(relaunched / "stability")
    assert state is not None
    assert (state.status, state.exit_code) == ("rewind", EXIT_REWIND)
    load = {"checkpoint.load": str(relaunched)}
    assert run(bridge, relaunched, settings | load, [RULE], (FAULT,), world=world) == again
    hand = load | {"checkpoint.ckpt_step": 4, "train.iterations_to_skip": [5]}
    assert run(bridge, by_hand, settings | hand, world=world) == again
    return differences(bridge, relaunched, by_hand)


def resume(bridge: Pool, layout: Mapping[str, Any], world: int, folder: Path) -> dict[str, Any]:
    """As `compare`: a start from step 4 of an uninterrupted run, against the rest of that run."""
    settings = {**layout, **DROPOUT, "train.train_iters": 6}
    whole, resumed = folder / "whole", folder / "resumed"
    assert run(bridge, whole, settings, world=world) == [(step, "apply") for step in range(1, 7)]
    load = {"checkpoint.load": str(whole), "checkpoint.ckpt_step": 4}
    assert run(bridge, resumed, settings | load, world=world) == [(5, "apply"), (6, "apply")]
    return differences(bridge, whole, resumed)


def differences(bridge: Pool, one: Path, other: Path) -> dict[str, Any]:
    """What differs between two runs at step 6, and how much was compared."""
    states = [artifacts.unpack(bridge.run(jobs.read, each, 6, world=1)[0]) for each in (one, other)]
    return {
        "findings": artifacts.differences(*states),
        "entries": len(states[0]),
        "generators": sum("generators" in name for name in states[0]),
    }
