"""FP8 flags that would silently do nothing or something else; needs no Megatron import."""

from __future__ import annotations

from argparse import Namespace

from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags import cuda_graphs
from megatron_stability.megatron.access.flags.argument_table import argument, is_set, names_own_spec
from megatron_stability.numerics.fp8.config import Fp8

_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def refuse_inactive_fp8(fp8: Fp8, mode: str, args: Namespace) -> None:
    """Raise for FP8 flags that would silently train in BF16, or that emulation can't honour.

    Raises:
        UsageError: names the flag and the way out.
    """
    asked = argument(args, "fp8")
    if asked and args.transformer_impl == "local":
        raise UsageError(
            f"--fp8-format {asked} with --transformer-impl local would train in BF16: FP8 needs Transformer Engine "
            "(--transformer-impl transformer_engine), or give --stability-fp8-emulate for a dry run of its numerics"
        )
    _refuse_for_transformer_engine(fp8, mode, args)
    if fp8.emulate == "none":
        return
    name = f"--stability-fp8-emulate {fp8.emulate}"
    graphs = cuda_graphs.flag(args)
    pairs = (
        (mode == "off", "--stability-mode off", "the plugin is off; use observe or act"),
        (graphs is not None, str(graphs), "a replayed graph keeps no amax history; drop the flag"),
        (args.transformer_impl != "local", "--transformer-impl", "emulation replaces the linears of the local spec"),
        (not names_own_spec(args), "no --spec", "add --spec megatron_stability"),
        (bool(args.moe_grouped_gemm), "--moe-grouped-gemm", "experts must be linears of their own; drop the flag"),
        (bool(args.recompute_granularity), "--recompute-granularity", "a second forward would count amax twice"),
    )
    for wrong, other, why in pairs:
        if wrong:
            raise UsageError(f"{name} with {other}: {why}")


def active_transformer_engine(args: Namespace) -> bool:
    """Whether Megatron runs FP8 through Transformer Engine."""
    return bool(argument(args, "fp8")) and args.transformer_impl == "transformer_engine"


def _refuse_for_transformer_engine(fp8: Fp8, mode: str, args: Namespace) -> None:
    if not fp8.inspect:
        return
    name, graphs = "--stability-fp8-inspect true", cuda_graphs.flag(args)
    pairs = (
        (not active_transformer_engine(args), "no FP8 of Transformer Engine", "give --fp8-format, or turn it off"),
        (mode == "off", "--stability-mode off", "the plugin is off; use observe or act"),
        (graphs is not None, str(graphs), "a replayed graph calls no feature"),
        (
            argument(args, "fp8_recipe") not in _RECIPES,
            f"--fp8-recipe {argument(args, 'fp8_recipe')}",
            f"its quantizers are not known here; use one of {', '.join(_RECIPES)}",
        ),
        (is_set(args, "delay_wgrad_compute"), "--delay-wgrad-compute", "TE's debug path can't delay it"),
    )
    for wrong, other, why in pairs:
        if wrong:
            raise UsageError(f"{name} with {other}: {why}")
