"""Small GPT models with emulated FP8 on a pool's Megatron ranks: steps of Megatron's own schedule, with our hook."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_stability.config import StabilityConfig
from megatron_stability.numerics.config import Model
from megatron_stability.numerics.fp8.config import Fp8
from tests.dist.model import prevention_models as small
from tests.dist.pool import Context

MICRO_BATCHES = 2


class Run:
    """This rank's model, optimizer and hook; `step` trains one step and returns the hook's signals."""

    def __init__(self, context: Context, where: dict[str, Any], fp8: Fp8, folder: str, weights: Any = None) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from megatron_stability.megatron.access import handle
        from megatron_stability.megatron.fp8.hook import Fp8Hook

        if handle.installed() is None:
            handle.install(SimpleNamespace(config=StabilityConfig(fp8=fp8)))  # type: ignore[arg-type]
        where = where | {"more": where["more"] | {"bf16": True, "params_dtype": torch.bfloat16}}
        where["more"]["pipeline_dtype"] = torch.bfloat16
        self.chunks = small.build(context, where, Model(), weights)
        config = self.chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        inner = [Float16Module(config, chunk) for chunk in self.chunks]
        ddp = DistributedDataParallelConfig()
        self.model = [DistributedDataParallel(config, ddp, chunk) for chunk in inner]
        options = OptimizerConfig(lr=0.005, bf16=True, params_dtype=torch.bfloat16, weight_decay=0.0)
        self.optimizer = get_megatron_optimizer(options, self.model)
        args = Namespace(iteration=0)
        self.hook = Fp8Hook(fp8, self.model, torch.device("cpu"), Path(folder), args)
        self.data = torch.Generator().manual_seed(7 + context.rank // (where["tp"] * where["pp"]))
        self.losses: list[float] = []
        self.number = 0
        self.scale_loss: Callable[[int], float] = lambda step: 1.0

    def batch(self) -> Tensor:
        return torch.randint(0, small.VOCAB, (2, small.SEQUENCE), generator=self.data)

    def step(self, update: bool = True) -> dict[str, float]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.number += 1
        self.hook.step_begins(self.number)
        batches = [self.batch() for _ in range(MICRO_BATCHES)]
        factor = self.scale_loss(self.number)

        def forward_step(iterator: Any, chunk: Any) -> Any:
            tokens = next(iterator)
            output = chunk(tokens, small.positions(tokens), None, labels=(tokens * 3 + 1) % small.VOCAB)

            def loss(out: Tensor) -> Any:
                self.losses.append(float(out.detach().float().mean()))
                return out.float().mean() * factor, {}

            return output, loss

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches) if len(self.model) == 1 else [iter(batches) for _ in self.model],
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=small.SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        signals = {name: float(value) for name, value in self.hook.observe().items()}
        if update:
            self.optimizer.step()
        self.hook.update_done(SimpleNamespace(step=self.number), update)  # type: ignore[arg-type]
        return signals

    def amax(self) -> dict[str, float]:
        return dict(zip(map(str, self.hook.sites), self.hook.step_amax.view(-1).tolist(), strict=True))

    def scales(self) -> dict[str, float]:
        return dict(zip(map(str, self.hook.sites), self.hook.scale.view(-1).tolist(), strict=True))
