"""What triage knows: causes, and how much each fact speaks for or against each of them. One table, no code.

A weight is a natural log-odds: +1 makes a cause e times as likely against the others. A fact that was not measured
weighs nothing and is named with what would have measured it. The numbers are judgement, kept few and round, and are
scored on incidents that they were not written for (docs/triage.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Class(StrEnum):
    """The four causes that triage tells apart, and none of them."""

    DATA = "data/objective"
    OPTIMIZATION = "optimization"
    NUMERICS = "numerics/model"
    SYSTEMS = "systems"
    NONE = "nothing wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A hypothesis.

    Attributes:
        kind: its class.
        says: what it claims, as a sentence.
        prior: log-odds before any fact.
        next: commands that would confirm or refute it; {run}, {step}, {samples} and {ranks} are filled in.
        gate: what must hold again before the run goes on for good.
        prevents: what keeps it from coming back.
    """

    kind: Class
    says: str
    prior: float
    next: tuple[str, ...] = ()
    gate: str = "the step and the 200 after it: loss, gradient norm and held-out loss in the band of before"
    prevents: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fact, with the causes that it makes likelier or less likely where it holds, and where it does not."""

    fact: str
    holds: Mapping[str, float] = field(default_factory=dict)
    fails: Mapping[str, float] = field(default_factory=dict)


REPLAY: Final = "megatron-stability replay {run} {step} -- COMMAND"
SKIP_BRANCH = "megatron-stability replay {run} {step} --branches replay,skip,control -- COMMAND"

CAUSES: Final[Mapping[str, Cause]] = {
    "bad_batch": Cause(
        kind=Class.DATA,
        says="the batch holds text unlike the rest: repeats, noise, wrong encoding or tokenizer",
        prior=-1.0,
        next=(SKIP_BRANCH,),
        prevents="--stability-decide-skip-samples '[{samples}]'; the shard it came from looked through",
    ),
    "objective": Cause(
        kind=Class.DATA,
        says="labels, masks or ends of documents changed: the loss is of another task",
        prior=-2.0,
        next=("compare loss_mask and labels of the batch with one of before",),
        prevents="a fixed batch whose loss at step 0 is asserted (near ln V) whenever the data code changes",
    ),
    "data_stage": Cause(
        kind=Class.DATA,
        says="the mixture or stage of the data changed: another level, not a fault",
        prior=-2.0,
        next=(SKIP_BRANCH,),
        prevents="--stability-detect-expect-announced {step}:data, so that the next such change is announced",
    ),
    "learning_rate": Cause(
        kind=Class.OPTIMIZATION,
        says="the learning rate is too high here: at its peak, or after a jump",
        prior=-1.0,
        next=("megatron-stability replay {run} {step} --branches replay,skip,lr -- COMMAND",),
        prevents="a longer --lr-warmup-samples/-iters or a lower --lr; no step functions after warm-up",
    ),
    "optimizer_setting": Cause(
        kind=Class.OPTIMIZATION,
        says="an optimizer setting was changed: β2, ε, weight decay or clipping",
        prior=-2.0,
        next=("megatron-stability replay {run} {step} -- COMMAND WITH THE OLD SETTING",),
        prevents="leave it out of --stability-checkpoint-allow-changes",
    ),
    "optimizer_state": Cause(
        kind=Class.OPTIMIZATION,
        says="the moments do not fit the weights: lost, stale, or begun anew at full learning rate",
        prior=-2.5,
        next=("megatron-stability checkpoint verify SAVE", REPLAY),
        prevents="no --no-load-optim without a warm-up of its own",
    ),
    "attention_logits": Cause(
        kind=Class.NUMERICS,
        says="attention logits grew until the softmax was one-hot",
        prior=-2.0,
        next=("--stability-qk-clip-enabled true --stability-qk-clip-tau 30", "a QK-norm: --stability-model-qk-norm"),
        prevents="QK-norm or QK-clip from the start; megatron-stability preflight -- COMMAND names what it lacks",
    ),
    "output_logits": Cause(
        kind=Class.NUMERICS,
        says="output logits drifted: log Z left zero",
        prior=-2.5,
        next=("--stability-model-z-loss 1e-4",),
        prevents="z-loss from the start",
    ),
    "fp8_range": Cause(
        kind=Class.NUMERICS,
        says="an FP8 format's range was left: saturation, underflow or a stale scale",
        prior=-2.0,
        next=("megatron-stability replay {run} {step} --branches replay,bf16 -- COMMAND",),
        prevents="a longer amax history, a margin, or first and last layers in BF16",
    ),
    "overflow": Cause(
        kind=Class.NUMERICS,
        says="a value overflowed on every rank alike",
        prior=-2.0,
        next=(
            "megatron-stability replay {run} {step} --branches replay,control -- COMMAND",
            "--check-for-nan-in-loss-and-grad",
        ),
        prevents="bf16 in place of fp16; z-loss and QK-norm, which bound what overflows",
    ),
    "model_setting": Cause(
        kind=Class.NUMERICS,
        says="the model is another function than before, or unstable from its first steps: a setting or initialisation",
        prior=-2.0,
        next=("megatron-stability doctor", REPLAY),
        prevents="leave it out of --stability-checkpoint-allow-changes",
    ),
    "rank": Cause(
        kind=Class.SYSTEMS,
        says="one rank computes or holds something else than its replicas: a GPU, its memory or a link",
        prior=-2.0,
        next=(
            "exclude the node of rank {ranks} and requeue",
            "dcgmi diag -r 3 on that node; dmesg | grep -i xid; nvidia-smi -q -d ECC",
            "--stability-observe-replicas-compute-every 100",
        ),
        gate="the same samples on another node: the step is clean and replicas agree to the bit",
        prevents="--stability-observe-replicas-weights-every and -compute-every at a cadence that bounds the loss",
    ),
    "storage": Cause(
        kind=Class.SYSTEMS,
        says="storage or network was slow, or returned something else",
        prior=-2.5,
        next=(
            "a start with --stability-checkpoint-strict true: data files are compared with their fingerprints",
            "NCCL_DEBUG=INFO, TORCH_DISTRIBUTED_DEBUG=DETAIL; iostat on the data's host",
        ),
        gate="step time back at its usual level; the data's fingerprint equal to the checkpoint's",
        prevents="a local copy of the data; its fingerprints are compared at each start",
    ),
    "software": Cause(
        kind=Class.SYSTEMS,
        says="other code or libraries since the restart",
        prior=-2.5,
        next=(REPLAY + " in the old container",),
        prevents="a pinned container; megatron-stability doctor --json kept with each run",
    ),
    "none": Cause(kind=Class.NONE, says="nothing but noise", prior=0.0),
}

_DATA = ("bad_batch", "objective", "data_stage")
_OPTIMIZATION = ("learning_rate", "optimizer_setting", "optimizer_state")
_NUMERICS = ("attention_logits", "output_logits", "fp8_range", "overflow", "model_setting")
_SYSTEMS = ("rank", "storage", "software")


def _all(weight: float, *groups: tuple[str, ...], **others: float) -> dict[str, float]:
    return {cause: weight for group in groups for cause in group} | others


RULES: Final[tuple[Rule, ...]] = (
    Rule(fact="found", holds={"none": -5.0}, fails={"none": 1.0}),
    Rule(
        fact="ranks_differ",
        holds=_all(-1.0, _DATA, _OPTIMIZATION, _NUMERICS, rank=7.0, none=-5.0),
        fails={"rank": -0.5},
    ),
    Rule(fact="compute_differs", holds=_all(-1.0, _DATA, _OPTIMIZATION, _NUMERICS, rank=7.0), fails={"rank": -3.0}),
    Rule(
        fact="gone_when_withheld",
        holds=_all(-1.5, _OPTIMIZATION, bad_batch=1.0, rank=1.0, objective=-2.0, data_stage=-2.0, model_setting=-2.0),
        fails={"bad_batch": -1.5, "rank": -0.5},
    ),
    Rule(
        fact="few_culprits",
        holds={"rank": 3.5, "bad_batch": 1.0, "overflow": -1.5, "fp8_range": -0.5},
        fails={"rank": -3.0, "overflow": 1.0},
    ),
    Rule(
        fact="non_finite",
        holds={"overflow": 2.5, "fp8_range": 0.5, "rank": 1.0, "objective": -2.0, "data_stage": -3.0, "none": -5.0},
        fails={"overflow": -4.0},
    ),
    Rule(fact="data_odd", holds={"bad_batch": 4.5}, fails={"bad_batch": -1.5}),
    Rule(fact="tokens_changed", holds={"objective": 4.0}, fails={"objective": -0.5}),
    Rule(fact="recurs_with_samples", holds={"bad_batch": 2.0, "rank": -1.0}, fails={"rank": 2.0, "bad_batch": -2.0}),
    Rule(
        fact="sudden",
        holds={
            "bad_batch": 1.0,
            "objective": 1.0,
            "data_stage": 0.5,
            "model_setting": 0.5,
            "learning_rate": -1.0,
            "attention_logits": -1.0,
        },
        fails={"bad_batch": -0.5, "objective": -1.0, "data_stage": -1.0},
    ),
    Rule(
        fact="norm_first",
        holds={
            "learning_rate": 2.0,
            "optimizer_setting": 1.0,
            "attention_logits": 1.0,
            "bad_batch": -1.5,
            "objective": -1.5,
            "data_stage": -1.5,
        },
        fails={"learning_rate": -0.5},
    ),
    Rule(fact="amplified", holds={"rank": 0.5, "data_stage": -0.5}, fails={"rank": -0.5}),
    Rule(
        fact="by_itself",
        holds={"bad_batch": 2.0, "rank": 0.5, "objective": -1.5, "data_stage": -2.0, "model_setting": -2.0},
        fails={"bad_batch": -1.0},
    ),
    Rule(
        fact="stays",
        holds={"objective": 1.5, "data_stage": 1.5, "model_setting": 1.0, "learning_rate": 0.5, "bad_batch": -1.5},
        fails={"objective": -1.5, "data_stage": -2.0},
    ),
    Rule(fact="rate_jumped", holds={"learning_rate": 5.0}, fails={"learning_rate": -0.5}),
    Rule(fact="at_peak", holds={"learning_rate": 2.0}, fails={"learning_rate": -0.5}),
    Rule(fact="rate_changed", holds={"learning_rate": 4.0}),
    Rule(fact="optimizer_changed", holds={"optimizer_setting": 4.5}, fails={"optimizer_setting": -2.5}),
    Rule(fact="tokens_setting_changed", holds={"objective": 4.5}),
    Rule(fact="model_changed", holds={"model_setting": 4.5}, fails={"model_setting": -1.0}),
    Rule(fact="data_changed", holds={"data_stage": 4.0}, fails={"data_stage": -0.5}),
    Rule(fact="code_changed", holds={"software": 3.0}, fails={"software": -2.0}),
    Rule(
        fact="restarted",
        holds={"optimizer_state": 2.0, "software": 1.0},
        fails={"optimizer_state": -1.5, "software": -1.0, "model_setting": -0.5},
    ),
    Rule(fact="from_start", holds={"model_setting": 2.5, "learning_rate": 0.5}, fails={"model_setting": -1.0}),
    Rule(fact="logits_grew", holds={"attention_logits": 5.5, "bad_batch": -0.5}, fails={"attention_logits": -3.0}),
    Rule(fact="log_z_grew", holds={"output_logits": 4.5}, fails={"output_logits": -2.0}),
    Rule(fact="fp8_limits", holds={"fp8_range": 5.0}, fails={"fp8_range": -4.0}),
    Rule(fact="one_layer", holds={"attention_logits": 0.5, "rank": 0.5, "fp8_range": 0.5}),
    Rule(fact="weights_grew", holds={"learning_rate": 0.5, "optimizer_setting": 1.0, "output_logits": 0.5}),
    Rule(
        fact="held_out_rose", holds={"objective": -0.5, "bad_batch": -0.5}, fails={"bad_batch": 1.0, "objective": 0.5}
    ),
    Rule(fact="slow", holds={"storage": 4.5}, fails={"storage": -3.0}),
    Rule(fact="reproduces", holds={"rank": -2.0, "storage": -1.0}, fails={"rank": 5.0, "storage": 1.0}),
    Rule(
        fact="skip_clears",
        holds={"bad_batch": 3.0, "learning_rate": -1.0, "model_setting": -2.0},
        fails={"bad_batch": -3.0, "learning_rate": 0.5},
    ),
    Rule(
        fact="control_clears",
        holds={"bad_batch": 2.0, "learning_rate": -1.0, "model_setting": -1.5},
        fails={"bad_batch": -3.0, "learning_rate": 1.0, "attention_logits": 0.5, "model_setting": 1.0},
    ),
    Rule(fact="lr_clears", holds={"learning_rate": 4.0, "bad_batch": -2.0}, fails={"learning_rate": -1.5}),
    Rule(fact="bf16_clears", holds={"fp8_range": 5.0}, fails={"fp8_range": -4.0}),
    Rule(fact="moments_clear", holds={"optimizer_state": 4.0}, fails={"optimizer_state": -2.0}),
)
