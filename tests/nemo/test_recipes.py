"""The runner of NeMo YAML recipes: every trap of Bridge's merge is an error, and the recipes train."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stability import cli
from megatron_stability.errors import UsageError
from megatron_stability.nemo.recipe import recipe_file
from tests.dist.pool import Pool
from tests.e2e import artifacts
from tests.nemo import jobs, recipe_jobs

pytestmark = pytest.mark.nemo

EXAMPLES = jobs.EXAMPLES
MOCK = "dataset: {mock: true}\n"
SHAPE = "model:\n  num_layers: 2\n  hidden_size: 64\n  num_attention_heads: 4\n"
# (YAML, words, what the error must hold); the first block: Bridge would log a line and go on, or say nothing.
REFUSED = (
    ("modle: {num_layers: 2}", "modle is not a key of a recipe; did you mean `model`?"),
    ("quux: 1", "the sections are recipe, stability, scale_down"),
    ("model: {num_layer: 2}", "FILE: model.num_layer is not a key of GPTModelProvider; did you mean `num_layers`?"),
    ("num_layers: 2", "did you mean `model.num_layers`?"),
    ("optimizer: {_private: 2}", "optimizer._private is not a key"),
    ("model: {transformer_layer_spec: x.y}", "choose norms and softcaps under `stability.model`"),
    ("model: {transformer_layer_spec: {_target_: megatron.core.x}}", "under `stability.model`"),
    ("dataset: {sequence_length: 8}", "is overwritten by Bridge from dataset.seq_length; set that"),
    ("train: {train_iters: '20'}", "train.train_iters = '20': must be int"),
    ("train: {train_iters: 2.0e+1}", "train.train_iters = 20.0: must be int"),
    ("optimizer: {lr: '1e-4'}", "and this is text"),
    ("optimizer: {lr: true}", "optimizer.lr = True: must be float"),
    ("model: {qk_layernorm: 1}", "model.qk_layernorm = 1: must be bool"),
    ("model: 3", "model = 3"),
    ("model: null", "model = None"),
    ("tensor_inspect: {enabled: true}", "_target_: megatron.bridge.training.config.TensorInspectConfig"),
    ("mixed_precision: bf16_mixd", "did you mean `bf16_mixed`?"),
    ("mixed_precision: {bf16: true}", "MixedPrecisionConfig"),
    ("model: {activation_func: sillu}", "is not an activation"),
    ("model: {attention_backend: flsh}", "must be flash or"),
    ("model: {params_dtype: float17}", "is not a dtype"),
    ("model: {init_method: normal}", "model.init_method"),
    ("mixed_precision: {_target_: os.system}", "os.system"),
    ("ft: {_target_: megatron.bridge.training.config.FaultToleranceConfig, nope: 1}", "ft.nope is not an argument of"),
    ("train: {train_iters: '${nowhere.at.all}'}", "nowhere"),
    ("model: {num_layers: 2}\nmodel: {num_layers: 3}", "line 2: is not valid YAML"),
    ("- 1", "holds a list"),
    ("on: 3", "True is not a key of a recipe"),
    ("1: {a: 2}", "1 is not a key of a recipe"),
    ("model.num_layers: 2", "as model: {num_layers: ...}"),
    (MOCK + "checkpoint: {save: '???'}", "checkpoint.save is `???`"),
    (MOCK + SHAPE + "  _target_: megatron.nowhere.Model", "and a GPTModelProvider would stay"),
    ("a: [", "is not valid YAML"),
    ("recipe: vanila_gpt_pretrain_config", "did you mean `vanilla_gpt_pretrain_config`?"),
    ("recipe: 1", "is not the name of a recipe function"),
    ("stability: {detect: {loss_spke: {k: 3}}}", "stability.detect.loss_spke is not a known key"),
    ("stability: {mode: acting}", "stability.mode = 'acting'"),
    ("stability: on", "stability: holds a bool"),
    ("{}", "dataset: no data"),
    (MOCK + "scale_down: {model: {num_layer: 2}}", "FILE: scale_down: model.num_layer is not a key"),
    (MOCK + "scale_down: {stability: {mode: act, modus: 1}}", "stability.modus is not a known key"),
    (MOCK + "scale_down: 3", "has no scale_down section of keys"),
    ("dataset: {mock: true, data_path: x}", "would train on mock data; drop one"),
    ("dataset: {data_path: nowhere/corpus}\n" + SHAPE, "nowhere/corpus.idx does not exist"),
    (MOCK + SHAPE + "  qk_clip: true", "use stability.qk_clip.enabled instead"),
    (MOCK, "model.num_layers 0: must be at least 1"),
    (MOCK + SHAPE + "  num_query_groups: 3", "is not a multiple of model.num_query_groups 3"),
    (MOCK + SHAPE + "logger: {log_interval: 0}", "logger.log_interval 0: must be at least 1"),
    (MOCK + SHAPE + "optimizer: {lr: .nan}", "optimizer.lr nan: is not a number"),
    (MOCK + SHAPE + "checkpoint: {save: /dev/null/x}", "checkpoint.save /dev/null/x: /dev/null is not a folder"),
    (MOCK + SHAPE + "mixed_precision: null", "set optimizer.bf16=false"),
    (MOCK + SHAPE + "mixed_precision: bf16_with_fp8_delayed_scaling_mixed", "would train in BF16"),
    (
        MOCK + SHAPE + "  tensor_model_parallel_size: 2",
        "model.tensor_model_parallel_size 2 needs a multiple of 2 ranks, and this run has 1 rank",
    ),
)
WORDS = (
    (("model.num_layer=2",), "the command line: model.num_layer is not a key of GPTModelProvider; did you mean"),
    (("+model.quux=2",), "model.quux is not a key"),
    (("~model.num_layers",), "can't be deleted"),
    (("model.num_layers=2,3",), "is a sweep"),
    (("model.num_layers",), "is not key=value"),
    (("--model.num_layers=2",), "unknown flag --model.num_layers=2"),
    (("train.train_iters=2e1",), "must be int"),
    (("recipe=nope",), "there is no recipe `nope`"),
    (("recipe=llama_foo",), "did you mean `llama"),
    (("scale_down.model.num_layers=2",), "give the keys themselves"),
    (("stability.modus=off",), "stability.modus is not a known key; did you mean `mode`?"),
)


def test_what_bridge_would_drop_revert_or_misread_is_refused(bridge: Pool, tmp_path: Path) -> None:
    cases = [(text, ()) for text, _ in REFUSED] + [(MOCK, words) for words, _ in WORDS]
    wanted = [message for _, message in (*REFUSED, *WORDS)]
    answers = bridge.run(recipe_jobs.complaints, tmp_path, cases, world=1)[0]
    wrong = [
        f"{case}: {answer!r} lacks {message!r}"
        for case, answer, message in zip(cases, answers, wanted, strict=True)
        if message not in answer
    ]
    assert not wrong, "\n".join(wrong)


def test_precedence_is_command_line_over_scale_down_over_yaml_over_recipe(bridge: Pool, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "stability: {detect: {loss_spike: {k: 7}}, mode: observe}\n"
        "dataset: {mock: true, seq_length: 32}\ntokenizer: {vocab_file: null}\n"
        "train: {train_iters: 40, global_batch_size: 8}\n"
        "model: {num_layers: 3, hidden_size: 32, num_attention_heads: 2, vocab_size: 128,"
        " pipeline_dtype: torch.float32, attention_backend: unfused, activation_func: silu,"
        " seq_length: '${dataset.seq_length}'}\n"
        "scale_down: {model: {num_layers: 2}, train: {train_iters: 20}, stability: {detect: {loss_spike: {k: 8}}}}\n"
    )
    words = ("train.train_iters=5", "stability.mode=act")
    shown, text = bridge.run(recipe_jobs.shown, file, words, True, world=1)[0]
    assert (shown["train"]["train_iters"], shown["train"]["global_batch_size"]) == (5, 8)
    assert (shown["model"]["num_layers"], shown["model"]["seq_length"]) == (2, 32)
    assert "unfused" in str(shown["model"]["attention_backend"])
    assert "float32" in str(shown["model"]["pipeline_dtype"])
    assert "_target_" in str(shown["model"]["pipeline_dtype"])
    assert (shown["stability"]["mode"], shown["stability"]["detect"]["loss_spike"]["k"]) == ("act", 8)
    assert shown["dist"]["distributed_backend"] == "gloo"  # the CPU backend's
    assert "# mode act" in text
    assert "# the CPU backend sets dist.distributed_backend: gloo (not nccl)" in text


def test_no_secret_of_a_recipe_is_printed_or_bundled(bridge: Pool, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "stability: {mode: act}\ndataset: {mock: true}\ntrain: {train_iters: 5}\n"
        "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, vocab_size: 128}\n"
        "logger: {comet_api_key: planted-in-the-file, wandb_entity: '${oc.env:SITE_THING}',"
        " wandb_exp_name: 'run of ${oc.env:SITE_TOKEN}'}\n"
    )
    environment = {"SITE_THING": "u7Yq-55xAmZp0", "SITE_TOKEN": "planted-in-a-variable"}
    text = bridge.run(recipe_jobs.shown_with, environment, file, (), world=1)[0]
    assert not [secret for secret in (*environment.values(), "planted-in-the-file") if secret in text]
    assert "comet_api_key: '***'" in text
    assert "run of ***" in text
    assert "# logger.comet_api_key holds a secret" in text


def test_aliases_that_stand_for_too_much_are_a_sentence(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    (tmp_path / "r.yaml").write_text("\n".join([*lines, "mode: *a8"]))
    with pytest.raises(UsageError, match=r"r\.yaml, line .*: .*its aliases stand for more than"):
        recipe_file.read(tmp_path / "r.yaml")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_recipes_are_accepted_whole_and_small(bridge: Pool, tmp_path: Path, file: Path) -> None:
    text = file.read_text()
    whole = "fp8" not in file.stem  # FP8 is refused where there is no Transformer Engine
    small = text.partition("scale_down:")[2] != ""
    if whole:
        words = () if "mock" in text.partition("scale_down:")[0] else ("dataset.mock=true",)
        answer = bridge.run(recipe_jobs.complaints, tmp_path, [(text, words)], world=1)[0]
        assert answer == ["fine"] or "ranks, and this run has 1 rank" in answer[0]
    if small:
        shown, _ = bridge.run(recipe_jobs.shown, file, (), True, world=1)[0]
        assert shown["model"]["hidden_size"] == 64
        if file.stem == "llama3_8b_fp8_delayed":  # a named precision would put its own history of 1 over the model's
            precision = shown["mixed_precision"]
            assert (precision["fp8_amax_history_len"], precision["fp8_amax_compute_algo"]) == (1024, "max")
            assert precision["bf16"] is True


def losses(folder: Path) -> list[float]:
    return [value for _, value in artifacts.scalars(folder)["lm loss"]]


def test_tiny_cpu_learns(bridge: Pool, tmp_path: Path) -> None:
    words = (f"logger.tensorboard_dir={tmp_path}", f"stability.record.dir={tmp_path / 'stability'}")
    assert bridge.run(recipe_jobs.train, EXAMPLES / "tiny_cpu.yaml", words, world=1) == [0]
    seen = losses(tmp_path)
    assert len(seen) == 20
    assert seen[-1] < seen[0] - 1.0


def test_without_a_stability_section_mode_off_is_stock_bridge_to_the_bit(bridge: Pool, tmp_path: Path) -> None:
    text = (EXAMPLES / "tiny_cpu.yaml").read_text()
    file, stock = tmp_path / "plain.yaml", tmp_path / "stock.yaml"
    plain = "model:" + text.partition("\nmodel:")[2]
    file.write_text("recipe: vanilla_gpt_pretrain_config\n" + plain)
    stock.write_text(plain)
    words = ["train.train_iters=4"]
    for job, recipe, folder in ((recipe_jobs.train, file, "ours"), (recipe_jobs.train_stock, stock, "theirs")):
        bridge.run(job, recipe, [*words, f"logger.tensorboard_dir={tmp_path / folder}"], world=1)
    ours, theirs = (artifacts.scalars(tmp_path / folder) for folder in ("ours", "theirs"))
    assert len(ours["lm loss"]) == 4
    for tag in ("lm loss", "grad-norm"):
        assert ours[tag] == theirs[tag]


def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(bridge: Pool, tmp_path: Path) -> None:
    def train(name: str, *words: str) -> None:
        folder = tmp_path / name
        own = (
            "checkpoint.save_interval=2",
            f"logger.tensorboard_dir={folder}",
            f"stability.record.dir={folder / 'own'}",
        )
        iterations = ("train.train_iters=4", "model.hidden_dropout=0.1")
        assert bridge.run(recipe_jobs.train, EXAMPLES / "tiny_cpu.yaml", (*own, *iterations, *words), world=1) == [0]

    train("whole", f"checkpoint.save={tmp_path / 'a'}")
    train("half", f"checkpoint.save={tmp_path / 'b'}", "train.exit_interval=2")
    train("resumed", f"checkpoint.save={tmp_path / 'b'}", f"checkpoint.load={tmp_path / 'b'}")
    whole, half, resumed = (artifacts.scalars(tmp_path / name) for name in ("whole", "half", "resumed"))
    for tag in ("lm loss", "grad-norm"):
        assert [step for step, _ in resumed[tag]] == [3, 4]
        assert half[tag] + resumed[tag] == whole[tag]


def test_the_stand_in_for_transformer_engine_is_gone_after_the_import(bridge: Pool) -> None:
    assert bridge.run(recipe_jobs.transformer_engine, world=1) == [(True, [])]


UNREADABLE = (
    ("3", "holds one value, not a mapping of sections"),
    ("model: [1, 2]", "model is a list"),
    ("scale_down: {train: [1]}", "scale_down: train is a list"),
    ("model: ${nowhere}", "model is a reference"),
    ("recipe: '???'", "recipe is a reference or `???`"),
    ("scale_down: ${nowhere}", "scale_down is a reference"),
    ("model: {num_layers: '${'}", "is not valid YAML"),
)


@pytest.mark.parametrize(("text", "message"), UNREADABLE)
def test_a_section_that_is_none_is_refused_before_bridge_is_there(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        recipe_file.read(file)


def test_what_a_save_s_workers_import_again_is_light() -> None:
    """They are spawned, and import the runner as `__main__`: with torch it would be seconds in each, at every save."""
    code = (
        "import sys, megatron_stability.nemo.pretrain; sys.exit(any(m in sys.modules for m in ('torch', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


COMMANDS = (
    (["none.yaml"], "cannot be read"),
    (["RECIPE", "--nproc-per-node", "0"], "start at least one rank"),
    (["RECIPE", "--nproc-per-nod", "2"], "unknown flag --nproc-per-nod"),
    (["RECIPE", "--scale-down"], "has no scale_down section of keys"),
    (["RECIPE", "stability.mod=act"], "did you mean `mode`?"),
    (["RECIPE", "--supervise", "3"], "give checkpoint.save"),
    (["RECIPE", "--supervise", "-1", "checkpoint.save=x"], "give the restarts"),
    (["RECIPE", "--"], "after -- stands the command"),
    (["RECIPE", "--", "torchrum"], "torchrum after --: there is no such command"),
    ([], "RECIPE.yaml"),
)


@pytest.mark.parametrize(("argv", "message"), COMMANDS)
def test_a_bad_command_is_one_sentence_before_the_slow_imports(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {num_layers: 2}\n")
    assert cli.main(["nemo", *(str(recipe) if word == "RECIPE" else word for word in argv)]) == 2
    assert message in capsys.readouterr().err
    assert "megatron.bridge" not in sys.modules


def test_the_command_that_starts_ranks_gets_the_whole_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("scale_down: {model: {num_layers: 2}}\n")
    seen = tmp_path / "seen"
    starter = tmp_path / "starter"
    starter.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}\nexit 7\n')
    starter.chmod(0o700)
    argv = [str(recipe), "a.b=1", "--scale-down", "--drill-fault", "nan:step=3", "--", str(starter), "--nnodes", "2"]
    assert cli.main(["nemo", *argv]) == 7
    flags = ["--config-file", str(recipe), "--scale-down", "--drill-fault", "nan:step=3", "a.b=1"]
    assert seen.read_text().split() == ["--nnodes", "2", "-m", "megatron_stability.nemo.pretrain", *flags]
