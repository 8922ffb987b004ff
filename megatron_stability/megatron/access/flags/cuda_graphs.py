"""Whether a run captures CUDA graphs, whose replay runs no Python: no hook, no counter. Needs no Megatron import."""

from __future__ import annotations

from argparse import Namespace

from megatron_stability.megatron.access.flags.argument_table import argument, is_set

_OLDER = ("enable_cuda_graph", "external_cuda_graph")  # Megatron turns them into the newer name; Bridge does so later


def flag(args: Namespace) -> str | None:
    """The flag by which graphs are captured, as it was given, e.g. "--cuda-graph-impl local"; None where none are.

    Args:
        args: Megatron's, or what stands in for them.
    """
    impl = argument(args, "cuda_graph_impl") or "none"
    if impl != "none":
        return f"--cuda-graph-impl {impl}"
    older = next((name for name in _OLDER if is_set(args, name)), None)
    return None if older is None else f"--{older.replace('_', '-')}"


def whole_step(args: Namespace) -> bool:
    """Whether forward and backward of the whole model are one graph, the head's loss too."""
    scopes = [*(argument(args, "cuda_graph_modules") or ()), *(argument(args, "cuda_graph_scope") or ())]
    names = {str(getattr(scope, "name", scope)) for scope in (argument(args, "cuda_graph_impl"), *scopes)}
    return "full_iteration" in names
