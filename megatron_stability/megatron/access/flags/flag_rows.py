"""Megatron's flags that don't go with the plugin, or with a setting of it: one row each, read at the start.

The docs' table is made of the same rows (`ci/flags_page.py`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags import argument_table
from megatron_stability.megatron.access.flags.argument_table import Effect
from megatron_stability.records import Action


@dataclass(frozen=True, slots=True)
class When:
    """Settings under which a row holds: as words for a sentence and a table, and as a question to the tree."""

    words: str
    holds: Callable[[StabilityConfig], bool]


def may_rewind(config: StabilityConfig) -> bool:
    """Whether the policy may go back to a checkpoint."""
    asked = config.decide.when_exhausted == "rewind" or any(r.action is Action.REWIND for r in config.decide.rules)
    return config.mode == "act" and asked


def _rewinds_here(config: StabilityConfig) -> bool:
    return may_rewind(config) and config.decide.rewind != "restart"


ON: Final = When("--stability-mode other than off", lambda config: config.mode != "off")
ACT: Final = When("--stability-mode act", lambda config: config.mode == "act")
MANIFEST: Final = When("--stability-checkpoint-manifest true", lambda config: config.checkpoint.manifest)
REWIND: Final = When("a rewind within the process", _rewinds_here)
SNAPSHOT: Final = When(
    "--stability-decide-snapshot-steps", lambda config: _rewinds_here(config) and config.decide.snapshot_steps > 0
)


@dataclass(frozen=True, slots=True)
class Row:
    """A flag that is refused.

    Attributes:
        name: the attribute of Megatron's namespace; one that it lacks is fine.
        fine: its values that are not refused.
        when: under which settings.
        why: and the way out.
    """

    name: str
    fine: tuple[Any, ...]
    when: When
    why: str

    @property
    def flag(self) -> str:
        """As on the command line."""
        known = argument_table.table().get(self.name)
        return known.flag if known is not None and known.flag else "--" + self.name.replace("_", "-")

    def given(self, args: Namespace) -> str | None:
        """The flag and its value as they were given; None where the value is fine."""
        value = argument_table.argument(args, self.name)
        if value in self.fine or str(value) in self.fine:
            return None
        shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return self.flag if value is True else f"{self.flag} {shown}"


_OFF: Final = (False, None)
_FP32: Final = (
    "fp32",
    "torch.float32",
)  # a narrow moment has a scale beside the state
_PARTS: Final = (
    "it keeps weights, gradients and optimizer state in parts of its own, which are not known here, neither to the "
    "gate's measures nor to a checkpoint's manifest; use --use-distributed-optimizer, or --stability-mode off"
)
_NOT_PUT_BACK: Final = "it can't be put back; drop the flag, or give --stability-decide-rewind restart"
_NOT_HELD: Final = "a snapshot does not hold all of its state; leave the snapshot out, and rewinds read a checkpoint"

REFUSED: Final = (
    Row(
        *("rampup_batch_size", (None,), ON),
        "Megatron parses the flag and trains with the global batch size from the first step; use "
        "--step-batch-size-schedule",
    ),
    Row(
        *("fp16", _OFF, ACT),
        "the loss scaler moves before a step can be withheld; use --bf16, or --stability-mode observe",
    ),
    Row("use_torch_fsdp2", _OFF, ON, _PARTS),
    Row("use_megatron_fsdp", _OFF, ON, _PARTS),
    Row(
        *("optimizer_cuda_graph", _OFF, ON),
        "a captured optimizer step can't be withheld; drop the flag, or use --stability-mode off",
    ),
    Row(
        *("non_persistent_ckpt_type", (None,), MANIFEST),
        "such checkpoints are loaded without a manifest; drop the flag, or give --stability-checkpoint-manifest false",
    ),
    Row(
        *("save_retain_interval", (None,), MANIFEST),
        "deletes checkpoints whether or not a newer one is good; use --stability-checkpoint-keep, or give "
        "--stability-checkpoint-manifest false",
    ),
    Row("ckpt_format", ("torch_dist",), REWIND, _NOT_PUT_BACK),
    Row("dataloader_type", ("single", "cyclic", None), REWIND, _NOT_PUT_BACK),
    Row("gtp_weight_remat_size", (1,), REWIND, _NOT_PUT_BACK),
    Row("no_save_optim", _OFF, REWIND, _NOT_PUT_BACK),
    Row("no_save_rng", _OFF, REWIND, _NOT_PUT_BACK),
    Row("hybrid_context_parallel", _OFF, REWIND, _NOT_PUT_BACK),
    Row("perform_rl_step", _OFF, REWIND, _NOT_PUT_BACK),
    Row("fp8", _OFF, SNAPSHOT, _NOT_HELD),
    Row("fp4", _OFF, SNAPSHOT, _NOT_HELD),
    Row("optimizer_cpu_offload", _OFF, SNAPSHOT, _NOT_HELD),
    *(Row(name, _FP32, SNAPSHOT, _NOT_HELD) for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
)


@dataclass(frozen=True, slots=True)
class Told:
    """A flag that works otherwise than alone; the run says so in one line.

    Attributes:
        name: the attribute of Megatron's namespace.
        when: under which settings.
        line: what becomes of it.
    """

    name: str
    when: When
    line: str


TOLD: Final = (
    Told(
        *("check_for_nan_in_loss_and_grad", ACT),
        "--check-for-nan-in-loss-and-grad is turned off: Megatron's check would stop the run before a non-finite step "
        "can be skipped; the same values are judged at the gate",
    ),
)
AT_A_LOAD: Final = (
    Told(
        *("skip_train", MANIFEST),
        "--skip-train: nothing is trained; the checkpoint is verified, its model settings are compared, data and "
        "optimizer may differ",
    ),
    Told(
        *("finetune", MANIFEST),
        "--finetune: only the weights are loaded; steps, samples, moments, schedule (warm-up included) and generators "
        "start anew, and arguments may differ from the checkpoint's",
    ),
    Told(
        *("no_load_optim", MANIFEST),
        "--no-load-optim: the optimizer's moments and the schedule (warm-up included) start anew; master weights are "
        "the loaded weights",
    ),
    Told(
        *("no_load_rng", MANIFEST),
        "--no-load-rng: generators start from --seed again, so dropout repeats the masks of the first steps",
    ),
)


def refuse(config: StabilityConfig, args: Namespace) -> None:
    """Raise for the first row that holds.

    Args:
        config: the validated tree, mode other than off.
        args: Megatron's validated arguments.

    Raises:
        UsageError: names the flag, the setting and the way out.
    """
    for row in REFUSED:
        given = row.given(args) if row.when.holds(config) else None
        if given is not None:
            with_what = row.when.words.replace("other than off", config.mode)
            raise UsageError(f"{given} with {with_what}: {row.why}")


def told(config: StabilityConfig, args: Namespace, rows: tuple[Told, ...]) -> Iterator[str]:
    """A line for each flag that works otherwise than alone.

    Args:
        config: the validated tree, mode other than off.
        args: Megatron's validated arguments.
        rows: `TOLD` at the start, `AT_A_LOAD` where a checkpoint was found.
    """
    for row in rows:
        if row.when.holds(config) and argument_table.given(args, row.name):
            yield row.line


def unread(args: Namespace) -> Iterator[str]:
    """A line for each flag that was given and that nothing reads.

    Args:
        args: Megatron's validated arguments.
    """
    for each in argument_table.table().values():
        default = each.newest_default
        if each.effect is Effect.IGNORED and argument_table.argument(args, each.name) != default:
            yield f"{each.flag}: no part of Megatron's GPT pretraining reads this flag; it does nothing"
