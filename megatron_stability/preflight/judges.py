"""How each check is judged: from the plan's settings to an outcome and a sentence with the numbers."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final, NamedTuple

from megatron_stability.preflight.plan import Plan
from megatron_stability.records import Action

GB: Final = 1e9


class Outcome(StrEnum):
    """How a check ended; `skip`: what it looks at is not known or not there."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Found(NamedTuple):
    """What a check found, in a sentence with the numbers."""

    outcome: Outcome
    says: str


def _pass(says: str) -> Found:
    return Found(Outcome.PASS, says)


def _warn(says: str) -> Found:
    return Found(Outcome.WARN, says)


def _fail(says: str) -> Found:
    return Found(Outcome.FAIL, says)


def _skip(says: str) -> Found:
    return Found(Outcome.SKIP, says)


def _either(fine: object, says: str, otherwise: str) -> Found:
    return _pass(says) if fine else _warn(otherwise)


# --- model ------------------------------------------------------------------------------------------------------------


def attention(plan: Plan) -> Found:
    if plan.qk_bounded:
        return _pass(f"{plan.qk_bounded} bounds the attention logits")
    says = "nothing bounds the attention logits"
    return _fail(f"{says}, and the optimizer is {plan['optimizer']}") if plan.muon else _warn(says)


def z_loss(plan: Plan) -> Found:
    model = plan.config.model
    if plan.config.mode != "off" and (model.z_loss or model.final_softcap):
        return _pass(f"z-loss {model.z_loss:g}" if model.z_loss else f"final softcap {model.final_softcap:g}")
    return _warn("no z-loss and no final softcap: the output logits may drift")


def init_std(plan: Plan) -> Found:
    std, h = plan.number("init_method_std"), plan.number("hidden_size")
    if not std or not h:
        return _skip("--init-method-std or --hidden-size is not known")
    usual = math.sqrt(2 / (5 * h))
    says = f"--init-method-std {std:g}; sqrt(2/(5h)) is {usual:.3g} at h = {h:.0f}"
    return _pass(says) if std <= 2.5 * usual or plan["use_mup"] else _warn(says)


def embedding_std(plan: Plan) -> Found:
    if plan.config.model.init.embedding == "d_model" or plan["embedding_init_method_std"] or plan["use_mup"]:
        return _pass("the embedding has an initialisation of its own")
    return _warn(f"the embedding begins at --init-method-std {plan.number('init_method_std'):g}, as all weights")


# --- optimizer --------------------------------------------------------------------------------------------------------


def clip(plan: Plan) -> Found:
    clip = plan.number("clip_grad")
    if not clip:
        return _warn("--clip-grad 0: one gradient can move every weight")
    return _pass(f"--clip-grad {clip:g}") if 0.1 < clip <= 1.0 else _warn(f"--clip-grad {clip:g}; 0.5 to 1.0 is usual")


def beta2(plan: Plan) -> Found:
    beta2 = plan.number("adam_beta2")
    if plan["optimizer"] not in (None, "adam"):
        return _skip(f"the optimizer is {plan['optimizer']}")
    if beta2 <= 0.98:
        return _pass(f"--adam-beta2 {beta2:g}")
    return _warn(f"--adam-beta2 {beta2:g}: the second moment lags {1 / (1 - beta2):.0f} steps behind the gradient")


def eps(plan: Plan) -> Found:
    eps, h = plan.number("adam_eps"), plan.number("hidden_size")
    if plan["optimizer"] not in (None, "adam"):
        return _skip(f"the optimizer is {plan['optimizer']}")
    says = f"--adam-eps {eps:g}"
    return (
        _warn(f"{says} is far above a gradient's usual size per element")
        if eps > 1e-5 or (h and eps * h > 0.1)
        else _pass(says)
    )


def weight_decay(plan: Plan) -> Found:
    decay = plan.number("weight_decay")
    if not decay:
        return _warn("--weight-decay 0: weights, and with them logits, grow without end")
    return _pass(f"--weight-decay {decay:g}") if decay <= 0.3 else _warn(f"--weight-decay {decay:g}; 0.1 is usual")


def warmup(plan: Plan) -> Found:
    if not plan.steps:
        return _skip("the number of steps is not known")
    steps, share = plan.warmup_steps, plan.warmup_steps / plan.steps
    says = f"warm-up of {steps:.0f} steps, {share:.1%} of {plan.steps:.0f}"
    if not steps:
        return _warn("no warm-up: the first steps run at the full learning rate")
    return (
        _pass(says)
        if share >= 0.01 or steps >= 1000
        else _warn(f"{says}; at least 1 %, or 1000 to 4000 steps, is usual")
    )


def warmup_memory(plan: Plan) -> Found:
    beta2, steps = plan.number("adam_beta2"), plan.warmup_steps
    if not steps or not 0 < beta2 < 1:
        return _skip("no warm-up, or no second moment")
    memory = 2 / (1 - beta2)
    says = f"warm-up of {steps:.0f} steps against 2/(1-β2) = {memory:.0f}"
    return _pass(says) if steps >= memory else _warn(says)


def schedule(plan: Plan) -> Found:
    style = str(plan["lr_decay_style"])
    return (
        _warn("--lr-decay-style constant: the rate never comes down")
        if style == "constant"
        else _pass(f"decay {style}")
    )


def width(plan: Plan) -> Found:
    lr, h = plan.number("lr"), plan.number("hidden_size")
    if not lr or not h:
        return _skip("--lr or --hidden-size is not known")
    if plan["use_mup"]:
        return _pass("--use-mup scales the rate with the width")
    c = lr * math.sqrt(h)
    says = f"--lr x sqrt(h) = {c:.2g}; 6e-3 to 2e-2 is usual"
    return _pass(says) if 2e-3 <= c <= 2e-2 or plan.muon else _warn(says)


# --- precision --------------------------------------------------------------------------------------------------------


def scaling(plan: Plan) -> Found:
    if not plan["fp16"]:
        return _pass("bf16" if plan["bf16"] else "fp32")
    scale = plan["loss_scale"]
    if isinstance(scale, int | float) and scale <= 1:
        return _fail(f"--fp16 with --loss-scale {scale:g}: small gradients become zero")
    return _warn("--fp16: bf16 has the range of fp32 and needs no loss scale")


def sums(plan: Plan) -> Found:
    if not (plan["bf16"] or plan["fp16"]):
        return _pass("gradients are fp32")
    wide = plan["accumulate_allreduce_grads_in_fp32"] or plan["bf16"]  # Megatron turns it on with --bf16
    return _pass("gradients are summed in fp32") if wide else _warn("gradients are summed in 16 bits")


def masters(plan: Plan) -> Found:
    kept = str(plan["main_params_dtype"] or "fp32").removeprefix("torch.")
    fine = not plan["use_precision_aware_optimizer"] or kept in ("fp32", "float32")
    return _pass("master weights are fp32") if fine else _warn(f"--main-params-dtype {kept}: no fp32 master weights")


def fp8_active(plan: Plan) -> Found:
    if not plan["fp8"]:
        return _skip("no FP8")
    if plan["transformer_impl"] == "local" and plan.config.fp8.emulate == "none":
        return _fail("--fp8-format with --transformer-impl local: nothing would run in FP8")
    return _pass(f"FP8 {plan['fp8']}, recipe {plan['fp8_recipe']}")


def fp8_history(plan: Plan) -> Found:
    if not plan["fp8"] or plan["fp8_recipe"] != "delayed":
        return _skip("no delayed scaling")
    history, algorithm = plan.number("fp8_amax_history_len"), plan["fp8_amax_compute_algo"]
    says = f"amax history of {history:.0f}, {algorithm}"
    return (
        _pass(says)
        if history >= 16 and algorithm == "max"
        else _warn(f"{says}: one step without outliers forgets them")
    )


def fp8_ends(plan: Plan) -> Found:
    if not plan.fp8:
        return _skip("no FP8")
    fine = plan["first_last_layers_bf16"]
    return _pass("first and last layers stay in BF16") if fine else _warn("first and last layers run in FP8")


# --- experts ----------------------------------------------------------------------------------------------------------


def router_z(plan: Plan) -> Found:
    if not plan.moe:
        return _skip("no experts")
    z = plan.number("moe_z_loss_coeff")
    return _pass(f"--moe-z-loss-coeff {z:g}") if z else _warn("no z-loss on the router's logits")


def balance(plan: Plan) -> Found:
    if not plan.moe:
        return _skip("no experts")
    kind = plan["moe_router_load_balancing_type"]
    if plan["moe_router_enable_expert_bias"] or (kind != "none" and plan.number("moe_aux_loss_coeff")):
        return _pass("expert bias" if plan["moe_router_enable_expert_bias"] else f"{kind}")
    return _warn("nothing balances the experts: no bias, and an auxiliary loss of weight 0")


# --- data, watching, saving -------------------------------------------------------------------------------------------


def non_finite(plan: Plan) -> Found:
    rules = (rule for rule in plan.config.decide.rules if {"non_finite", "*"} & set(rule.names))
    if plan.acts and plan.config.detect.non_finite.enabled and any(rule.action is not Action.APPLY for rule in rules):
        return _pass("a step with NaN or Inf is withheld")
    if plan["check_for_nan_in_loss_and_grad"]:
        return _warn("a NaN ends the run: Megatron's check is on, the plugin doesn't act")
    return _fail("nothing looks for NaN or Inf: the first one is in every weight a step later")


def divergence(plan: Plan) -> Found:
    if not plan.acts:
        return _warn(f"mode {plan.config.mode}: nothing is done about a divergence")
    acting = {rule.action for rule in plan.config.decide.rules}
    if Action.REWIND in acting:
        return _pass("a lasting divergence rewinds")
    return _warn("a loss that rises and stays is told, and nothing is done")


def batches(plan: Plan) -> Found:
    on = plan.config.observe.batch.enabled and plan.config.mode != "off"
    return _pass("every batch is scored a step ahead") if on else _warn("batches are not looked at before they train")


def held_out(plan: Plan) -> Found:
    if not plan.number("eval_iters") or not plan.number("eval_interval"):
        return _warn("no held-out loss: a fault that the training loss can't show stays unseen")
    several = plan["multiple_validation_sets"]
    says = f"every {plan.number('eval_interval'):.0f} steps"
    return (
        _pass(f"{says}, by set") if several else _warn(f"{says}, of one set: a domain that gets worse is averaged away")
    )


def logging(plan: Plan) -> Found:
    every = plan.number("log_interval")
    if not plan["tensorboard_dir"] and not plan["wandb_project"]:
        return _warn("neither --tensorboard-dir nor --wandb-project: curves are in the log alone")
    return (
        _pass(f"every {every:.0f} steps")
        if every <= 10
        else _warn(f"--log-interval {every:.0f}: a spike of a step is not drawn")
    )


def silent(plan: Plan) -> Found:
    observe = plan.config.observe
    if plan.config.mode == "off":
        return _warn("mode off: no detector looks on")
    off = {
        "attention (--stability-observe-attention-enabled true)": not (
            observe.attention.enabled or plan.config.qk_clip.enabled
        ),
        "layer norms (--stability-observe-norms-layers-every)": not observe.norms.layers_every,
        "replicas (--stability-observe-replicas-weights-every)": not observe.replicas.weights_every,
        "experts (--stability-observe-moe-every)": plan.moe and not observe.moe.every,
    }
    blind = [name for name, is_off in off.items() if is_off]
    return _warn(f"not measured: {'; '.join(blind)}") if blind else _pass("every detector's signals are measured")


def throughput(plan: Plan) -> Found:
    on = plan["log_throughput"]
    return _pass("--log-throughput") if on else _warn("without --log-throughput a slow node shows late")


def saves(plan: Plan) -> Found:
    if not plan["save"]:
        return _warn("no --save: a halt, a kill or a rewind begins at step 0")
    every = plan.number("save_interval")
    if not every:
        return _warn("no --save-interval: only the end is saved")
    return (
        _pass(f"every {every:.0f} steps") if every <= 2000 else _warn(f"every {every:.0f} steps: so many may be lost")
    )


def storage(plan: Plan) -> Found:
    size, free = plan.checkpoint_bytes, plan.free_bytes
    if not plan["save"] or not size or free is None:
        return _skip("no --save, or sizes that are not known")
    says = f"a checkpoint takes about {size / GB:.3g} GB, {free / GB:.3g} GB are free"
    if free < 2 * size:
        return _fail(f"{says}: two don't fit, and the old one goes only after the new one is whole")
    saves = plan.steps / plan.number("save_interval") if plan.number("save_interval") else 1
    kept = plan.config.checkpoint.keep or saves
    return _pass(says) if free >= (kept + 1) * size else _warn(f"{says}: {kept:.0f} are to be kept")


def signals(plan: Plan) -> Found:
    on = plan["exit_signal_handler"]
    return _pass("SIGTERM saves first") if on else _warn("SIGTERM loses what was trained since the last save")


def resume(plan: Plan) -> Found:
    if not plan["save"]:
        return _skip("no --save")
    same = plan["load"] is not None
    return (
        _pass("a requeue goes on from --load")
        if same
        else _warn("no --load: a requeue of this very command begins anew")
    )


def network(plan: Plan) -> Found:
    names = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
    on = any(plan.environment.get(name, "0") not in ("", "0") for name in names)
    return (
        _pass("the flight recorder is on")
        if on
        else _warn("no flight recorder: a hang leaves no trace of its collectives")
    )
