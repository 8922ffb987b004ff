"""A checkpoint's parameter groups under another schedule: Megatron's loader takes the rates for part of a group's name.

It matches the groups of a checkpoint with its own by `param_group_identifier_keys`, among them the peak and the lowest
rate (0.19; 0.18 leaves them out, and then loads the old ones over the new), and knows nothing of
--override-opt_param-scheduler. Here groups are matched without what the scheduler is told to replace, and one of the
two sides takes the other's values before Megatron looks. Source: `core/optimizer/optimizer.py`,
`distrib_optimizer.py`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import wraps
from typing import Any, Final

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags.argument_table import is_set
from megatron_stability.megatron.access.speaks import one_sentence

#: What the scheduler reads from a group before its own value (`OptimizerParamScheduler.get_lr`, `get_wd`).
SCHEDULED: Final = ("max_lr", "min_lr", "start_wd", "end_wd")
Group = dict[str, Any]


def let_the_schedule_change(optimizer: Any, args: Namespace) -> None:
    """Make every load of each optimizer take the schedule that the flags name; without such a flag, nothing.

    Args:
        optimizer: Megatron's, chained or not; a method of the objects is wrapped, once.
        args: Megatron's.
    """
    new = is_set(args, "override_opt_param_scheduler")
    if not new and not is_set(args, "use_checkpoint_opt_param_scheduler"):
        return
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(one, "optimizer", None) is not None and "load_state_dict" not in vars(one):
            _before_its_load(one, new)


def _before_its_load(one: Any, new: bool) -> None:
    load = one.load_state_dict

    @wraps(load)
    def matched(state_dict: dict[str, Any]) -> Any:
        # Also of its own state, by which the distributed optimizer makes its moments: its groups agree with themselves.
        inner = state_dict.get("optimizer", state_dict)
        with one_sentence(0):  # ranks hold different groups, so each says why
            agree(one.optimizer.param_groups, inner["param_groups"], new)
        return load(state_dict)

    one.load_state_dict = matched


def agree(current: Sequence[Group], saved: Sequence[Group], new: bool) -> None:
    """Give each pair of groups one schedule. A group's own rates stay its own: it has them in both runs.

    Args:
        current: the optimizer's groups; changed where the checkpoint's schedule counts.
        saved: the checkpoint's; changed where the new one counts.
        new: whether the run's own schedule counts.

    Raises:
        UsageError: groups that differ in nothing but rates can't be told apart.
    """
    pairs = [(group, _counterpart(group, current, saved)) for group in current]
    for group, counterpart in pairs:
        source, target = (group, counterpart) if new else (counterpart, group)
        for key in SCHEDULED:
            if key in source:
                target[key] = source[key]
            else:
                target.pop(key, None)


def _counterpart(group: Group, current: Sequence[Group], saved: Sequence[Group]) -> Group:
    """The saved group with this one's name, else the only one left that differs in rates alone."""
    names, theirs = {_name(each) for each in current}, {_name(each): each for each in saved}
    if _name(group) in theirs:
        return theirs[_name(group)]
    alike = [each for each in saved if _kind(each) == _kind(group) and _name(each) not in names]
    rivals = [each for each in current if _kind(each) == _kind(group) and _name(each) not in theirs]
    if len(alike) == len(rivals) == 1:
        return alike[0]
    raise UsageError(
        f"--override-opt_param-scheduler: {len(rivals)} parameter groups of this run and {len(alike)} of the "
        "checkpoint differ in learning rates and weight decay alone, so it can't be said which is which; change the "
        "rates of one group at a time, or give --no-load-optim"
    )


def _name(group: Group, without: Sequence[str] = ()) -> tuple[Any, ...]:
    """As Megatron builds it; NeMo writes some of the keys with `pre_` before them."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys if key not in without)


def _kind(group: Group) -> tuple[Any, ...]:
    return _name(group, SCHEDULED)
