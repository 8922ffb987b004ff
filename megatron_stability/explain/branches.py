"""The branches of a replay: the same steps from the same checkpoint with one thing changed, and what that would tell.

A branch is flags appended to the run's own command, and flags of it that go; argparse lets the last one win.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_stability.errors import UsageError

DEFAULT: Final = ("replay", "skip", "control")


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One changed factor.

    Attributes:
        says: what is changed, as a clause.
        flags: appended; {first}, {last} are the samples, {lr} and {min_lr} 0.7 of its, {seed} the next.
        drops: flags of the command that go, with their values.
        changes: settings that a resume has to allow, since they differ from the checkpoint's.
        needs: what of the run's settings must be known for it.
        cleared: what it means where the incident is gone.
        kept: what it means where it is still there.
        experiment: it changes what the run learns in a way that is no remedy.
    """

    says: str
    flags: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    cleared: str = ""
    kept: str = ""
    experiment: bool = False


_FP8 = ("--fp8-format", "--fp8-recipe", "--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo")

BRANCHES: Final[Mapping[str, Branch]] = {
    "replay": Branch(says="nothing: the same checkpoint, samples and generators"),
    "skip": Branch(
        says="the incident's samples are passed over",
        flags=("--stability-decide-skip-samples", "[[{first},{last}]]"),
        cleared="the samples are its cause, or its trigger",
        kept="these samples are not its cause",
    ),
    "control": Branch(
        says="other samples in their place: another seed of the data's order",
        flags=("--seed", "{seed}"),
        changes=("seed",),
        needs=("seed",),
        cleared="the weights bear other samples: it needs these",
        kept="other samples meet it too: look at weights, optimizer and numerics",
    ),
    "lr": Branch(
        says="0.7 of the learning rate",
        flags=("--lr", "{lr}", "--min-lr", "{min_lr}", "--override-opt_param-scheduler"),
        changes=("lr", "min_lr"),
        needs=("lr",),
        cleared="the learning rate is too high for where the run is",
        kept="a lower learning rate alone does not help",
    ),
    "bf16": Branch(
        says="no FP8",
        drops=(*_FP8, "--fp8-param-gather", "--stability-fp8-emulate", "--stability-fp8-format"),
        changes=("fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_param"),
        needs=("fp8|fp8.emulate",),
        cleared="FP8 is its cause",
        kept="it is there without FP8 too",
    ),
    "fp32": Branch(
        says="the forward and backward in fp32",
        drops=("--bf16", "--fp16", *_FP8, "--stability-fp8-emulate"),
        changes=("bf16", "fp16", "params_dtype", "fp8", "fp8.emulate"),
        cleared="a precision of 16 bits or fewer is its cause",
        kept="precision is not its cause",
    ),
    "backend": Branch(
        says="another attention kernel",
        flags=("--attention-backend", "unfused"),
        drops=("--use-flash-attn",),
        changes=("attention_backend", "use_flash_attn"),
        cleared="the attention kernel is its cause",
        kept="the attention kernel is not its cause",
    ),
    "moments": Branch(
        says="the optimizer's state is dropped",
        flags=("--no-load-optim",),
        cleared="the moments carry it",
        kept="the moments do not carry it",
        experiment=True,
    ),
    "loader": Branch(
        says="no loader worker",
        flags=("--num-workers", "0"),
        changes=("num_workers",),
        cleared="the order or content of what loader workers gave is its cause",
        kept="loader workers are not its cause",
    ),
}


def known(names: Sequence[str]) -> dict[str, Branch]:
    """The branches of these names, `replay` first.

    Args:
        names: as given to --branches.

    Raises:
        UsageError: there is no such branch.
    """
    for name in names:
        if name not in BRANCHES:
            raise UsageError(f"--branches {name}: there is no such branch; they are {', '.join(BRANCHES)}")
    return {name: BRANCHES[name] for name in dict.fromkeys(("replay", *names))}


def unfit(branch: Branch, settings: Mapping[str, Any]) -> str:
    """Why a branch can't be run on a run of these settings; empty: it can."""
    for need in branch.needs:
        if not any(settings.get(name) not in (None, False, "none") for name in need.split("|")):
            return f"the ledger says no {need.replace('|', ' or ')} of the run"
    return ""


def flags(branch: Branch, settings: Mapping[str, Any], samples: tuple[int, int]) -> list[str]:
    """The branch's flags with the run's own numbers.

    Args:
        branch: one that fits.
        settings: of the run's line in the ledger.
        samples: first, and one past the last, of the incident.
    """
    rate, least = (float(settings.get(name) or 0.0) for name in ("lr", "min_lr"))
    named = {
        "{first}": str(samples[0]),
        "{last}": str(samples[1]),
        "{lr}": repr(0.7 * rate),
        "{min_lr}": repr(0.7 * least),
        "{seed}": str(int(settings.get("seed") or 0) + 1),
    }
    filled = []
    for flag in branch.flags:
        for name, value in named.items():
            flag = flag.replace(name, value)
        filled.append(flag)
    return filled


def values(command: Sequence[str], flag: str) -> list[str]:
    """What a command line gives to a flag, in both spellings; the last one counts for argparse."""
    found = [word.partition("=")[2] for word in command if word.startswith(f"{flag}=")]
    return found + [value for word, value in itertools.pairwise(command) if word == flag]


def without(command: Sequence[str], drops: Sequence[str]) -> list[str]:
    """A command line without some flags and their values, in both spellings (`--flag value`, `--flag=value`)."""
    kept: list[str] = []
    dropping = False
    for word in command:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in drops
        if not dropping:
            kept.append(word)
    return kept
