"""The checks, one row each: what is looked at, how it is judged, why, and the flag that mends it.

A check fails only what must break; what is merely known to go wrong more often warns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from megatron_stability.preflight import judges
from megatron_stability.preflight.judges import Found
from megatron_stability.preflight.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row.

    Attributes:
        judge: reads the plan.
        why: what goes wrong without it.
        mend: the flags that would change the outcome.
        source: where that is known from.
        profiles: kinds of run that it is about; empty: all.
    """

    judge: Callable[[Plan], Found]
    why: str
    mend: str
    source: str
    profiles: tuple[str, ...] = ()


GUIDE = "the field's practice"
CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "attention-logits": Check(
            judge=judges.attention,
            why="attention logits grow with the learning rate until the softmax is one-hot; under Muon they always do",
            mend="--stability-model-qk-norm rmsnorm, or --stability-qk-clip-enabled true",
            source="arXiv 2309.14322, 2507.20534 (MuonClip)",
        ),
        "output-logits": Check(
            judge=judges.z_loss,
            why="log Z drifts, and with it the precision of the softmax",
            mend="--stability-model-z-loss 1e-4",
            source="arXiv 2204.02311 (PaLM), 2309.14322",
        ),
        "init-std": Check(
            judge=judges.init_std,
            why="weights that begin too large give gradients that do",
            mend="--init-method-std, or --use-mup",
            source="arXiv 2204.06745 (GPT-NeoX-20B)",
        ),
        "embedding-std": Check(
            judge=judges.embedding_std,
            why="an embedding much smaller than the residual's unit scale gets large gradients through the first norm",
            mend="--stability-model-init-embedding d_model",
            source="arXiv 2312.16903 (spike no more)",
        ),
        "clip": Check(
            judge=judges.clip,
            why="a clip bounds what one batch does",
            mend="--clip-grad 1.0",
            source=GUIDE,
        ),
        "adam-beta2": Check(
            judge=judges.beta2,
            why="a second moment that is out of date lets a larger gradient through whole",
            mend="--adam-beta2 0.95",
            source="arXiv 2304.13013",
        ),
        "adam-eps": Check(
            judge=judges.eps,
            why="ε above the gradients' size turns Adam into SGD",
            mend="--adam-eps 1e-8",
            source="arXiv 2309.14322",
        ),
        "weight-decay": Check(
            judge=judges.weight_decay,
            why="decay bounds the weights' norm",
            mend="--weight-decay 0.1",
            source="arXiv 2309.14322",
        ),
        "warmup": Check(
            judge=judges.warmup,
            why="the first second moments are of few gradients",
            mend="--lr-warmup-iters, 1 % of the steps and at least 1000 for large models",
            source="arXiv 2309.14322, 2406.09405",
        ),
        "warmup-memory": Check(
            judge=judges.warmup_memory,
            why="the second moment is not yet an average while the rate rises",
            mend="--lr-warmup-iters of at least 2/(1-β2)",
            source="arXiv 1910.04209",
        ),
        "schedule": Check(
            judge=judges.schedule,
            why="a rate that stays at its peak stays where spikes are",
            mend="--lr-decay-style cosine or WSD",
            source=GUIDE,
        ),
        "width": Check(
            judge=judges.width,
            why="the rate that a model bears falls with its width",
            mend="--lr near C/sqrt(hidden_size), or --use-mup",
            source="arXiv 2309.14322; C of published runs",
        ),
        "precision": Check(
            judge=judges.scaling,
            why="fp16 has no range for gradients",
            mend="--bf16, or drop --loss-scale",
            source="arXiv 1710.03740",
        ),
        "gradient-sums": Check(
            judge=judges.sums,
            why="small parts are lost where many ranks' gradients are added in 16 bits",
            mend="--accumulate-allreduce-grads-in-fp32",
            source=GUIDE,
        ),
        "masters": Check(
            judge=judges.masters,
            why="small updates vanish in 16-bit weights",
            mend="--main-params-dtype fp32",
            source="arXiv 1710.03740",
        ),
        "fp8-active": Check(
            judge=judges.fp8_active,
            why="FP8 that is asked for and silently off is found weeks later",
            mend="--transformer-impl transformer_engine",
            source="this project",
            profiles=("dense-fp8",),
        ),
        "fp8-history": Check(
            judge=judges.fp8_history,
            why="delayed scaling saturates where an outlier was forgotten",
            mend="--fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
            source="Transformer Engine's defaults",
            profiles=("dense-fp8",),
        ),
        "fp8-ends": Check(
            judge=judges.fp8_ends,
            why="the layers beside embedding and head are the most sensitive",
            mend="--first-last-layers-bf16",
            source="vendors' recipes",
            profiles=("dense-fp8",),
        ),
        "router-z": Check(
            judge=judges.router_z,
            why="a router's logits grow like the head's",
            mend="--moe-z-loss-coeff 1e-3",
            source="arXiv 2202.08906 (ST-MoE)",
            profiles=("moe",),
        ),
        "balance": Check(
            judge=judges.balance,
            why="experts that get no tokens die",
            mend="--moe-aux-loss-coeff 1e-2, or --moe-router-enable-expert-bias",
            source="arXiv 2101.03961, 2408.15664",
            profiles=("moe",),
        ),
        "non-finite": Check(
            judge=judges.non_finite,
            why="one NaN is in every weight after one step",
            mend="--stability-mode act, or no --no-check-for-nan-in-loss-and-grad",
            source="this project",
        ),
        "divergence": Check(
            judge=judges.divergence,
            why="what does not come back by itself costs what it takes until somebody looks",
            mend="--stability-mode act --stability-decide-preset field",
            source="docs/rewind.md",
        ),
        "batches": Check(
            judge=judges.batches,
            why="junk in a shard trains before it shows in a loss",
            mend="--stability-observe-batch-enabled true; `megatron-stability audit-data` before",
            source="docs/data.md",
        ),
        "held-out": Check(
            judge=judges.held_out,
            why="a training loss does not show what is unlearnt",
            mend="--eval-interval, --eval-iters, --multiple-validation-sets",
            source=GUIDE,
        ),
        "logging": Check(
            judge=judges.logging,
            why="what is not drawn is not seen",
            mend="--tensorboard-dir DIR --log-interval 1",
            source=GUIDE,
        ),
        "detectors": Check(
            judge=judges.silent,
            why="a detector without its signal says nothing",
            mend="the flags that are named",
            source="docs/detection.md",
        ),
        "throughput": Check(
            judge=judges.throughput,
            why="a slow node slows all",
            mend="--log-throughput",
            source=GUIDE,
        ),
        "saves": Check(
            judge=judges.saves,
            why="what is not saved is lost",
            mend="--save DIR --save-interval N; `megatron-stability cadence` says how often",
            source="docs/checkpoints.md",
        ),
        "storage": Check(
            judge=judges.storage,
            why="a full disk ends the run at its next save",
            mend="a larger --save, or --stability-checkpoint-keep N",
            source="this project",
        ),
        "signals": Check(
            judge=judges.signals,
            why="schedulers end jobs by SIGTERM",
            mend="--exit-signal-handler",
            source="docs/checkpoints.md",
        ),
        "requeue": Check(
            judge=judges.resume,
            why="a requeue is the same command",
            mend="--load the same folder as --save",
            source="docs/checkpoints.md",
        ),
        "network": Check(
            judge=judges.network,
            why="the ranks that are missing from a collective are known from its recorder alone",
            mend="TORCH_NCCL_TRACE_BUFFER_SIZE=2000 in the environment",
            source="PyTorch's flight recorder",
        ),
    }
)
PROFILES: Final = ("dense-bf16", "dense-fp8", "moe", "muon")


def profile_of(plan: Plan) -> str:
    """The kind of run that a plan is."""
    if plan.muon:
        return "muon"
    if plan.moe:
        return "moe"
    return "dense-fp8" if plan.fp8 else "dense-bf16"


def applies(name: str, profile: str) -> bool:
    """Whether a check is about a kind of run."""
    profiles = CHECKS[name].profiles
    return not profiles or profile in profiles


def judge(plan: Plan) -> dict[str, Found]:
    """Every check on a plan, in the table's order."""
    return {name: check.judge(plan) for name, check in CHECKS.items()}
