"""A checkpoint's parameter groups under a new schedule, and under the checkpoint's own."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.megatron.checkpoint.resume import param_groups

pytestmark = pytest.mark.megatron


def group(max_lr: float, wd_mult: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"max_lr": max_lr, "min_lr": max_lr / 10, "wd_mult": wd_mult, "lr_mult": 1.0, "params": [0]} | more


def rates(groups: list[dict[str, Any]]) -> list[float]:
    return [each["max_lr"] for each in groups]


@pytest.mark.parametrize(("new", "ours", "theirs"), [(True, 1e-4, 1e-4), (False, 1e-3, 1e-3)])
def test_one_side_takes_the_others_rates(new: bool, ours: float, theirs: float) -> None:
    now, saved = [group(1e-4), group(1e-4, wd_mult=0.0)], [group(1e-3, wd_mult=0.0), group(1e-3)]
    param_groups.agree(now, saved, new)
    assert (rates(now), rates(saved)) == ([ours] * 2, [theirs] * 2)
    assert [each["wd_mult"] for each in saved] == [0.0, 1.0]


def test_a_group_with_rates_of_its_own_keeps_them() -> None:
    now, saved = [group(1e-4), group(5e-4)], [group(1e-3), group(5e-4)]
    param_groups.agree(now, saved, new=True)
    assert sorted(rates(saved)) == [1e-4, 5e-4]


def test_an_override_that_a_group_has_no_more_is_forgotten() -> None:
    saved = [group(1e-3, end_wd=0.1)]
    param_groups.agree([group(1e-4)], saved, new=True)
    assert "end_wd" not in saved[0]


def test_groups_that_differ_in_rates_alone_and_all_change_are_refused() -> None:
    with pytest.raises(UsageError, match="2 parameter groups of this run and 2 of the checkpoint"):
        param_groups.agree([group(1e-4), group(2e-4)], [group(1e-3), group(2e-3)], new=True)


class Loads:
    """An optimizer that remembers what it was given."""

    def __init__(self) -> None:
        self.optimizer = Namespace(param_groups=[group(1e-4)])
        self.seen: list[float] = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen += rates(state["optimizer"]["param_groups"])


def test_each_optimizer_of_a_chain_loads_the_schedule_that_the_flags_name() -> None:
    asked = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
    for flags, seen in ((asked, 1e-4), (dict.fromkeys(asked, False), 1e-3)):
        one, other = Loads(), Loads()
        for _ in range(2):  # a rewind within the process loads again
            param_groups.let_the_schedule_change(Namespace(chained_optimizers=[one, other]), Namespace(**flags))
        for each in (one, other):
            each.load_state_dict({"optimizer": {"param_groups": [group(1e-3)]}})
            assert each.seen == [seen]
            assert rates(each.optimizer.param_groups) == [1e-4]
