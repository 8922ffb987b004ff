"""What of the plugin is active in a run under Bridge, as lines for `--dry-run` and the log."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_stability import detect
from megatron_stability.config import StabilityConfig
from megatron_stability.echo import secret_names
from megatron_stability.megatron.access.flags.argument_table import argument
from megatron_stability.nemo.bridge_args import BridgeArgs


def active(stability: StabilityConfig, args: BridgeArgs) -> Iterator[str]:
    """One line for each part that does something.

    Args:
        stability: the validated tree, mode other than off.
        args: the run's.
    """
    yield f"mode {stability.mode}: {'decisions are carried out' if stability.mode == 'act' else 'decisions are logged'}"
    yield "detectors: " + ", ".join(each.name for each in detect.build(stability.detect))
    yield "policy: " + "; ".join(f"{r.detector} at {r.tier} -> {r.action}" for r in stability.decide.rules)
    model = stability.model
    settings = [f"{name} {value}" for name, value in _model(stability) if value]
    yield "model: " + (", ".join(settings) or "stock")
    if model.changes_loss:
        yield f"loss: final_softcap {model.final_softcap}, z_loss {model.z_loss:g}"
    if stability.qk_clip.enabled:
        yield f"QK-clip: tau {stability.qk_clip.tau:g}, measured by {stability.qk_clip.measure}"
    yield f"FP8: {_fp8(stability, args)}"
    for name in secret_names(args.container.to_dict()):
        yield (
            f"{name} holds a secret: it is left out of what the plugin writes, but Bridge itself writes it into its "
            "log and into run_config.yaml of every checkpoint; give it to its library by an environment variable"
        )
    save = args.container.checkpoint.save
    proven = "with manifest and verification" if stability.checkpoint.manifest else "without a manifest"
    yield (
        f"checkpoints: {proven}, in {save}"
        if save
        else "checkpoints: none is saved, so that nothing can be gone back to"
    )


def _model(stability: StabilityConfig) -> Iterator[tuple[str, object]]:
    model = stability.model
    yield "qk_norm", model.qk_norm if model.qk_norm != "none" else None
    yield "attention_softcap", model.attention_softcap
    yield "init.qk", model.init.qk if model.init.qk != "megatron" else None
    yield "init.embedding", model.init.embedding if model.init.embedding != "megatron" else None
    yield "embedding_norm_clip", model.embedding_norm_clip


def _fp8(stability: StabilityConfig, args: BridgeArgs) -> str:
    if stability.fp8.emulate != "none":
        return f"{stability.fp8.emulate} scaling, emulated: its numerics, not its speed"
    kind = argument(args, "fp8")
    return f"{kind}, {args.fp8_recipe}, by Transformer Engine, whose scales are watched" if kind else "off"
