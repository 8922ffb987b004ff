"""`--dataloader-type external`: an iterator without a state of its own is not read from its start again in silence."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stability.errors import EXIT_UNUSABLE
from tests.dist.pool import Context, Pool
from tests.e2e import jobs

pytestmark = pytest.mark.megatron

SEQUENCE, BATCH, PER_STEP = 64, 2, 2  # of `jobs.MODEL`: two micro-batches of two rows


@dataclass
class Plain:
    """Micro-batches, counted in a file as they are read."""

    log: Path
    at: int = 0

    def __next__(self) -> dict[str, torch.Tensor]:
        with self.log.open("a") as file:
            file.write(f"{self.at} ")
        tokens = torch.randint(0, 100, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(self.at))
        self.at += 1
        positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE).contiguous()
        return {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": torch.ones(BATCH, SEQUENCE)} | {
            "position_ids": positions
        }


class Stateful(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "permutation": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class SavesItself(Plain):
    def save_state(self) -> dict[str, Any]:
        return {"at": self.at}


class Unloadable(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"another": Plain(self.log)}


def train(context: Context, flags: Sequence[str], kind: type[Plain], log: Path) -> int:
    """Our own script with another provider of data; the exit code."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.start import pretrain_gpt as gpt

    def add_arguments(parser: ArgumentParser) -> ArgumentParser:
        if "--dataloader-save" not in parser._option_string_actions:  # as the scripts that have such iterators do
            parser.add_argument("--dataloader-save")
        return gpt.add_arguments(parser)

    sys.argv = ["script", *jobs.command_line(tuple(flags))]
    try:
        args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults=gpt.DEFAULTS)
        pretrain(
            pretrain_cfg_container_from_args(args),
            train_valid_test_dataset_provider=lambda samples, vp_stage=None: (kind(log), None, None),
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=gpt.forward_step,
            model_provider=gpt.model_provider,
            get_embedding_ranks=gpt.embedding_ranks,
        )
        return 0
    except SystemExit as ending:
        return int(ending.code or 0)
    finally:
        handle.uninstall()


def run(pool: Pool, kind: type[Plain], folder: Path, *flags: str) -> tuple[int, list[int]]:
    """The exit code, and the micro-batches that were read; four steps, or from the checkpoint of the second on."""
    log = folder / "read"
    log.write_text("")
    mode = ("--stability-mode", "observe", "--no-create-attention-mask-in-dataloader")
    flags = ("--dataloader-type", "external", "--save", str(folder), "--train-iters", "4", *mode, *flags)
    (code,) = pool.run(train, flags, kind, log, world=1, timeout=120)
    return code, [int(word) for word in log.read_text().split()]


def test_a_resume_needs_the_iterator_s_state(pools: dict[tuple[str, str], Pool], tmp_path: Path) -> None:
    pool = pools["0.19.2", "patched"]
    plain, stateful = tmp_path / "plain", tmp_path / "stateful"
    plain.mkdir()
    stateful.mkdir()
    first, rest = list(range(2 * PER_STEP)), list(range(2 * PER_STEP, 4 * PER_STEP))
    start, refused = ("--exit-interval", "2"), (EXIT_UNUSABLE, [])
    again = ("--load", str(plain), "--ckpt-step", "2")
    assert run(pool, Plain, plain, *start) == (0, first)
    assert run(pool, Plain, plain, *again) == refused
    assert run(pool, Stateful, plain, *again) == refused, "none was saved"
    assert run(pool, SavesItself, plain, *again) == refused, "Megatron was not asked to save it"
    positioned = ("--stability-checkpoint-data-positions-itself", "true")
    assert run(pool, Plain, plain, *again, *positioned) == (0, first)
    loader = tmp_path / "loader"
    assert run(pool, SavesItself, plain, *again, "--dataloader-save", str(loader)) == (0, first)
    assert list(loader.rglob("*.pt")), "Megatron found its save_state"
    assert run(pool, Unloadable, stateful, *start) == refused
    assert run(pool, Stateful, stateful, *start) == (0, first)
    assert run(pool, Stateful, stateful, "--load", str(stateful)) == (0, rest)
