"""The nvdlfw-inspect feature behind `megatron_stability.transformer_engine.sampled`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper

from megatron_stability.transformer_engine.sampled import TENSORS, Samples, wanted


@Registry.register_feature(namespace="transformer_engine")
class StabilityFp8Stats(TEConfigAPIMapper):
    """Counts what FP8 quantization did, every `every` steps."""

    def __init__(self) -> None:
        """nvdlfw-inspect makes one, without arguments."""
        self.collected = Samples()

    @api_method
    def inspect_tensor_enabled(
        self, config: Mapping[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int]:
        """Whether to look in this step, and the next one in which to ask again."""
        return wanted(iteration, config["every"])

    @api_method
    def inspect_tensor(
        self,
        config: Mapping[str, Any],
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tp_group: Any,
        tensor: Any,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
        tp_size: int = 1,
    ) -> None:
        """A tensor, and what TE made of it."""
        self.collected.take(layer_name, TENSORS[tensor_name], tensor, rowwise_quantized_tensor, quantizer)
