"""What the configuration file and its flags refuse, beyond unknown keys and wrong types."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stability import config
from megatron_stability.errors import UsageError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode: act\ndetect: {}\nmode: off\n", r"line 3: is not valid YAML \(the key `mode` stands twice\)"),
        ("detect:\n  plateau: {block: 3, block: 4}\n", r"line 2: .*`block` stands twice"),
        ("mode: 2024-99-99\n", "is not valid YAML"),
        ("[" * 3000 + "]" * 3000, "is not valid YAML"),
        ('!!python/object/apply:os.system ["false"]\n', "is not valid YAML"),
        ("a: &a\n  b: *a\n", "an alias stands within what it names"),
        ("- mode\n", "holds a list"),
        ("detect: {loss_spike: {k: .nan}}\n", r"loss_spike\.k"),
        (f"detect: {{loss_spike: {{window: {10**20}}}}}\n", r"loss_spike\.window = 1\d+: .*at most"),
    ],
)
def test_a_file_is_refused_by_name_and_reason(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "stability.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=f"--stability-config .*stability.yaml.*{said}") as error:
        config.load(file)
    assert "\n" not in str(error.value)


def test_an_empty_file_and_merge_keys_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "stability.yaml"
    file.write_text("")
    assert config.load(file) == config.load()
    file.write_text("detect:\n  plateau: &p {block: 7}\n  loss_drift: {<<: *p, blocks: 20}\n")
    detect = config.load(file).detect
    assert (detect.plateau.block, detect.loss_drift.block, detect.loss_drift.blocks) == (7, 7, 20)


@pytest.mark.parametrize("name", ["stability_config", "stability_mode", "stability_record_dir"])
def test_an_empty_flag_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is empty"):
        config.load(None, {name: ""})


def test_a_flag_that_yaml_chokes_on_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="--stability-detect-loss-spike-k '2020-99-99': is not a valid value"):
        config.load(None, {"stability_detect_loss_spike_k": "2020-99-99"})
