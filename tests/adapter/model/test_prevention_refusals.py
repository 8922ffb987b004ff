"""What the `model` settings can't be with is refused by both names, before anything is built; TE's softcap argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ci import prevention_table
from ci.prevention_table import arguments
from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.access.flags.argument_table import OWN_SPEC
from megatron_stability.megatron.model import settings
from megatron_stability.megatron.model.attention import transformer_engine_attention
from megatron_stability.numerics.config import Init, Model

pytestmark = pytest.mark.megatron


WHOLE, CAP, FLEX = Model(qk_norm="rmsnorm_whole"), Model(attention_softcap=50.0), "attention_softcap_kernel"
FLEXED = CAP.model_copy(update={FLEX: "flex"})
REFUSED: list[tuple[Model, dict[str, Any], str, str]] = [
    (WHOLE, {"tensor_model_parallel_size": 4}, "qk-norm rmsnorm_whole", "--tensor-model-parallel-size 4"),
    (WHOLE, {"spec": None}, "qk-norm", "no --spec"),
    (CAP, {"spec": ["local"]}, "attention-softcap", "--spec local"),
    (WHOLE, {"qk_l2_norm": True}, "qk-norm", "--qk-l2-norm"),
    (CAP, {"multi_latent_attention": True}, "attention-softcap", "--multi-latent-attention"),
    (CAP, {"experimental_attention_variant": "dsa"}, "attention-softcap", "--experimental-attention-variant"),
    (CAP, {"mtp_num_layers": 1, "stability_own_model": False}, "attention-softcap", "--mtp-num-layers"),
    (CAP, {"transformer_impl": "inference_optimized"}, "attention-softcap", "--transformer-impl"),
    (CAP.model_copy(update={FLEX: "dense"}), {"transformer_impl": "transformer_engine"}, "dense", "--transformer-impl"),
    (FLEXED, {"attention_dropout": 0.1}, "flex", "--attention-dropout"),
    (FLEXED, {"context_parallel_size": 2}, "flex", "--context-parallel-size"),
    (Model(z_loss=1e-4), {"cross_entropy_loss_fusion": True}, "z-loss", "--cross-entropy-loss-fusion"),
    (Model(final_softcap=30.0), {"cross_entropy_loss_fusion": True}, "final-softcap", "--cross-entropy-loss-fusion"),
    (Model(z_loss=1e-4), {"fp16_lm_cross_entropy": True}, "z-loss", "--fp16-lm-cross-entropy"),
    (Model(qk_norm_scale=2.0), {}, "qk-norm-scale", "--stability-model-qk-norm none"),
    (Model(init=Init(embedding="d_model")), {"use_mup": True}, "init-embedding", "--use-mup"),
    (Model(init=Init(qk="d_model")), {"use_mup": True}, "init-qk", "--use-mup"),
    (Model(init=Init(qk="d_model")), {"tensor_model_parallel_size": 4}, "init-qk", "--tensor-model-parallel-size 4"),
    (
        Model(init=Init(embedding="d_model")),
        {"embedding_init_method_std": 0.02},
        "init-embedding",
        "--embedding-init-method-std",
    ),
    (WHOLE, {"num_attention_heads": 6, "tensor_model_parallel_size": 4}, "qk-norm", "--tensor-model-parallel-size 4"),
    (FLEXED, {"softmax_type": "learnable"}, "flex", "--softmax-type learnable"),
    (FLEXED, {"create_attention_mask_in_dataloader": True}, "flex", "attention mask from the data loader"),
    (FLEXED, {"distributed_backend": "gloo"}, "flex", "--distributed-backend gloo"),
    (Model(z_loss=1e-4), {"cuda_graph_impl": "full_iteration"}, "z-loss", "--cuda-graph-impl full_iteration"),
    (Model(final_softcap=30.0), {"cuda_graph_scope": ["full_iteration"]}, "final-softcap", "full_iteration"),
    (Model(final_softcap=30.0), {"cuda_graph_modules": ["full_iteration"]}, "final-softcap", "full_iteration"),
    (FLEXED, {"sft": True}, "flex", "--sft"),
    (
        Model(embedding_norm_clip=1.0),
        {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
        "embedding-norm-clip",
        "--main-params-dtype float16",
    ),
    (Model(embedding_norm_clip=1.0), {"fp8_param_gather": True}, "embedding-norm-clip", "--fp8-param-gather"),
]


@pytest.mark.parametrize(("model", "changes", "ours", "theirs"), REFUSED, ids=[f"{o}+{t}" for _, _, o, t in REFUSED])
def test_a_pair_that_cannot_work_is_named(model: Model, changes: dict[str, Any], ours: str, theirs: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings.refuse_what_cannot_work(StabilityConfig(model=model), arguments(**changes))
    assert ours in str(caught.value)
    assert theirs in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"group_query_attention": False, "num_query_groups": 1, "tensor_model_parallel_size": 2},
        {"spec": list(OWN_SPEC)},
        {"spec": ["megatron_stability"]},
    ],
    ids=["attention without groups", "the two names of the spec", "its one name"],
)
@pytest.mark.parametrize("model", [WHOLE, Model(init=Init(qk="d_model"))], ids=["whole", "init"])
def test_what_works_is_let_through(model: Model, changes: dict[str, Any]) -> None:
    settings.refuse_what_cannot_work(StabilityConfig(model=model), arguments(**changes))


@pytest.mark.parametrize(
    ("model", "tree", "theirs"),
    [
        (Model(qk_norm="rms_no_gain"), {"qk_clip": {"enabled": True}}, "--stability-qk-clip-enabled"),
        (FLEXED, {"qk_clip": {"enabled": True}}, "--stability-qk-clip-measure forward"),
        (FLEXED, {"observe": {"attention": {"enabled": True}}}, "--stability-qk-clip-measure forward"),
    ],
)
def test_settings_of_the_plugin_that_exclude_each_other(model: Model, tree: dict[str, Any], theirs: str) -> None:
    with pytest.raises(UsageError, match=f"--stability-model-.* with {theirs}: "):
        settings.refuse_what_cannot_work(StabilityConfig(model=model, **tree), arguments())


@pytest.mark.parametrize("tree", [{"qk_clip": {"enabled": True}}, {"observe": {"attention": {"enabled": True}}}])
def test_transformer_engine_s_largest_logit_is_capped(tree: dict[str, Any]) -> None:
    """Its attention caps before it takes the maximum: no head would ever be hot under a cap below tau."""
    engine = arguments(transformer_impl="transformer_engine")
    with pytest.raises(
        UsageError, match=r"softcap-kernel auto with --stability-qk-clip-measure forward: .*use measure"
    ):
        settings.refuse_what_cannot_work(StabilityConfig(model=CAP, **tree), engine)
    tree = tree | {"qk_clip": tree.get("qk_clip", {}) | {"measure": "probe"}}
    settings.refuse_what_cannot_work(StabilityConfig(model=CAP, **tree), engine)
    settings.refuse_what_cannot_work(StabilityConfig(model=CAP, **tree), arguments())


@pytest.mark.parametrize("model", [WHOLE, CAP, Model(z_loss=1e-4), Model(init=Init(qk="d_model"))])
def test_mode_off_with_a_setting_is_refused(model: Model) -> None:
    with pytest.raises(UsageError, match=r"--stability-model-.* with --stability-mode off"):
        settings.refuse_what_cannot_work(StabilityConfig(mode="off", model=model), arguments())
    settings.refuse_what_cannot_work(StabilityConfig(mode="off"), arguments(spec=None))
    settings.refuse_what_cannot_work(StabilityConfig(model=model), arguments())


def test_arguments_that_megatron_acts_on() -> None:
    args = arguments()
    settings.apply(Model(qk_norm="rmsnorm_whole", init=Init(embedding="d_model")), args)
    assert args.qk_layernorm is True
    assert args.embedding_init_method_std == 1 / 8
    untouched = arguments()
    settings.apply(Model(), untouched)
    assert vars(untouched) == vars(arguments())


class EngineWithSoftcap:
    def __init__(self, heads: int, *, softcap: float = 0.0) -> None:
        self.heads, self.softcap = heads, softcap


class MegatronOverIt(EngineWithSoftcap):
    def __init__(self, config: int) -> None:
        super().__init__(config * 2)


class EngineWithout:
    def __init__(self, heads: int) -> None:
        self.heads = heads


class MegatronOverThat(EngineWithout):
    pass


def test_case_13_transformer_engine_gets_the_argument_or_the_run_stops() -> None:
    made = transformer_engine_attention(MegatronOverIt)(3, softcap=50.0)
    assert (made.heads, made.softcap) == (6, 50.0)
    assert isinstance(made, MegatronOverIt)
    assert MegatronOverIt(3).softcap == 0.0
    with pytest.raises(UsageError, match="has no `softcap`"):
        transformer_engine_attention(MegatronOverThat)
    with pytest.raises(UsageError, match="has no `softcap`"):
        transformer_engine_attention()  # none is installed here


def test_the_page_holds_the_table_that_the_refusals_make() -> None:
    assert prevention_table.main("--check") == 0
