"""The `checkpoint:` section: names in a list or with commas, from a file or a flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stability import config
from megatron_stability.errors import UsageError


def test_names_from_flag_and_file(tmp_path: Path) -> None:
    dest = config.dest(("checkpoint", "allow_changes"))
    assert config.load(None, {dest: "lr, train_iters"}).checkpoint.allow_changes == ("lr", "train_iters")
    assert config.load(None, {dest: "[lr, seed]"}).checkpoint.allow_changes == ("lr", "seed")
    file = tmp_path / "stability.yaml"
    file.write_text("checkpoint: {allow_changes: [dataset], keep: 3, strict: true}")
    loaded = config.load(file).checkpoint
    assert (loaded.allow_changes, loaded.keep, loaded.strict, loaded.manifest) == (("dataset",), 3, True, True)


@pytest.mark.parametrize("bad", [{"keep": "-1"}, {"threads": "0"}, {"strict": "perhaps"}])
def test_impossible_values_name_the_flag(bad: dict[str, str]) -> None:
    name, value = next(iter(bad.items()))
    with pytest.raises(UsageError, match=f"--stability-checkpoint-{name}"):
        config.load(None, {config.dest(("checkpoint", name)): value})
