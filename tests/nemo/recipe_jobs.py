"""Jobs of the recipe runner, for the template of `tests.nemo.jobs`."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from megatron_stability.errors import UsageError
from tests.dist.pool import Context


def complaints(context: Context, folder: Path, cases: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    """What the runner says of each recipe (YAML text and words); `fine` where it would train."""
    from megatron_stability.nemo.pretrain import Job

    answers = []
    for number, (text, words) in enumerate(cases):
        file = folder / f"{number}.yaml"
        file.write_text(text)
        try:
            Job(file, words, cpu=True).build()
            answers.append("fine")
        except UsageError as error:
            answers.append(str(error).replace(str(file), "FILE"))
    return answers


def shown(context: Context, file: Path, words: Sequence[str], scale_down: bool) -> tuple[dict, str]:
    """What `--dry-run` prints: as YAML, and as text."""
    from megatron_stability.nemo import pretrain

    out = io.StringIO()
    pretrain.show(pretrain.Job(file, tuple(words), scale_down, cpu=True), 1, out)
    return yaml.safe_load(out.getvalue()), out.getvalue()


def shown_with(context: Context, environment: dict[str, str], file: Path, words: Sequence[str]) -> str:
    """As `shown`, with these variables set meanwhile: the text, and the settings that a bundle would hold."""
    from megatron_stability.ledger.bundle import plain_args
    from megatron_stability.ledger.entries import strict
    from megatron_stability.megatron.access import handle
    from megatron_stability.nemo.pretrain import Job

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setitem(sys.modules, "comet_ml", ModuleType("comet_ml"))  # Bridge only asks whether it is there
        text = shown(context, file, words, False)[1]
        job = Job(file, tuple(words), cpu=True)
        attached = job.attach(job.build())
        try:
            runtime = handle.installed()
            assert runtime is not None
            return text + str(strict(plain_args(runtime.host.arguments(runtime.host.args))))
        finally:
            attached.close()


def train(context: Context, file: Path, words: Sequence[str], scale_down: bool = False) -> int:
    """One rank of a recipe's run; its exit code."""
    from megatron_stability.nemo.pretrain import Job

    try:
        Job(file, tuple(words), scale_down, cpu=True).train()
    except SystemExit as ending:
        return int(ending.code or 0)
    return 0


def train_stock(context: Context, file: Path, words: Sequence[str]) -> int:
    """The same recipe by Bridge's own means; what a CPU needs is set by hand."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.recipes import vanilla_gpt_pretrain_config
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    container = process_config_with_overrides(vanilla_gpt_pretrain_config(), str(file), list(words))
    model = container.model
    model.transformer_layer_spec, model.transformer_impl = local_layer_spec, "local"
    container.dist.distributed_backend = "gloo"
    model.use_cpu_initialization = True
    for name in ("persist_layer_norm", "gradient_accumulation_fusion", "masked_softmax_fusion"):
        setattr(model, name, False)
    for name in ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion"):
        setattr(model, name, False)
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(container, forward_step)
    return 0


def transformer_engine(context: Context) -> tuple[bool, list[str]]:
    """Whether the module that needs the stand-in is there, and what is left of the stand-in."""
    left = [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]
    return "megatron.bridge.peft.lora_layers" in sys.modules, left
