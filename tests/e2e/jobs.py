"""Real pretraining runs on a pool's forked ranks: four templates, and the one job that they all run.

A template has imported one release of Megatron once, stock or patched in memory; a run is `pretrain.main()` with
`sys.argv`, as under the launcher. A run that must see more (each decision, the state around it, a kill) brings a
`Probe`, which sits in the runtime as one more sink.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from megatron_stability.megatron import cpu
from megatron_stability.records import Decision, StepRecord
from tests.dist import small_gpt
from tests.dist.pool import Context, Pool, import_megatron, torch_only
from tests.e2e import artifacts
from tests.older_megatron import older_release

MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--micro-batch-size", "2", "--global-batch-size", "4", "--seed", "1234"),
    *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine", "--lr-warmup-iters", "2"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--make-vocab-size-divisible-by", "64", "--num-workers", "0"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1", "--save-interval", "1000"),
)
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--moe-router-load-balancing-type", "none", "--moe-ffn-hidden-size", "32"),
)
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
VPP2 = (*PP2, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
SHARDED = ("--use-distributed-optimizer",)  # and DP from what the layout leaves


class Probe(Protocol):
    """A sink on every rank that is told of the runtime first; what it `seen` is the job's result."""

    seen: list[Any]

    def begin(self, runtime: Any) -> None: ...

    def write(self, record: StepRecord, decision: Decision) -> None: ...


def _prepare(release: str | None, patched: bool) -> None:
    torch_only()
    if release is not None:
        sys.path.insert(0, release)
        importlib.invalidate_caches()
    if patched:
        from megatron_stability.megatron.patching import in_memory

        in_memory.install()
    cpu.install()
    importlib.import_module("torch.utils.tensorboard")
    import_megatron()
    _warm()


def _warm() -> None:
    """Once a template, in place of once a rank: the patches' digest, and the sources that Megatron's parser reads."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_stability.megatron.patching import install_digest

    inspect.getsource = cache(inspect.getsource)  # Megatron's parser reads a score of classes' sources, twice a start
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    install_digest.versions()


def stock() -> None:
    """Prepare a template with the environment's Megatron, unpatched."""
    _prepare(None, patched=False)


def patched() -> None:
    """Prepare a template with the environment's Megatron, patched in memory."""
    _prepare(None, patched=True)


def older_stock() -> None:
    """Prepare a template with megatron-core 0.18.2, unpatched."""
    _prepare(older_release(), patched=False)


def older_patched() -> None:
    """Prepare a template with megatron-core 0.18.2, patched in memory."""
    _prepare(older_release(), patched=True)


def command_line(flags: tuple[str, ...]) -> tuple[str, ...]:
    """`flags` after, so winning over, `MODEL` and the CPU backend's; bf16 unless fp16, mock data if no path."""
    model, at = MODEL, MODEL.index("--global-batch-size")
    if "--step-batch-size-schedule" in flags:  # Megatron takes one of the two only
        model = MODEL[:at] + MODEL[at + 2 :]
    if any(flag.endswith(("-data-path", "-data-args-path")) for flag in flags):
        model = tuple(flag for flag in model if flag != "--mock-data")
    return (*model, *cpu.FLAGS, *(() if "--fp16" in flags else ("--bf16",)), *flags)


def train(context: Context, flags: tuple[str, ...], probe: Probe | None = None) -> tuple[int, list[Any]]:
    """Train the small model on this rank.

    Args:
        context: the rank.
        flags: Megatron's and the plugin's.
        probe: what looks on, if anything does.

    Returns:
        The exit code, and what the probe saw.
    """
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.start import pretrain_gpt

    if "--async-save" in flags:
        small_gpt.fork_checkpoint_writer()
    sys.argv = ["megatron-stability pretrain", *command_line(flags)]
    provider = pretrain_gpt.model_provider if probe is None else partial(_probed_model, probe)
    try:
        pretrain_gpt.main(model_provider=provider)
        code = 0
    except SystemExit as ending:
        code = int(ending.code or 0)
    finally:
        handle.uninstall()
    return code, [] if probe is None else probe.seen


def read_checkpoint(pool: Pool, save: Path, step: int) -> dict[str, Any]:
    """A checkpoint's state, read on a rank, since its plain entries hold Megatron's classes."""
    state: dict[str, Any] = artifacts.unpack(pool.run(_read, save, step, world=1, timeout=60)[0])
    return state


def _read(context: Context, save: Path, step: int) -> bytes:
    return artifacts.pack(artifacts.checkpoint(save, step))


def _probed_model(probe: Probe, *args: Any, **kwargs: Any) -> Any:
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.start import pretrain_gpt

    runtime = handle.installed()
    assert runtime is not None, "a probe looks at the runtime: give a mode other than off"
    if probe not in runtime.journal.sinks:  # once, however many model chunks are built
        runtime.journal.sinks.append(probe)
        probe.begin(runtime)
    return pretrain_gpt.model_provider(*args, **kwargs)
