"""One rank of a run from a NeMo YAML recipe, on Megatron-Bridge's own `pretrain`.

    torchrun --nproc-per-node 8 -m megatron_stability.nemo.pretrain --config-file recipe.yaml key=value ...

Bridge's grammar and section names; precedence: command line > YAML > recipe function. Two things are added: a `recipe`
key and a `stability` section (`recipe_file`). What is unusable ends every rank with exit code 2, before any of them
meets another. Saving a checkpoint spawns processes that import `__main__` again, hence the late imports.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from megatron_stability.config import StabilityConfig
from megatron_stability.echo import masked, said
from megatron_stability.errors import EXIT_FINE, UsageError
from megatron_stability.megatron.access.speaks import speaks
from megatron_stability.megatron.start.parser import OneSentenceParser


@dataclass(frozen=True)
class Built:
    """A merged recipe.

    Attributes:
        container: Bridge's `ConfigContainer`.
        stability: our tree.
        notes: what the CPU backend changed.
    """

    container: Any
    stability: StabilityConfig
    notes: list[str]


@dataclass(frozen=True)
class Job:
    """A recipe and its overrides, as every rank reads them."""

    file: Path | None
    words: tuple[str, ...]
    scale_down: bool = False
    cpu: bool = False
    drill_fault: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Make this process ready to import Megatron and Bridge, then import them."""
        from megatron_stability.nemo import te_stand_in
        from megatron_stability.nemo.recipe import hub, recipe_file, source

        if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
            raise UsageError(
                "Megatron-Bridge is not installed: pip install --no-deps megatron-bridge==0.6.2 "
                "nvidia-resiliency-ext==0.6.0 (docs/nemo.md)"
            )
        wanted = recipe_file.read(self.file, self.words, self.scale_down)
        mode = wanted.stability.mode
        why = hub.offline_if_unreachable() if source.asks_hub(wanted.recipe) else None
        if why and os.environ.get("RANK", "0") == "0":
            print(
                f"megatron-stability nemo: {why}; models and tokenizers come from this machine's cache", file=sys.stderr
            )
        te_stand_in.install()
        if mode != "off":  # stock is stock: without the plugin, not even the seams are opened
            from megatron_stability.nemo import opening

            opening.install()
        if self.cpu:
            from megatron_stability.megatron import cpu

            cpu.install()
        import megatron.bridge.recipes  # noqa: F401  # paid once, before a launcher forks

    def build(self) -> Built:
        """The merged recipe, judged by Bridge's own validation; starts no process group.

        Raises:
            UsageError: an override, or what it makes of the recipe, is unusable.
        """
        from megatron.bridge.training.config import runtime_config_update

        from megatron_stability.nemo import host
        from megatron_stability.nemo.recipe import merge, recipe_file, values

        wanted = recipe_file.read(self.file, self.words, self.scale_down)
        container, notes = merge.build(wanted, self.cpu)
        merge.refuse_no_data(container.dataset)
        values.refuse_late_failures(container, wanted.stability)
        merge.refuse_unlike_dtypes(container)
        host.refuse_inactive(container, wanted.stability)
        try:
            runtime_config_update(copy.deepcopy(container))
        except (AssertionError, ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            said = " ".join(str(error).split()) or frame.line
            raise UsageError(f"Megatron-Bridge refuses this recipe: {said} ({Path(frame.filename).name})") from error
        return Built(container, wanted.stability, notes)

    def attach(self, built: Built) -> Any | None:
        """The plugin around the run that follows, to be closed after it; None with mode off."""
        if built.stability.mode == "off":
            if self.drill_fault:
                raise UsageError("--drill-fault with stability.mode off: nothing would see the fault; use mode observe")
            return None
        from megatron_stability.nemo import host

        return host.attach(built.container, built.stability, self.drill_fault)

    def train(self) -> None:
        """Run to the end of training in this process, which is one rank."""
        from megatron.bridge.training.pretrain import pretrain

        built = self.build()
        if built.notes and os.environ.get("RANK", "0") == "0":
            print(
                f"megatron-stability nemo: the CPU backend sets {'; '.join(built.notes)}", file=sys.stderr, flush=True
            )
        attached = self.attach(built)
        if attached is None:
            from megatron.bridge.training.gpt_step import forward_step

            pretrain(built.container, forward_step)
            return
        try:
            pretrain(built.container, attached.forward_step, callbacks=attached.callbacks)
        finally:
            attached.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that the runner and `megatron-stability nemo` share."""
    parser.add_argument("--scale-down", action="store_true", help="merge the recipe's scale_down section over the rest")
    parser.add_argument("--dry-run", action="store_true", help="print the merged recipe and what will be active")
    parser.add_argument(
        "--drill-fault",
        action="append",
        default=[],
        metavar="KIND:step=N[,rank=R]",
        help="a fault on purpose, as `megatron-stability pretrain` takes it",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides, in Hydra's grammar")


def job_of(options: argparse.Namespace, file: Path | None, unknown: Sequence[str]) -> Job:
    """The job that parsed options describe; words that the parser does not know are judged with the overrides."""
    return Job(file, (*options.words, *unknown), options.scale_down, on_cpu(), tuple(options.drill_fault))


def on_cpu() -> bool:
    """Whether this machine has no CUDA device, so that the CPU backend stands in."""
    import torch

    return not torch.cuda.is_available()


def show(job: Job, world: int, out: TextIO) -> None:
    """Write the merged recipe as YAML, and what will be active as comments; of a prepared process.

    Args:
        job: the recipe.
        world: ranks that the run will have.
        out: where to.
    """
    import yaml
    from megatron.training.config.yaml_utils import safe_yaml_representers

    built = job.build()
    container, stability = built.container, built.stability
    merged = {key: value for key, value in container.to_dict().items() if key != "_target_"}
    with safe_yaml_representers():
        shown = masked(merged | {"stability": stability.model_dump(mode="json")})
        out.write(yaml.safe_dump(shown, sort_keys=True))
    spec = container.model.transformer_layer_spec
    lines = [
        f"ranks: {world}" + (", CPU backend (a dry run of the numerics: no CUDA kernels, TE, FP8)" if job.cpu else ""),
        *(f"the CPU backend sets {note}" for note in built.notes),
        f"precision: {_precision(container)}",
        f"layer spec of the recipe: {getattr(spec, '__name__', type(spec).__name__)}",
    ]
    attached = job.attach(built)
    if attached is None:
        lines.append("mode off: stock Megatron-Bridge")
    else:
        lines += attached.describe()
        attached.close()
    checks = container.rerun_state_machine.check_for_nan_in_loss, container.ddp.check_for_nan_in_grad
    lines.append(f"NaN checks of Bridge, which end a run: loss {checks[0]}, gradients {checks[1]}")
    out.writelines(f"# {said(line)}\n" for line in lines)


def _precision(container: Any) -> str:
    precision = container.mixed_precision
    if precision is None or precision.fp32:
        return "fp32"
    eight = f", {precision.fp8} FP8 {precision.fp8_recipe}" if precision.fp8 else ""
    return ("bf16" if precision.bf16 else "fp16" if precision.fp16 else "fp32") + eight


def main(argv: Sequence[str] | None = None) -> int:
    """One rank, started by torchrun, or the only one.

    Args:
        argv: the arguments; default: the process's.

    Returns:
        The exit code: 0, or 2 for unusable input.
    """
    rank = os.environ.get("RANK", "0")
    try:
        parser = OneSentenceParser(prog="python -m megatron_stability.nemo.pretrain", allow_abbrev=False)
        parser.add_argument("--config-file", type=Path, metavar="YAML", help="the recipe file")
        add_options(parser)
        options, unknown = parser.parse_known_intermixed_args(argv)
        job = job_of(options, options.config_file, unknown)
        job.prepare()
        if not options.dry_run:
            job.train()
        elif rank == "0":
            show(job, int(os.environ.get("WORLD_SIZE", "1")), sys.stdout)
    except UsageError as error:
        if speaks(rank):
            print(f"megatron-stability nemo: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return EXIT_FINE


if __name__ == "__main__":
    sys.exit(main())
