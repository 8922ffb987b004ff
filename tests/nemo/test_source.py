"""Slips of a recipe told from Bridge's source alone, on a made-up tree; and a hub that doesn't answer, in seconds."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stability import cli
from megatron_stability.errors import UsageError
from megatron_stability.nemo.recipe import hub, recipe_file, source

pytestmark = pytest.mark.nemo

TREE = {
    "bridge/recipes/gpt/vanilla.py": (
        "def vanilla_gpt_pretrain_config():\n    return base()\n\ndef base():\n    return 1\n\n"
        "def _private_config():\n    return 1\n"
    ),
    "bridge/recipes/llama/h100/llama3.py": (
        "def llama3_8b_pretrain_2gpu_config():\n    return _llama()\n\n"
        "def _llama():\n    return AutoBridge.from_hf_pretrained('meta-llama/Llama-3')\n"
        "def llama3_8b_sft_config():\n    return _llama()\n"
    ),
    "bridge/recipes/llama/llama3.py": (
        "from megatron.bridge.recipes.llama.h100.llama3 import (\n"
        "    llama3_8b_pretrain_2gpu_config as llama3_8b_pretrain_config,\n)\n"
    ),
    "bridge/training/config.py": (
        "class TrainingConfig(Base):\n    train_iters: int = 1\n\n"
        "    def __post_init__(self):\n        self.made_late = 1\n"
        "class ConfigContainer:\n    train: TrainingConfig\n    model: (\n        Gpt\n        | T5\n    )\n"
        "    ft: Optional[Ft] = None\n"
    ),
    "bridge/models/gpt_provider.py": (
        "class Gpt(Transformer):\n    vocab_size: int = 1\n\nclass T5:\n    encoder_depth: int = 1\n"
    ),
    "core/transformer/transformer_config.py": "class Transformer:\n    num_layers: int = 1\n    hidden_size: int = 1\n",
    "training/config/training_config.py": "class Base:\n    global_batch_size: int = 1\n",
}
CACHES = (source.recipes, source.asks_hub, source._definitions, source._classes, source._any_key)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "megatron"
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(source, "_roots", lambda: [root])
    for cache in CACHES:
        cache.cache_clear()
    yield root
    for cache in CACHES:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modle: {num_layers: 2}", "FILE: modle is not a key of a recipe; did you mean `model`?"),
        ("model: {num_layer: 2}", "FILE: model.num_layer is not a key of model; did you mean `num_layers`?"),
        ("train: {trian_iters: 2}", "FILE: train.trian_iters is not a key of train; did you mean `train_iters`?"),
        ("train: {global_batch_sise: 2}", "did you mean `global_batch_size`?"),
        ("model: {encoder_dept: 2}", "did you mean `encoder_depth`?"),
        ("scale_down: {model: {hiden_size: 2}}", "FILE: scale_down: model.hiden_size is not a key of model"),
    ],
)
def test_a_slip_is_told_from_the_source(tree: Path, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(says.replace("FILE", str(file)))):
        source.refuse_typos(recipe_file.read(file))


@pytest.mark.parametrize(
    "text",
    [
        "model: {num_layers: 2, vocab_size: 3}\ntrain: {global_batch_size: 2, made_late: 3}",
        "model: {quux: 2}",  # near nothing: the real recipe judges it
        "train: {num_layers: 2}",  # a key of another section: likewise
        "ft: {_target_: x.Y, nope: 1}",
        "model: 3",
        "stability: {mode: act}",
    ],
)
def test_what_is_not_certain_is_left_to_the_real_recipe(tree: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    source.refuse_typos(recipe_file.read(file))


def test_words_are_judged_like_the_file(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"the command line: model\.num_layer is not a key"):
        source.refuse_typos(recipe_file.read(None, ("model.num_layer=2",)))


def test_a_recipe_that_is_none_is_told_with_its_kin(tree: Path) -> None:
    assert set(source.recipes()) == {
        *("vanilla_gpt_pretrain_config", "llama3_8b_pretrain_2gpu_config", "llama3_8b_sft_config"),
        "llama3_8b_pretrain_config",
    }
    source.refuse_unknown_recipe("llama3_8b_pretrain_config")
    for name, near in (
        ("llama_foo", "`llama3_8b_pretrain_config` or `llama3_8b_pretrain_2gpu_config`"),
        ("vanila_gpt_pretrain_config", "`vanilla_gpt_pretrain_config`"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"there is no recipe `{name}`")) as caught:
            source.refuse_unknown_recipe(name)
        assert f"did you mean {near}?" in str(caught.value)


def test_recipes_that_need_no_hub_are_listed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert source.asks_hub("llama3_8b_pretrain_config"), "by another name, through another function"
    assert source.hub_free() == ["vanilla_gpt_pretrain_config"]
    assert cli.main(["nemo", "--list"]) == 0
    assert capsys.readouterr().out == "vanilla_gpt_pretrain_config\n"


def test_nothing_is_claimed_where_bridge_is_not_installed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_roots", list)
    source.refuse_unknown_recipe("nope")
    source.refuse_typos(recipe_file.read(None, ("modle.num_layers=2",)))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["model.num_layer=2"], "model.num_layer is not a key of model"),
        (["recipe=llama_foo"], "there is no recipe `llama_foo`"),
        (["--drill-fault", "nann:step=3"], "'nann:step=3' is not KIND:step=N"),
    ],
)
def test_the_command_tells_slips_before_bridge(
    tree: Path, tmp_path: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("dataset: {mock: true}\n")
    assert cli.main(["nemo", str(file), *argv]) == 2
    assert says in capsys.readouterr().err
    assert "megatron.bridge" not in sys.modules


def test_a_hub_that_does_not_answer_is_said_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (hub.OFFLINE, "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listening.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub.offline_if_unreachable() is None
        assert hub.OFFLINE not in os.environ
    began = time.monotonic()
    assert "127.0.0.1 can't be reached (Connection refused)" in (hub.offline_if_unreachable() or "")
    assert time.monotonic() - began < 2 * hub.WAIT_S
    assert os.environ.pop(hub.OFFLINE) == "1"
    monkeypatch.setenv(hub.OFFLINE, "1")
    assert hub.offline_if_unreachable() is None
