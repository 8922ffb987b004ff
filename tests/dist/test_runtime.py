"""The runtime's own wiring, in real runs on gloo ranks: what ranks notice of each other, what `observe` leaves be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stability.errors import EXIT_HALTED
from megatron_stability.ledger.entries import read
from megatron_stability.records import Action
from tests.dist import small_gpt
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron

RUN = ("--train-iters", "4", "--save-interval", "1000", "--stability-checkpoint-manifest", "false")


def apart(context: Context, folder: str, rules: str) -> Any:
    """A run in which the last rank believes from its third step on that something else was decided before."""
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.runtime import Runtime

    done = Runtime.update_done

    def other_history(self: Runtime, update_successful: bool) -> None:
        done(self, update_successful)
        if context.rank == context.world - 1 and self._args.curr_iteration == 1:
            assert self._local is not None
            self._local._history ^= 1

    config = Path(folder) / f"rank{context.rank}.yaml"
    config.write_text(rules)
    Runtime.update_done = other_history  # type: ignore[method-assign]  # of this rank's process, which ends with it
    try:
        small_gpt.train(context, *RUN, "--save", folder, "--stability-config", str(config), "--stability-mode", "act")
    except SystemExit as end:
        return end.code
    finally:
        Runtime.update_done = done  # type: ignore[method-assign]
        handle.uninstall()
    return "ran to its end"


def test_a_run_whose_ranks_went_apart_halts(patched_ranks: Pool, tmp_path: Path) -> None:
    rules = """
checkpoint: {manifest: false}
decide:
  rules:
    - {detector: rank_agreement, tier: system, action: halt}
    - {detector: grad_norm_spike, tier: large, action: skip}
"""
    assert patched_ranks.run(apart, str(tmp_path), rules, world=2, timeout=300) == [EXIT_HALTED] * 2
    view = read(tmp_path / "stability")
    assert [(step.step, step.action) for step in view.steps] == [
        (1, Action.APPLY),
        (2, Action.APPLY),
        (3, Action.HALT),
    ]
    assert view.steps[-1].disagreeing_ranks == (1,)
    (end,) = view.ends
    assert end.code == EXIT_HALTED
    assert "past decisions of rank 1 differ from rank 0's" in end.reason


CLIP = ("--stability-qk-clip-enabled", "true", "--stability-qk-clip-tau", "1e-3")


def weights(context: Context, folder: str, *flags: str) -> Any:
    """The weights after a run, and how often the checkpoints were told that they are about to change."""
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.checkpoint.checkpoints import Checkpoints

    told, will_change = [], Checkpoints.weights_will_change

    def count(self: Checkpoints) -> None:
        told.append(self)
        will_change(self)

    Checkpoints.weights_will_change = count  # type: ignore[method-assign]  # of this rank's process
    try:
        run = small_gpt.train(context, *RUN, "--save", folder, *flags)
    finally:
        Checkpoints.weights_will_change = will_change  # type: ignore[method-assign]
        handle.uninstall()
    return {name: weight for name, (_, weight) in run.weights.items()}, len(told)


def test_in_observe_mode_qk_clip_changes_no_weight(patched_ranks: Pool, tmp_path: Path) -> None:
    def trained(*flags: str) -> list[tuple[dict[str, torch.Tensor], int]]:
        return patched_ranks.run(weights, str(tmp_path / "-".join(["run", *flags[1:2]])), *flags, world=2, timeout=300)

    off, observed, acted = (trained("--stability-mode", mode, *(CLIP if mode != "off" else ())) for mode in MODES)
    for (stock, _), (seen, told), (clipped, told_too) in zip(off, observed, acted, strict=True):
        assert told == told_too == 4, "what a save still looks at is waited for before each update"
        assert all(torch.equal(seen[name], weight) for name, weight in stock.items())
        assert not all(torch.equal(clipped[name], weight) for name, weight in stock.items()), "nothing to clip"


MODES = ("off", "observe", "act")
