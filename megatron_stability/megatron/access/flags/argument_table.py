"""What each of Megatron's arguments does to a run: `arguments.tsv`, one row for each name of the supported releases.

    effect   at a resume                      what it is
    model    compared, refused where it differs   the forward or the loss is another function
    update   compared, refused where it differs   gradients, optimizer, schedule or batch
    data     compared, refused where it differs   which samples come, and in which order
    layout   compared, told where it differs      how the same sums are shared out, or which kernel does them
    inert    not compared                     logs, saves, timing, what only a start from nothing reads
    ignored  not compared                     no part of Megatron's GPT pretraining reads it

The two columns of defaults are the parser's. "Set later" marks what a run must give or Megatron fills in itself
(`validate_args`, the scheduler): its value in a checkpoint that does not say can't be had from a default.
"""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, Final

from packaging.version import Version

from megatron_stability import config as tree
from megatron_stability.config import StabilityConfig

FILE: Final = "arguments.tsv"
#: The two names that --spec takes in a stock Megatron; a patched one takes `megatron_stability` alone.
OWN_SPEC: Final = ("megatron_stability.megatron.layer_specs", "stability_layer_spec")


class Effect(StrEnum):
    """What a change of an argument would do to a run that resumes."""

    MODEL = "model"
    UPDATE = "update"
    DATA = "data"
    LAYOUT = "layout"
    INERT = "inert"
    IGNORED = "ignored"


#: What a change of our own settings does, by the longest path that names them; the other sections decide, not compute.
_OWN = {
    ("model",): Effect.MODEL,
    ("model", "attention_softcap_kernel"): Effect.LAYOUT,
    ("model", "embedding_norm_clip"): Effect.UPDATE,
    ("model", "init"): Effect.INERT,
    ("fp8", "emulate"): Effect.MODEL,
    ("fp8", "format"): Effect.MODEL,
    ("fp8", "fp32_scales"): Effect.MODEL,
    ("qk_clip",): Effect.UPDATE,
}
TRAINING: Final = frozenset({Effect.MODEL, Effect.UPDATE, Effect.DATA})


@dataclass(frozen=True, slots=True)
class Argument:
    """One row.

    Attributes:
        name: the attribute of Megatron's namespace.
        flag: as on the command line; empty for what Megatron sets without one.
        effect: as the module says.
        set_later: every run gives it, or Megatron sets it after parsing.
        defaults: the parser's, by release; a release that lacks the argument is not in it.
    """

    name: str
    flag: str
    effect: Effect
    set_later: bool
    defaults: Mapping[str, Any]

    @property
    def newest_default(self) -> Any:
        """That of the newest release which has the argument."""
        return self.defaults[max(self.defaults, key=Version)] if self.defaults else None

    def default(self, release: str) -> Any:
        """The release's default; of one that lacks the argument or is not known, that of the nearest newer one.

        An argument that is new has the older behaviour as its default, save where a release says otherwise.
        """
        known = sorted(self.defaults, key=Version)
        newer = [each for each in known if Version(each) >= Version(release)]
        return self.defaults[newer[0]] if newer else self.newest_default


@cache
def table() -> Mapping[str, Argument]:
    """Every row by name, in the order of the file."""
    head, *lines = (files(__package__) / FILE).read_text(encoding="utf-8").splitlines()
    releases = head.split("\t")[4:]
    rows = {}
    for line in lines:
        name, flag, effect, later, *cells = line.split("\t")
        defaults = {each: json.loads(cell) for each, cell in zip(releases, cells, strict=True) if cell}
        rows[name] = Argument(name, flag, Effect(effect), later == "yes", defaults)
    return rows


#: Names without a row, or which a host that leaves them out does not have at the parser's default.
_ABSENT: Final[Mapping[str, Any]] = {
    "create_attention_mask_in_dataloader": False,
    "cuda_graph_scope": None,
    "dataloader_save": None,
    "dynamic_context_parallel": False,
    "group_query_attention": True,
    "gtp_weight_remat_size": 1,
    "modelopt_enabled": False,
    "stability_own_model": False,
}


def argument(args: Namespace, name: str) -> Any:
    """An argument's value; what a host or release that lacks it does is the default of the table.

    Args:
        args: Megatron's, or what stands in for them.
        name: of the namespace.

    Raises:
        LookupError: the table has no such argument, so that it would be read as absent for ever.
    """
    if name in _ABSENT:
        return getattr(args, name, _ABSENT[name])
    if name not in table():
        raise LookupError(f"{name} is no argument that {FILE} knows")
    return getattr(args, name, table()[name].newest_default)


def is_set(args: Namespace, name: str) -> bool:
    """Whether `argument` is neither False, None, 0 nor empty."""
    return bool(argument(args, name))


def given(args: Namespace, name: str) -> Any:
    """As `argument`, but None where the namespace lacks the argument: for what is written down as it was given."""
    return argument(args, name) if hasattr(args, name) else argument(Namespace(**{name: None}), name)


def query_groups(args: Namespace) -> int:
    """Key and value heads over all ranks: as many as queries, unless --group-query-attention says otherwise.

    Megatron's parser gives --num-query-groups a 1 that counts with that flag only, and the log of the first step writes
    the true number over it. Bridge has no such flag and leaves out what is not grouped.

    Args:
        args: Megatron's, or Bridge's under the same names.
    """
    heads = int(args.num_attention_heads)
    return int(args.num_query_groups or heads) if argument(args, "group_query_attention") else heads


def names_own_spec(args: Namespace) -> bool:
    """Whether --spec is ours, by either of its names.

    Args:
        args: Megatron's.
    """
    return tuple(args.spec or ()) in (("megatron_stability",), OWN_SPEC)


def own_effects() -> dict[str, Effect]:
    """Effect of each of our own settings that a resume looks at, by its dotted name in the tree."""
    found: dict[str, Effect] = {}
    for path, _ in tree.leaves():
        known = [_OWN[path[:size]] for size in range(len(path), 0, -1) if path[:size] in _OWN]
        if known and known[0] is not Effect.INERT:
            found[".".join(path)] = known[0]
    return found


def own_settings(config: StabilityConfig) -> dict[str, Any]:
    """The values of `own_effects`, as JSON primitives."""
    return {name: functools.reduce(getattr, name.split("."), config) for name in own_effects()}
