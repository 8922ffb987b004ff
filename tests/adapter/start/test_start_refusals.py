"""What would be silent, wrong or an exception in mid-run is refused before a model is built, by its flag."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron import arguments
from megatron_stability.megatron.access.flags import cuda_graphs
from megatron_stability.megatron.observers import hooks

pytestmark = pytest.mark.megatron
PLAIN: dict[str, Any] = {"fp16": False, "context_parallel_size": 1, "expert_model_parallel_size": 1, "save": "out"}
PLAIN |= {"use_precision_aware_optimizer": False, "ckpt_format": "torch_dist", "dataloader_type": "single"}
CLIP = {"qk_clip": {"enabled": True}}
PROBE = {"qk_clip": {"enabled": True, "measure": "probe"}}
MONITOR = {"observe": {"attention": {"enabled": True}}}
SKETCH = {"observe": {"sketch": {"every": 10}}}
AWARE = {"use_precision_aware_optimizer": True}


def asked(tree: dict[str, Any], **flags: Any) -> str:
    """What the start says; empty where it goes on."""
    config, args = StabilityConfig.model_validate(tree), Namespace(**PLAIN | flags)
    try:
        arguments.refuse_what_cannot_work(config, args)
        hooks.refuse_what_cannot_work(config, args)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tree", [CLIP, PROBE, MONITOR], ids=["clip", "probe", "monitor"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"cuda_graph_impl": "transformer_engine"}, "--cuda-graph-impl transformer_engine"),
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration"),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph"),  # as a recipe of Bridge still has it
        ({"external_cuda_graph": True, "cuda_graph_impl": "none"}, "--external-cuda-graph"),
    ],
)
def test_case_52_attention_is_not_measured_in_a_replayed_graph(
    tree: dict[str, Any], flags: dict[str, Any], said: str
) -> None:
    name = "qk_clip.enabled" if "qk_clip" in tree else "observe.attention.enabled"
    sentence = asked(tree, **flags)
    assert f"{name} with {said}: " in sentence
    assert f"set {name} to false" in sentence
    assert ("no head clipped" in sentence) is ("qk_clip" in tree)
    assert asked({}, **flags) == asked(tree) == asked(tree, cuda_graph_impl="none") == ""


@pytest.mark.parametrize("modules", [["full_iteration"], [Namespace(name="full_iteration")]])
def test_a_graph_of_the_whole_step_is_known_under_every_name(modules: list[Any]) -> None:
    for name in ("cuda_graph_scope", "cuda_graph_modules"):
        assert cuda_graphs.whole_step(Namespace(**{name: modules}))
    assert cuda_graphs.whole_step(Namespace(cuda_graph_impl="full_iteration"))
    assert not cuda_graphs.whole_step(Namespace(cuda_graph_impl="local", cuda_graph_modules=None))


@pytest.mark.parametrize("flag", ["use_torch_fsdp2", "use_megatron_fsdp"])
def test_case_52_parts_of_weights_that_are_not_known_here(flag: str) -> None:
    for mode in ("observe", "act"):
        sentence = asked({"mode": mode}, **{flag: True})
        assert f"--{flag.replace('_', '-')} with --stability-mode {mode}" in sentence
        assert "use --use-distributed-optimizer, or --stability-mode off" in sentence


@pytest.mark.parametrize("tree", [CLIP, SKETCH], ids=["clip", "sketch"])
def test_masters_with_scales_of_their_own(tree: dict[str, Any]) -> None:
    assert "with --main-params-dtype float16: " in asked(tree, **AWARE, main_params_dtype=torch.float16)
    assert asked({}, **AWARE, main_params_dtype=torch.float16) == ""
    assert asked(tree, main_params_dtype=torch.float16) == ""  # without that optimizer it does nothing


def test_case_52_masters_kept_as_remainders_are_taken() -> None:
    assert asked(CLIP, **AWARE, main_params_dtype=torch.float32) == ""


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16])
def test_a_snapshot_of_moments_with_scales_beside_them(name: str, dtype: torch.dtype) -> None:
    rewinds = {"decide": {"snapshot_steps": 10, "rules": [RULE]}}
    sentence = asked(rewinds, **AWARE, **{name: dtype})
    assert f"--{name.replace('_', '-')} {dtype} with --stability-decide-snapshot-steps" in sentence
    assert asked(rewinds, **AWARE) == asked({"decide": {"rules": [RULE]}}, **AWARE, **{name: dtype}) == ""


RULE = {"detector": "non_finite", "tier": "non_finite", "action": "rewind", "generations": 1, "skip_steps": 1}


def test_more_tokens_than_rows() -> None:
    from megatron_stability.megatron.model.loss import real_vocab_size

    with pytest.raises(UsageError, match="the tokenizer has 300 tokens, and the model 256 vocabulary rows"):
        real_vocab_size(300, 256)
