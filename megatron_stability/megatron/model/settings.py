"""What the `model` settings change in Megatron's arguments, and the pairs that are refused before a model is built."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_stability.config import StabilityConfig, flag
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags import cuda_graphs
from megatron_stability.megatron.access.flags.argument_table import argument, is_set, names_own_spec, query_groups
from megatron_stability.megatron.model import embedding_clip
from megatron_stability.numerics.config import Model
from megatron_stability.numerics.init_std import d_model_std


def name(*path: str) -> str:
    """The flag of a setting, e.g. ("init", "qk") -> --stability-model-init-qk."""
    return flag(("model", *path))


def refuse_what_cannot_work(config: StabilityConfig, args: Namespace) -> None:
    """Raise for a setting that would silently do nothing or something else.

    Raises:
        UsageError: names both flags and the way out.
    """
    model = config.model
    if config.mode == "off":
        for setting in model.active():
            raise UsageError(
                f"{name(setting)} with --stability-mode off: the plugin is off and the model would be stock; use "
                "--stability-mode observe, or drop the setting"
            )
        return
    for setting, other, why in _pairs(config, args):
        raise UsageError(f"{setting} with {other}: {why}")
    if model.embedding_norm_clip is not None:
        embedding_clip.refuse_what_cannot_work(args)


def apply(model: Model, args: Namespace) -> None:
    """Set the arguments through which Megatron itself does a part of the work.

    Args:
        model: the settings, already checked.
        args: Megatron's validated arguments, from which its transformer configuration is made later.
    """
    if model.qk_norm != "none":
        args.qk_layernorm = True  # Megatron builds the spec's norms, and sums their gradients over TP, only then
    if model.init.embedding == "d_model":
        args.embedding_init_method_std = d_model_std(args.hidden_size)


def _pairs(config: StabilityConfig, args: Namespace) -> Iterator[tuple[str, str, str]]:
    """(a setting of ours, what it can't be with, why and what to do)."""
    model = config.model
    if model.needs_spec:
        yield from _of_the_spec(config, args)
    if model.changes_loss:
        yield from _of_the_loss(name("z_loss" if model.z_loss > 0 else "final_softcap"), args)
    if model.qk_norm == "none" and model.qk_norm_scale != 1.0:
        yield name("qk_norm_scale"), f"{name('qk_norm')} none", "there is no norm to scale; choose one"
    if model.init.embedding == "d_model" and is_set(args, "use_mup"):
        yield name("init", "embedding"), "--use-mup", "µP keeps the embedding's deviation at its base width's"
    if model.init.embedding == "d_model" and args.embedding_init_method_std is not None:
        yield name("init", "embedding"), "--embedding-init-method-std", "both set the same deviation; keep one"


def _of_the_loss(setting: str, args: Namespace) -> Iterator[tuple[str, str, str]]:
    if is_set(args, "cross_entropy_loss_fusion"):
        why = "the fused loss of this plugin takes its place; drop the flag"
        yield setting, "--cross-entropy-loss-fusion", why
    if is_set(args, "fp16_lm_cross_entropy"):
        yield setting, "--fp16-lm-cross-entropy", "the loss is computed in fp32; drop the flag"
    if cuda_graphs.whole_step(args):
        why = "a replayed step would not add to log-Z; capture layers only"
        yield setting, "--cuda-graph-impl full_iteration", why


def _of_the_spec(config: StabilityConfig, args: Namespace) -> Iterator[tuple[str, str, str]]:
    model = config.model
    setting = next(
        name(*path)
        for path, set_ in (
            (("qk_norm",), model.qk_norm != "none"),
            (("attention_softcap",), model.attention_softcap is not None),
            (("init", "qk"), model.init.qk != "megatron"),
        )
        if set_
    )
    if not names_own_spec(args):
        other = f"--spec {' '.join(args.spec)}" if args.spec else "no --spec"
        yield setting, other, "the setting acts through the layer spec; add --spec megatron_stability"
    if is_set(args, "multi_latent_attention"):
        yield setting, "--multi-latent-attention", "MLA normalises and initialises its own latent projections"
    if argument(args, "experimental_attention_variant") is not None:
        yield setting, "--experimental-attention-variant", "that attention does not come from this layer spec"
    if args.mtp_num_layers and not is_set(args, "stability_own_model"):
        yield (
            setting,
            "--mtp-num-layers",
            "this script builds MTP layers from the stock spec; use `megatron-stability pretrain`",
        )
    if model.qk_norm != "none":
        yield from _of_qk_norm(config, args)
    if model.attention_softcap is not None:
        yield from _of_attention_softcap(config, args)
    groups, tp = query_groups(args), args.tensor_model_parallel_size
    if args.num_attention_heads % tp:
        why = f"{args.num_attention_heads} attention heads can't be shared out evenly; use a size that divides them"
        yield setting, f"--tensor-model-parallel-size {tp}", why
    if model.init.qk != "megatron":
        if is_set(args, "use_mup"):
            yield name("init", "qk"), "--use-mup", "µP sets these rows' deviation itself; keep one"
        if groups % tp:
            yield _groups(name("init", "qk"), tp, groups)


def _groups(setting: str, tp: int, groups: int) -> tuple[str, str, str]:
    why = f"{groups} query groups can't be shared out evenly; use a tensor-parallel size that divides them"
    return setting, f"--tensor-model-parallel-size {tp}", why


def _of_qk_norm(config: StabilityConfig, args: Namespace) -> Iterator[tuple[str, str, str]]:
    model = config.model
    setting = f"{name('qk_norm')} {model.qk_norm}"
    if is_set(args, "qk_l2_norm"):
        yield setting, "--qk-l2-norm", "two norms for the same queries and keys; keep one (ours is rms_no_gain)"
    if model.qk_norm == "rms_no_gain" and config.qk_clip.enabled:
        yield setting, flag(("qk_clip", "enabled")), "that norm has no gain, so there is nothing to clip; turn it off"
    groups, tp = query_groups(args), args.tensor_model_parallel_size
    if model.qk_norm == "rmsnorm_whole" and groups % tp:
        yield _groups(setting, tp, groups)


def _of_attention_softcap(config: StabilityConfig, args: Namespace) -> Iterator[tuple[str, str, str]]:
    model = config.model
    setting, kernel = name("attention_softcap"), f"{name('attention_softcap_kernel')} {model.attention_softcap_kernel}"
    engine = args.transformer_impl == "transformer_engine"
    if model.attention_softcap_kernel == "dense" and engine:
        yield kernel, "--transformer-impl transformer_engine", "the dense kernel is the local spec's; use flex or auto"
    measured = config.qk_clip.enabled or config.observe.attention.enabled
    if measured and config.qk_clip.measure == "forward" and engine and model.attention_softcap_kernel == "auto":
        why = "Transformer Engine gives the largest logit after the cap, which hides its growth; use measure probe"
        yield kernel, f"{flag(('qk_clip', 'measure'))} forward", why
    if model.attention_softcap_kernel == "flex":
        yield from _of_flex(kernel, config, args)
    if args.transformer_impl not in ("local", "transformer_engine"):
        yield setting, f"--transformer-impl {args.transformer_impl}", "its attention has no softcap"


def _of_flex(kernel: str, config: StabilityConfig, args: Namespace) -> Iterator[tuple[str, str, str]]:
    if args.attention_dropout > 0:
        yield kernel, "--attention-dropout above 0", "FlexAttention has no dropout; use 0 or the kernel `dense`"
    if args.context_parallel_size > 1:
        yield kernel, "--context-parallel-size above 1", "FlexAttention sees one rank's keys; use auto"
    if argument(args, "softmax_type") != "vanilla":
        why = "FlexAttention has no softmax offset; use the kernel `dense`"
        yield kernel, f"--softmax-type {args.softmax_type}", why
    if is_set(args, "create_attention_mask_in_dataloader"):
        why = "FlexAttention makes its own mask; add --no-create-attention-mask-in-dataloader or use the kernel `dense`"
        yield kernel, "an attention mask from the data loader", why
    packed = ("sft", "hybrid_context_parallel", "dynamic_context_parallel")
    if (name_ := next((each for each in packed if is_set(args, each)), None)) is not None:
        yield kernel, f"--{name_.replace('_', '-')}", "FlexAttention takes no packed sequences; use the kernel `dense`"
    if argument(args, "distributed_backend") == "gloo":
        yield kernel, "--distributed-backend gloo", "FlexAttention has no backward on a CPU; use the kernel `dense`"
    measured = config.qk_clip.enabled or config.observe.attention.enabled
    if measured and config.qk_clip.measure == "forward":
        why = "FlexAttention shows no logits; use measure probe"
        yield kernel, f"{flag(('qk_clip', 'measure'))} forward", why
