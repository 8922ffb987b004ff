"""Data that a run can't be trained on, under Bridge's loop: the same sentences, in a recipe's words."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_stability.errors import EXIT_UNUSABLE, UsageError
from tests.dist.pool import Context, Pool
from tests.e2e.incidents.test_data import hidden
from tests.e2e.incidents.test_resume_and_halt import Actions
from tests.nemo import jobs
from tests.unit.data.maker import make

pytestmark = pytest.mark.nemo


def train(
    context: Context, data: Mapping[str, Any], settings: Mapping[str, Any], checkpoint: Mapping[str, Any]
) -> tuple[int, str]:
    """Train on real data: the exit code, and what the rank said on standard error or was refused with."""
    from megatron.bridge.training.config import GPTDatasetConfig

    dataset = GPTDatasetConfig(
        random_seed=1234,
        seq_length=64,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        num_workers=0,
        dataloader_type="single",
        **data,
    )
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code, _ = jobs.train(
                context, {**settings, "dataset": dataset}, {"mode": "act", "checkpoint": checkpoint}, probe=Actions()
            )
        except UsageError as error:
            return error.exit_code, str(error)
    return code, said.getvalue()


def test_no_forward_sees_an_id_beyond_the_vocabulary_and_no_split_is_empty(bridge: Pool, tmp_path: Path) -> None:
    prefix = hidden(tmp_path / "text", 256)
    settings = {**jobs.TP2, "tokenizer.vocab_size": 200}
    data = {"data_path": prefix, "split": "1,0,0"}
    results = bridge.run(train, data, settings, {}, world=2, timeout=120)
    assert [code for code, _ in results] == [EXIT_UNUSABLE] * 2
    assert f"{prefix}.bin holds token id 256, and the vocabulary has 200 (0 to 199)" in results[0][1]
    assert "(tokenizer.vocab_size, tokenizer.tokenizer_model)" in results[0][1]
    ((code, said),) = bridge.run(train, data | {"split": "9999,8,2"}, {}, {}, world=1, timeout=120)
    assert code == EXIT_UNUSABLE
    assert f"dataset.split 9999,8,2: the validation split would be empty, for {prefix} has 16 documents" in said


def test_other_data_and_weights_are_told_at_a_resume(bridge: Pool, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    a, b = (make(tmp_path / name, draw.integers(0, 127, (40, 100)).tolist()) for name in ("a", "b"))
    save = str(tmp_path / "save")
    settings = {"train.train_iters": 2, "checkpoint.save": save, "checkpoint.load": save}
    blend = {"blend_per_split": [([a, b], [0.5, 0.5]), None, None]}
    fresh = {"allow_fresh_start": True}
    assert bridge.run(train, blend, settings, fresh, world=1, timeout=120)[0][0] == 0
    make(tmp_path / "b", draw.integers(0, 127, (40, 100)).tolist())
    other = {"blend_per_split": [([a, b], [0.25, 0.75]), None, None]}
    scaled = settings | {"model.softmax_scale": 0.25}  # a name that Bridge alone has
    ((code, said),) = bridge.run(
        train, other, scaled, fresh | {"allow_changes": ("train_data_path",)}, world=1, timeout=120
    )
    assert code == EXIT_UNUSABLE
    assert "softmax_scale None -> 0.25" in said
    assert f"dataset ({a} had weight 0.5 and has 0.25; {b}.bin has other content)" in said
