"""Real runs of Megatron-Bridge on a pool's forked ranks: the template imports Bridge once, a job trains."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_stability.nemo.pretrain import Job
from tests.dist.pool import Context, import_megatron, torch_only
from tests.e2e.jobs import Probe

EXAMPLES = Path(__file__).parents[2] / "examples" / "nemo"
TP2 = {"model.tensor_model_parallel_size": 2}
PP2 = {"model.pipeline_model_parallel_size": 2}
SHARDED = {"ddp.use_distributed_optimizer": True, "optimizer.use_distributed_optimizer": True}


def bridge() -> None:
    """Prepare a template with Megatron-Bridge, its seams open, on the CPU backend."""
    torch_only()
    Job(EXAMPLES / "tiny_cpu.yaml", (), cpu=True).prepare()
    importlib.import_module("megatron.bridge.training.pretrain")
    import_megatron()
    importlib.import_module("megatron_stability.nemo.host")
    importlib.import_module("megatron_stability.nemo.checkpoint_manager")


def recipe(settings: Mapping[str, Any]) -> Any:
    """The small model of `tests.e2e.jobs.MODEL` as a container.

    Args:
        settings: by dotted key; they win.
    """
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config as c

    container = c.ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            seq_length=64,
            position_embedding_type="rope",
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            transformer_layer_spec=local_layer_spec,
            make_vocab_size_divisible_by=64,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            cross_entropy_loss_fusion=False,
            fp16_lm_cross_entropy=False,
        ),
        train=c.TrainingConfig(train_iters=4, global_batch_size=4, micro_batch_size=2),
        validation=c.ValidationConfig(eval_iters=0, eval_interval=1000),
        optimizer=c.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            bf16=True,
            weight_decay=0.01,
            clip_grad=1.0,
            use_distributed_optimizer=False,
        ),
        scheduler=c.SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=60,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=c.DistributedDataParallelConfig(
            use_distributed_optimizer=False, grad_reduce_in_fp32=True, check_for_nan_in_grad=True
        ),
        dataset=c.MockGPTDatasetConfig(
            random_seed=1234,
            seq_length=64,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=c.LoggerConfig(log_interval=1),
        tokenizer=c.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=c.CheckpointConfig(save_interval=1000, ckpt_format="torch_dist"),
        rng=c.RNGConfig(seed=1234),
        dist=c.DistributedInitConfig(distributed_backend="gloo"),
        mixed_precision="bf16_mixed",
    )
    for key, value in settings.items():
        *path, name = key.split(".")
        section = container
        for each in path:
            section = getattr(section, each)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return container


def train(
    context: Context,
    settings: Mapping[str, Any],
    stability: Mapping[str, Any] | None = None,
    drill_fault: tuple[str, ...] = (),
    probe: Probe | None = None,
) -> tuple[int, list[Any]]:
    """Train on this rank.

    Args:
        context: the rank.
        settings: see `recipe`.
        stability: the section of that name; None: stock.
        drill_fault: faults on purpose.
        probe: what looks on, if anything does.

    Returns:
        The exit code, and what the probe saw.
    """
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megatron_stability.config import StabilityConfig
    from megatron_stability.megatron.access import handle
    from megatron_stability.nemo import host

    container = recipe(settings)
    if stability is None:
        pretrain(container, forward_step)
        return 0, []
    attached = host.attach(container, StabilityConfig.model_validate(stability), drill_fault)
    runtime = handle.installed()
    assert runtime is not None
    if probe is not None:
        runtime.journal.sinks.append(probe)
        probe.begin(runtime)
    try:
        pretrain(container, attached.forward_step, callbacks=list(attached.callbacks))
        code = 0
    except SystemExit as ending:
        code = int(ending.code or 0)
    finally:
        attached.close()
    return code, [] if probe is None else probe.seen


def read(context: Context, save: Any, step: int) -> bytes:
    """A checkpoint's state, ours too, packed: its plain entries hold Megatron's classes."""
    from megatron_stability.nemo.checkpoint_manager import OWN
    from tests.e2e import artifacts

    folder = save / f"iter_{step:07d}"
    own = artifacts.read_folder(folder / OWN, excluded=())
    del own["megatron_stability"]  # the policy's budgets, which a rewind used
    return artifacts.pack(artifacts.read_folder(folder) | own)


def refusals(context: Context, cases: list[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """What `attach` says to each (settings, stability); empty where it takes them."""
    from megatron_stability.config import StabilityConfig
    from megatron_stability.errors import UsageError
    from megatron_stability.nemo import host

    def attempt(settings: Mapping[str, Any], stability: Mapping[str, Any]) -> str:
        try:
            host.attach(recipe(settings), StabilityConfig.model_validate(stability)).close()
        except UsageError as error:
            return str(error)
        return ""

    return [attempt(*case) for case in cases]


def partial_load(context: Context, stability: Mapping[str, Any]) -> list[str]:
    """How Bridge's load of a module ends within the manager's: a tensor is missing, an `_extra_state` is too many."""
    import torch
    from megatron.bridge.training.checkpointing import _load_model_state_dict

    from megatron_stability.config import StabilityConfig
    from megatron_stability.nemo import checkpoint_manager, host

    attached = host.attach(recipe({}), StabilityConfig.model_validate(stability))
    ends = []
    for name in ("bias", "core._extra_state"):
        module = torch.nn.Linear(2, 2)
        state = module.state_dict()
        state |= {name: torch.zeros(1)} if name not in state else {}
        if name == "bias":
            del state["bias"]
        try:
            with checkpoint_manager._strictly([module]):
                _load_model_state_dict(module, state, True)
            ends.append("loaded")
        except SystemExit as ending:
            ends.append(f"code {ending.code}")
        assert "load_state_dict" not in vars(module)
    attached.close()
    return ends
