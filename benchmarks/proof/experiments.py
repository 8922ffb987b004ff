"""The experiments: arms that differ by one remedy, over seeds and a sweep, and what has to hold of the outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, NamedTuple

MODEL = (
    *("--num-layers", "3", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--disable-bias-linear", "--bf16", "--attention-dropout", "0"),
    *("--hidden-dropout", "0", "--no-create-attention-mask-in-dataloader", "--micro-batch-size", "8"),
    *("--global-batch-size", "8", "--lr-decay-style", "cosine", "--weight-decay", "0.1", "--clip-grad", "1.0"),
    *(
        "--adam-beta2",
        "0.95",
        "--split",
        "95,5,0",
        "--eval-iters",
        "10",
        "--log-interval",
        "1000",
        "--num-workers",
        "0",
    ),
    *("--no-check-for-nan-in-loss-and-grad", "--spec", "megatron_stability", "--stability-mode", "observe"),
)
STEPS, TAIL = 160, 20
BAD = range(60, 84)  # steps with junk
Rows = list[dict[str, Any]]


class Claim(NamedTuple):
    """A direction that has to hold, and the figures that say whether it does."""

    says: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question.

    Attributes:
        question: in a sentence.
        source: who published the effect.
        arms: flags by name; the first is the control.
        sweep: values of `flag`, which every arm is run at.
        flag: of the sweep.
        more: values added by a full run.
        claims: what has to hold, from the rows of all runs.
        shows: the figures of a row that the page has, with their titles.
        steps: of a run.
    """

    question: str
    source: str
    arms: Mapping[str, tuple[str, ...]]
    claims: Callable[[Rows], list[Claim]]
    shows: Mapping[str, str]
    flag: str = "--lr"
    sweep: tuple[str, ...] = ("3e-3",)
    more: tuple[str, ...] = ()
    steps: int = STEPS
    full_arms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def runs(self, full: bool, seeds: int) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
        """(arm, value of the sweep, seed, flags) of every run."""
        for arm, flags in (dict(self.arms) | dict(self.full_arms if full else {})).items():
            for value in self.sweep + (self.more if full else ()):
                for seed in range(1, seeds + 1):
                    train = (
                        "--train-iters",
                        str(self.steps),
                        "--eval-interval",
                        str(self.steps - 10),
                        "--seed",
                        str(seed),
                    )
                    warm = ("--lr-warmup-iters", "10")
                    yield arm, value, seed, (*MODEL, *train, *warm, self.flag, value, *flags)


def of(rows: Rows, arm: str, key: str, value: str | None = None) -> list[float]:
    """A figure of an arm's runs; a run that ended in NaN counts as infinite."""
    found = [row[key] for row in rows if row["arm"] == arm and value in (None, row["value"])]
    return [math.inf if each is None else float(each) for each in found]


def sensitivity(rows: Rows, arm: str, seed: int) -> float:
    """LR sensitivity E[min(ℓ(η), ℓ0) - ℓ*] over the sweep's range (Wortsman et al., arXiv 2309.14322, section 2.2)."""
    mine = [row for row in rows if row["arm"] == arm and row["seed"] == seed]
    losses = [min(math.inf if row["final_loss"] is None else row["final_loss"], row["first_loss"]) for row in mine]
    return mean(losses) - min(losses)


def _attention(rows: Rows) -> list[Claim]:
    seeds = sorted({row["seed"] for row in rows})
    plain, normed, clipped = ([sensitivity(rows, arm, s) for s in seeds] for arm in ("none", "QK-norm", "QK-clip"))
    high = rows and max(rows, key=lambda row: float(row["value"]))["value"]
    logits = {arm: max(of(rows, arm, "max_logit", str(high))) for arm in ("none", "QK-norm", "QK-clip")}
    return [
        Claim(
            f"QK-norm's LR sensitivity {mean(normed):.3f} is below the plain model's {mean(plain):.3f} with every seed",
            all(n < p for n, p in zip(normed, plain, strict=True)),
        ),
        Claim(
            f"at the highest rate the largest attention logit is {logits['none']:.3g} without, "
            f"{logits['QK-norm']:.3g} with QK-norm",
            logits["QK-norm"] < logits["none"] / 3,
        ),
        Claim(
            f"QK-clip's LR sensitivity {mean(clipped):.3f} is below the plain model's {mean(plain):.3f} on average",
            mean(clipped) < mean(plain),
        ),
    ]


def _output(rows: Rows) -> list[Claim]:
    plain, weak, strong = (mean(of(rows, arm, "log_z")) for arm in ("none", "1e-4", "1e-2"))
    loss = {arm: mean(of(rows, arm, "final_loss")) for arm in ("none", "1e-4", "1e-2")}
    return [
        Claim(f"|log Z| at the end: {plain:.2f} without, {strong:.2f} with β = 1e-2", strong < 0.5 * plain),
        Claim(
            f"the loss does not pay for it: {loss['none']:.3f}, {loss['1e-2']:.3f}", loss["1e-2"] < loss["none"] + 0.05
        ),
        Claim(f"β = 1e-4 does little in so short a run: {weak:.2f} against {plain:.2f}", abs(weak - plain) < 0.5),
    ]


def _bad_data(rows: Rows) -> list[Claim]:
    names = ("clean", "repeats, stock", "repeats, guard", "wrong targets, stock", "wrong targets, guard")
    loss = {arm: mean(of(rows, arm, "held_out")) for arm in names}
    skipped = mean(of(rows, "repeats, guard", "withheld"))
    return [
        Claim(
            f"24 steps of repeats cost {loss['repeats, stock'] - loss['clean']:+.3f} nats of held-out loss, "
            f"with the guard {loss['repeats, guard'] - loss['clean']:+.3f}",
            loss["repeats, guard"] < loss["repeats, stock"],
        ),
        Claim(f"the guard withheld {skipped:.1f} of 24 such steps", skipped >= 20),
        Claim(
            f"24 steps of random targets cost {loss['wrong targets, stock'] - loss['clean']:+.3f} nats; "
            f"the guard, which reads inputs, {loss['wrong targets, guard'] - loss['clean']:+.3f}",
            loss["wrong targets, guard"] < loss["wrong targets, stock"] - 0.02,
        ),
    ]


def _fp8(rows: Rows) -> list[Claim]:
    healthy, narrow = (mean(of(rows, arm, "final_loss")) for arm in ("healthy", "margin 8"))
    control = mean(of(rows, "bf16", "final_loss"))
    told = [row["first_fp8_verdict"] for row in rows if row["arm"] == "margin 8"]
    departs = [row["departs"] for row in rows if row["arm"] == "margin 8"]
    before = [a is not None and (b is None or a < b) for a, b in zip(told, departs, strict=True)]
    quiet = [row["first_fp8_verdict"] for row in rows if row["arm"] == "healthy"]
    return [
        Claim(f"healthy FP8 ends at {healthy:.3f}, BF16 at {control:.3f}", abs(healthy - control) < 0.05 * control),
        Claim(
            f"margin 8 ends at {narrow:.3f}; telemetry spoke at steps {told}, the loss departed at {departs}",
            all(before),
        ),
        Claim(f"telemetry is silent on the healthy runs: {quiet}", not any(quiet)),
    ]


def _faults(kind: str) -> tuple[str, ...]:
    return tuple(word for step in BAD for word in ("--drill-fault", f"{kind}:step={step}"))


_DELAYED = (
    *("--stability-fp8-emulate", "delayed", "--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max"),
    *("--stability-fp8-sample-every", "10"),
)
_LOGITS = ("--stability-observe-attention-enabled", "true")
_CLIP = ("--stability-mode", "act", "--stability-decide-rules", "[]", "--stability-qk-clip-enabled", "true")
_CLIP = (*_CLIP, "--stability-qk-clip-tau", "30")
_GUARD = (
    *("--stability-mode", "act", "--stability-detect-bad-batch-calibration-steps", "40"),
    *("--stability-decide-rules", '[{"detector": "bad_batch", "tier": "medium", "action": "skip"}]'),
)

EXPERIMENTS: Mapping[str, Experiment] = {
    "attention-logits": Experiment(
        question="Does bounding attention logits widen the range of learning rates that a model bears?",
        source="Wortsman et al., arXiv 2309.14322; MuonClip, arXiv 2507.20534",
        arms={"none": _LOGITS, "QK-norm": (*_LOGITS, "--stability-model-qk-norm", "rmsnorm"), "QK-clip": _CLIP},
        full_arms={"softcap 50": (*_LOGITS, "--stability-model-attention-softcap", "50")},
        sweep=("3e-3", "3e-2", "1e-1"),
        more=("1e-3", "1e-2"),
        claims=_attention,
        shows={"final_loss": "final loss", "max_logit": "largest logit"},
    ),
    "output-logits": Experiment(
        question="Does the z-loss keep log Z near zero, and what does it cost?",
        source="Chowdhery et al., arXiv 2204.02311; Wortsman et al., arXiv 2309.14322",
        arms={
            "none": ("--stability-model-z-loss", "1e-12"),  # measured, and of no weight
            "1e-4": ("--stability-model-z-loss", "1e-4"),
            "1e-2": ("--stability-model-z-loss", "1e-2"),
        },
        sweep=("3e-2",),
        more=("3e-3",),
        claims=_output,
        shows={"log_z": "absolute log Z at the end", "final_loss": "final loss"},
    ),
    "bad-data": Experiment(
        question="What do 24 bad steps of 160 cost on held-out text, and what does the data guard save?",
        source="OPT-175B's and PaLM's logs; a fault on purpose here",
        arms={
            "clean": (),
            "repeats, stock": _faults("page"),
            "repeats, guard": (*_GUARD, *_faults("page")),
            "wrong targets, stock": _faults("noise"),
            "wrong targets, guard": (*_GUARD, *_faults("noise")),
        },
        claims=_bad_data,
        shows={"held_out": "held-out loss", "withheld": "steps withheld"},
    ),
    "fp8": Experiment(
        question="Does FP8 telemetry speak before the loss does?",
        source="emulated delayed scaling, a margin that starves small gradients",
        arms={"bf16": (), "healthy": _DELAYED, "margin 8": (*_DELAYED, "--fp8-margin", "8")},
        claims=_fp8,
        shows={"final_loss": "final loss", "first_fp8_verdict": "first FP8 verdict", "departs": "loss departs at"},
    ),
}
